"""Tests on machines of their own: fresh ones, and ones that were provisioned before."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.host import fake_gpu
from tests.host.debs import SigningKey, build_deb
from tests.host.machine import Machine, base_machine

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = {"image_gb": 1, "weights_gb": 1}
TINY_IMAGE = "tiny:1"


@dataclass(frozen=True)
class Archive:
    """NVIDIA's archive as a test serves it: a folder, and the public half of its key."""

    folder: Path
    key: str


@dataclass(frozen=True)
class Said:
    """What a task of the front door said as JSON, its exit code and how long it took."""

    code: int
    hosts: dict
    duration_s: float
    stderr: str

    @property
    def host(self) -> dict:
        """The only host."""
        (only,) = self.hosts.values()
        return only


@pytest.fixture(scope="session")
def base() -> Path:
    """The machine as installed."""
    return base_machine()


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    """A small signed archive with a stub of nvidia-container-toolkit."""
    folder = tmp_path_factory.mktemp("nvidia")
    key = SigningKey(folder / "gnupg", "archive")
    (folder / "debs").mkdir()
    files = {"/usr/bin/nvidia-ctk": fake_gpu.nvidia_ctk("1.19.2"), fake_gpu.REFRESH: fake_gpu.REFRESH_UNIT}
    files["DEBIAN/postinst"] = fake_gpu.POSTINST
    build_deb(folder, "nvidia-container-toolkit", "1.19.2-1", files).rename(folder / "debs" / "toolkit.deb")
    key.sign(folder / "debs")
    return Archive(folder / "debs", key.public)


def give_gpu(machine: Machine, archive: Archive) -> None:
    """Put a fake GPU's driver in, and NVIDIA's archive where the machine can reach it."""
    machine.write("/usr/bin/nvidia-smi", fake_gpu.NVIDIA_SMI, 0o755)
    for file in archive.folder.iterdir():
        machine.write(f"/srv/nvidia/{file.name}", file.read_bytes())


def give_image(machine: Machine) -> None:
    """Import an image with a shell and nothing else."""
    script = "mkdir -p /run/tiny/bin && cp /usr/bin/busybox /run/tiny/bin/sh && cp /usr/bin/busybox /run/tiny/bin/sleep"
    machine.run("sh", "-c", f"{script} && tar -C /run/tiny -c . | docker import - $0", TINY_IMAGE)


def in_container(machine: Machine, device: str) -> subprocess.CompletedProcess:
    """Ask nvidia-smi in a container with a device, as no part of ours does it."""
    run = ["docker", "run", "--rm", "--network=none", f"--device=nvidia.com/gpu={device}"]
    return machine.run(*run, "--entrypoint=nvidia-smi", TINY_IMAGE, "-L", check=False)


def give_old_systemd(machine: Machine) -> None:
    """Let systemctl know no more of --timestamp= than that of Ubuntu 22.04 and Debian 11."""
    refusal = 'echo "Failed to parse timestamp style: ${argument#*=}" >&2; exit 1'
    script = f'#!/bin/sh\nfor argument; do case "$argument" in --timestamp=unix) {refusal} ;; esac; done\n'
    machine.run("mv", "/usr/bin/systemctl", "/usr/bin/systemctl.real")
    machine.write("/usr/bin/systemctl", f'{script}exec /usr/bin/systemctl.real "$@"\n', 0o755)


@pytest.fixture(scope="session")
def settings(archive: Archive) -> dict:
    """Variables of the roles that fit the test machines."""
    return {
        "preflight_wanted": SMALL,
        "preflight_probe_image": TINY_IMAGE,
        "container_toolkit_uri": "file:/srv/nvidia",
        "container_toolkit_key": archive.key,
    }


Front = Callable[..., Said]


@pytest.fixture(scope="session")
def front(settings: dict, tmp_path_factory: pytest.TempPathFactory) -> Front:
    """front("provision", machine, "--check", docker_host_install="never") → what it said."""

    def run(task: str, *machines_and_options: Machine | str, **variables: object) -> Said:
        machines = [each for each in machines_and_options if isinstance(each, Machine)]
        options = [each for each in machines_and_options if isinstance(each, str)]
        return ask(task, {each.name: each.inventory() for each in machines}, options, {**settings, **variables})

    def ask(task: str, hosts: dict, options: list[str], variables: dict) -> Said:
        inventory = tmp_path_factory.mktemp("inventory") / "hosts.yml"
        inventory.write_text(json.dumps({"all": {"hosts": hosts, "vars": variables}}))
        started = time.monotonic()
        argv = [str(ROOT / "inv"), task, "--inventory", str(inventory), "--json", *options]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        said = json.loads(done.stdout)
        return Said(done.returncode, said["hosts"], time.monotonic() - started, done.stderr)

    run.ask = ask
    return run


Ended = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def ended(settings: dict, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """ended("provision", machine, when=condition) → status and output of a run that is killed once the condition holds."""

    def run(
        task: str,
        machine: Machine,
        *options: str,
        when: Callable[[], object],
        by: signal.Signals = signal.SIGKILL,
        **variables: object,
    ) -> tuple[int, str]:
        inventory = tmp_path_factory.mktemp("inventory") / "hosts.yml"
        hosts = {"hosts": {machine.name: machine.inventory()}, "vars": {**settings, **variables}}
        inventory.write_text(json.dumps({"all": hosts}))
        argv = [str(ROOT / "inv"), task, "--inventory", str(inventory), *options]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(argv, start_new_session=True, **pipes) as process:
            while not when():
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.05)
            os.killpg(process.pid, by)
            said = process.communicate(timeout=60)[0]
        return process.returncode, said

    return run


@pytest.fixture
def fresh(base: Path, archive: Archive) -> Iterator[Machine]:
    """A fresh machine with a GPU, and no Docker."""
    with Machine("fresh", [base]) as machine:
        give_gpu(machine, archive)
        yield machine


@pytest.fixture(scope="session")
def provisioned_layers(base: Path, archive: Archive, front: Front) -> Iterator[list[Path]]:
    """The layers of a machine that was provisioned and then shut down in order."""
    with Machine("first", [base]) as machine:
        give_gpu(machine, archive)
        said = front("provision", machine)
        assert said.code == 0, said.host["problem"]
        machine.shut_down()
        yield [machine.upper, base]


@pytest.fixture
def provisioned(provisioned_layers: list[Path]) -> Iterator[Machine]:
    """A machine that was provisioned before."""
    with Machine("second", provisioned_layers) as machine:
        yield machine
