"""The whole story: a fresh machine, provisioned, serves a recipe in a container with the GPU, up to the verdict.

One machine for all of it, with all that can be had: monitoring, a model of a hub, a Grafana. Each test goes on where the
one before ended.
"""

import fnmatch
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from images.yaml_source import read_yaml
from tests.conftest import no_docker
from tests.docker.conftest import build
from tests.host.conftest import ROOT, Archive, Front, give_gpu
from tests.host.fake_gpu import UUID
from tests.host.machine import Machine
from tests.host.test_provision import CHANGES, changed, not_listed

BASE, MTP1 = "station-recipes-micro_base", "station-recipes-micro_mtp1"
URL = "http://127.0.0.1:8000"
DEVICE = f"nvidia.com/gpu={UUID}"
MODEL = {"repo": "maker/small", "revision": "0123456789abcdef0123456789abcdef01234567", "source": "/srv/model"}
# Streams that never leave the server without a request, until a file says so; then what each answer was.
LOAD = """
import json, pathlib, sys, threading, urllib.request
answers = []
def ask(first):
    length = first
    while not pathlib.Path("/run/enough").exists():
        body = {"model": "micro", "prompt": "1", "max_tokens": length, "temperature": 0, "ignore_eos": True}
        asked = urllib.request.Request("URL/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=300) as answer:
                answers.append([length, json.load(answer)["usage"]["completion_tokens"]])
        except Exception as error:
            answers.append([length, repr(error)])
            return
        length = 250
streams = [threading.Thread(target=ask, args=(100 * (number + 1),)) for number in range(3)]
[stream.start() for stream in streams]
[stream.join() for stream in streams]
print(json.dumps(answers))
""".replace("URL", URL)


@dataclass(frozen=True)
class Served:
    """A machine that was provisioned from nothing and told to serve; the image it got, its files before and after."""

    machine: Machine
    image: str
    files: dict[str, dict[str, str]]

    def started(self, name: str) -> str:
        """When the service's process started, and the container's id: neither may change."""
        told = self.machine.run("systemctl", "show", "--property=ExecMainStartTimestampMonotonic,MainPID", name).stdout
        return told + self.machine.run("docker", "ps", "--no-trunc", "--quiet", "--filter", f"name={name}").stdout

    def active(self, name: str) -> bool:
        return self.machine.run("systemctl", "is-active", name, check=False).stdout.strip() == "active"

    def kept(self) -> dict:
        return json.loads(self.machine.read("/var/lib/station-recipes/serving/services.json"))


@pytest.fixture(scope="module")
def serve(front: Front):
    """serve(machine, "micro/base", image, …) → what provision said; the container gets the GPU, though its engine needs none."""

    def run(machine: Machine, recipe: str, image: str, *options: str, **variables: object):
        arguments = ("--recipe", recipe, "--image", image, *options)
        return front("provision", machine, *arguments, station_device=DEVICE, monitoring_enabled=True, **variables)

    return run


@pytest.fixture(scope="module")
def story(base: Path, archive: Archive, front: Front, serve) -> Iterator[Served]:
    """Tell the story up to where the recipe is served."""
    reason = no_docker()
    if reason:
        pytest.skip(f"the engine's image comes from this host's Docker: {reason}")
    image = build().id
    with Machine("story", [base]) as machine:
        give_gpu(machine, archive)
        machine.run("mkdir", "-p", "/etc/grafana/provisioning/datasources", "/etc/grafana/provisioning/dashboards")
        machine.write("/srv/model/config.json", "{}")
        files = {"fresh": machine.state()}
        more = {"monitoring_enabled": True, "model_cache_models": [MODEL], "model_cache_keep_free_gb": 0.1}
        said = front("provision", machine, **more)
        assert said.code == 0, said.host["problem"]
        there = f"unix://{machine.root}/run/docker.sock"
        with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saved:
            subprocess.run(["docker", "-H", there, "load"], stdin=saved.stdout, check=True, capture_output=True)
        foretold = serve(machine, "micro/base", image, "--check")
        assert foretold.code == 0, foretold.host["problem"]
        assert any("would be started" in task or "Say what a check" in task for task in foretold.host["changed"])
        assert not (machine.upper / f"etc/systemd/system/{BASE}.service").exists()
        said = serve(machine, "micro/base", image)
        assert said.code == 0, said.host["problem"]
        files["served"] = machine.state()
        yield Served(machine, image, files)


@pytest.fixture
def by_ssh(story: Served, tmp_path: Path) -> dict[str, str]:
    """An environment whose ssh reaches the machine as `story`, through a pipe into a real sshd of it."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    story.machine.write("/run/keys", key.with_suffix(".pub").read_text(), 0o600)
    story.machine.run("sh", "-c", "mkdir -p /run/sshd && ssh-keygen -A")
    way = f"nsenter --target={story.machine.pid} --all /usr/sbin/sshd -i -o AuthorizedKeysFile=/run/keys -o StrictModes=no"
    config = tmp_path / "config"
    config.write_text(
        f"Host story\n  User root\n  IdentityFile {key}\n  ProxyCommand {way}\n  StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {config} "$@"\n')
    (tmp_path / "bin/ssh").chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def test_a_fresh_machine_serves_the_recipe_with_its_gpu_and_reproduces_the_claims_and_is_then_left_alone(
    story: Served, serve, by_ssh: dict[str, str], tmp_path: Path
):
    inside = story.machine.run
    assert story.active(BASE)
    # Told by the machine itself, by no part of ours.
    seen = json.loads(inside("docker", "inspect", BASE).stdout)[0]
    assert seen["Image"] == story.image
    assert seen["Config"]["User"] == "1000:1000"
    assert "FAKE_GPU=1" in inside("docker", "exec", BASE, "cat", "/proc/1/environ").stdout
    assert UUID in inside("docker", "exec", BASE, "nvidia-smi", "-L").stdout
    listening = {line.split()[3] for line in inside("ss", "-Hltn").stdout.splitlines()}
    told = {entry["address"] for entry in read_yaml(CHANGES).data["listens"]}
    assert {address for address in told if "?" not in address} <= listening
    assert [address for address in listening if not any(fnmatch.fnmatch(address, one) for one in told)] == []
    assert inside("stat", "-c", "%u", "/var/lib/station-recipes/cache").stdout.strip() == "1000"
    assert inside("systemctl", "is-enabled", BASE).stdout.strip() == "enabled"
    assert not_listed(story, "fresh", "served") == ""
    paths = changed(story.files["fresh"], story.files["served"])
    for entry in read_yaml(CHANGES).data["changes"]:
        if entry.get("sometimes", "with").startswith("with"):
            assert fnmatch.filter(paths, entry["path"]), entry
    before = story.started(BASE)

    # A network of its own: the only way from here to the machine is ssh.
    argv = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"', str(ROOT / "inv"), "bench"]
    argv += ["--recipe", "micro/base", "--host", "story", "--out", str(tmp_path / "runs"), "--json"]
    measured = subprocess.run(argv, capture_output=True, text=True, check=False, env=by_ssh)
    assert measured.returncode == 0, measured.stdout + measured.stderr
    verdict = json.loads(measured.stdout)
    assert verdict["state"] == "REPRODUCED"
    passed = {guard["id"] for guard in verdict["guards"] if guard["ok"]}
    assert {"live_argv", "live_env", "image_digest", "same_server", "finished", "quality_complete"} <= passed

    query = "http://127.0.0.1:9490/api/v1/query?query=vllm:generation_tokens_total"
    script = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
    series = json.loads(inside("python3", "-c", script, query).stdout)["data"]["result"]
    assert sum(float(each["value"][1]) for each in series) > 1000, "its own Prometheus has seen the measurement"

    again = serve(story.machine, "micro/base", story.image)
    assert (again.code, again.host["changed"]) == (0, []), again.host
    assert again.duration_s < 60
    check = serve(story.machine, "micro/base", story.image, "--check")
    assert (check.code, check.host["changed"]) == (0, []), check.host
    assert story.started(BASE) == before


def test_a_service_with_other_weights_or_none_is_not_measured(story: Served, by_ssh: dict[str, str], tmp_path: Path):
    def bench(recipe: str) -> str:
        argv = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"', str(ROOT / "inv"), "bench"]
        argv += ["--recipe", recipe, "--host", "story", "--out", str(tmp_path / "runs")]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=by_ssh)
        assert done.returncode != 0
        return done.stdout + done.stderr

    assert "no service of micro/mtp1 runs there" in bench("micro/mtp1")
    folder = story.kept()["current"]["model_path"]
    story.machine.run("sh", "-c", 'cp "$0/config.json" /run/kept && echo " " >>"$0/config.json"', folder)
    try:
        assert "the service's model is another: config.json differ" in bench("micro/base")
    finally:
        story.machine.run("cp", "/run/kept", f"{folder}/config.json")


def test_a_changed_recipe_waits_for_the_requests_in_flight_and_cuts_off_none(story: Served, serve):
    machine = story.machine
    load = ["nsenter", f"--target={machine.pid}", "--all", "--wd=/", "python3", "-c", LOAD]
    # A module of Ansible's lies in /tmp for as long as it runs.
    waits_3_s = ["find", "/tmp", "-maxdepth", "1", "-name", "ansible_engine_service_payload_*", "-mmin", "+0.05"]
    waited, over = threading.Event(), threading.Event()

    def let_go_when_it_has_waited() -> None:
        while not over.wait(0.2):
            if machine.run(*waits_3_s).stdout and story.active(BASE):
                waited.set()
                break
        machine.write("/run/enough", "")

    with subprocess.Popen(load, stdout=subprocess.PIPE, text=True) as streams:
        try:
            refused = serve(machine, "micro/mtp1", story.image, serving_drain_s=1)
            threading.Thread(target=let_go_when_it_has_waited, daemon=True).start()
            said = serve(machine, "micro/mtp1", story.image, serving_drain_s=300)
        finally:
            over.set()
            machine.write("/run/enough", "")
        answers = json.loads(streams.communicate(timeout=300)[0])
    assert refused.code == 1
    assert "requests are in flight. It serves on, untouched" in refused.host["problem"]
    assert said.code == 0, said.host["problem"]
    assert waited.is_set()
    assert answers
    assert [each for each in answers if each[0] != each[1]] == []
    assert story.active(MTP1)
    assert not story.active(BASE)
    assert not (machine.upper / f"etc/systemd/system/multi-user.target.wants/{BASE}.service").is_symlink()
    kept = story.kept()
    assert (kept["current"]["recipe"], kept["previous"]["recipe"]) == ("micro/mtp1", "micro/base")


def test_one_command_brings_back_the_service_before_with_its_lock(story: Served, front: Front):
    before = story.kept()
    said = front("provision", story.machine, "--rollback")
    assert said.code == 0, said.host["problem"]
    assert story.active(BASE)
    assert not story.active(MTP1)
    assert story.machine.read(f"/etc/systemd/system/{BASE}.service") == before["previous"]["unit"]
    assert story.kept() == {"current": before["previous"], "previous": before["current"]}
    assert story.kept()["current"]["lock"]["recipe"]["id"] == "micro/base"
