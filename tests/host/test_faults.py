"""What goes wrong on hosts: each fault ends in one message or in nothing at all, and a second run completes."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.host.conftest import TINY_IMAGE, Archive, Ended, Front, give_gpu, give_image, in_container
from tests.host.debs import SigningKey, build_deb
from tests.host.fake_gpu import DRIVER, UUID
from tests.host.machine import Machine

DAEMON_JSON = "/etc/docker/daemon.json"
FOREIGN = {"log-opts": {"max-size": "10m"}, "features": {"buildkit": True}, "insecure-registries": ["10.0.0.1:5000"]}
DOCKER_ONLY = {"container_toolkit_install": "never", "preflight_profile": "cpu"}


def settings_of(machine: Machine) -> dict:
    """daemon.json as Docker reads it."""
    return json.loads(machine.read(DAEMON_JSON))


def cdi_is_on(machine: Machine) -> bool:
    """Whether Docker says so itself."""
    return bool(json.loads(machine.run("docker", "info", "--format", "{{json .CDISpecDirs}}").stdout))


def unprovision(machine: Machine, settings: dict | str) -> None:
    """Docker as somebody else set it up: other settings, no CDI."""
    machine.write(DAEMON_JSON, settings if isinstance(settings, str) else json.dumps(settings))
    if not isinstance(settings, str):
        machine.run("systemctl", "restart", "docker")
        assert not cdi_is_on(machine)


def test_foreign_settings_of_docker_stay_and_the_file_before_is_kept(provisioned: Machine, front: Front):
    unprovision(provisioned, FOREIGN)
    said = front("provision", provisioned)
    assert said.code == 0, said.host["problem"]
    assert settings_of(provisioned) == {**FOREIGN, "features": {"buildkit": True, "cdi": True}}
    assert cdi_is_on(provisioned)
    (kept,) = provisioned.run("sh", "-c", f"ls {DAEMON_JSON}.*").stdout.split()
    assert json.loads(provisioned.read(kept)) == FOREIGN
    assert '+        "cdi": true' in "".join(said.host["diffs"])
    assert front("provision", provisioned).host["changed"] == []


def test_a_broken_daemon_json_is_named_and_nothing_is_changed(fresh: Machine, front: Front):
    unprovision(fresh, '{"features": {')
    before = fresh.state()
    said = front("provision", fresh)
    assert said.code == 1
    assert "daemon_json: found not JSON" in said.host["problem"]
    assert "mend /etc/docker/daemon.json by hand" in said.host["problem"]
    assert fresh.read(DAEMON_JSON) == '{"features": {'
    touched = {path for path in fresh.state().keys() - before.keys() if "docker" in path}
    assert touched == set()


def test_a_restart_that_failed_is_made_up_for_by_the_next_run(provisioned: Machine, front: Front):
    unprovision(provisioned, FOREIGN)
    stop = "[Service]\nExecStartPre=/usr/bin/test ! -e /run/no-docker\nRestart=no\n"
    provisioned.write("/etc/systemd/system/docker.service.d/fails.conf", stop)
    provisioned.run("systemctl", "daemon-reload")
    provisioned.write("/run/no-docker", "")
    said = front("provision", provisioned)
    assert said.code == 1
    assert "Docker did not start. Its log ends:" in said.host["problem"]
    assert settings_of(provisioned)["features"]["cdi"] is True
    provisioned.run("rm", "/run/no-docker")
    provisioned.run("systemctl", "stop", "docker.socket", "docker")  # else the next question would start it
    said = front("provision", provisioned)
    assert said.code == 0, said.host["problem"]
    assert said.host["changed"] == ["docker_host: Restart Docker's unit"]
    assert cdi_is_on(provisioned)


def test_settings_that_are_in_the_file_but_not_in_effect_need_a_restart_and_nothing_else(
    provisioned: Machine, front: Front
):
    unprovision(provisioned, FOREIGN)
    provisioned.write(DAEMON_JSON, json.dumps({"features": {"cdi": True}}))
    said = front("provision", provisioned)
    assert said.host["changed"] == ["docker_host: Restart Docker's unit"]
    assert cdi_is_on(provisioned)


def test_a_restart_that_would_kill_a_container_is_refused_until_it_is_allowed(provisioned: Machine, front: Front):
    unprovision(provisioned, FOREIGN)
    give_image(provisioned)
    run = ["docker", "run", "--detach", "--name=theirs", "--network=none", "--entrypoint=sleep", TINY_IMAGE, "600"]
    provisioned.run(*run)
    said = front("provision", provisioned)
    assert said.code == 1
    assert "it would kill: theirs" in said.host["problem"]
    assert settings_of(provisioned) == FOREIGN
    assert "theirs" in provisioned.run("docker", "ps").stdout
    said = front("provision", provisioned, docker_host_restart_with_containers=True)
    assert said.code == 0, said.host["problem"]
    assert cdi_is_on(provisioned)


def test_a_setting_that_docker_s_unit_sets_by_a_flag_is_reported_and_not_written(provisioned: Machine, front: Front):
    flag = "[Service]\nExecStart=\nExecStart=/usr/sbin/dockerd -H fd:// --log-driver=local\n"
    provisioned.write("/etc/systemd/system/docker.service.d/flag.conf", flag)
    provisioned.run("systemctl", "daemon-reload")
    provisioned.run("systemctl", "restart", "docker")
    said = front("provision", provisioned, docker_host_settings={"log-driver": "journald"})
    assert said.code == 1
    assert "Docker's unit sets log-driver by a flag" in said.host["problem"]
    assert "log-driver" not in settings_of(provisioned)


def test_a_docker_newer_than_ours_is_left_as_it_is(provisioned: Machine, front: Front):
    script = """cd /run && dpkg-deb -R /srv/debian/docker.io_*.deb t && sed -i 's/^Version: .*/Version: 99.1/' t/DEBIAN/control
        sed -i '/^Installed-Size/d' t/DEBIAN/control && dpkg-deb -Znone -b t new.deb && dpkg -i new.deb"""
    provisioned.run("sh", "-ec", script)
    said = front("provision", provisioned)
    assert said.code == 0, said.host["problem"]
    assert said.host["changed"] == []
    assert provisioned.run("dpkg-query", "-W", "-f=${Version}", "docker.io").stdout == "99.1"


# Docker's packages as another source has them: docker.io and it can't be there both.
ELSEWHERE = """cd /run && rm -rf t && dpkg-deb -R /srv/debian/docker.io_*.deb t
sed -Ei '/^(Installed-Size|Breaks|Conflicts|Replaces|Provides|Recommends|Suggests|Enhances):/d' t/DEBIAN/control
sed -i 's/^Package: .*/Package: docker-ce\\nConflicts: docker.io\\nReplaces: docker.io/' t/DEBIAN/control
dpkg-deb -Znone -b t new.deb && dpkg -i new.deb && systemctl start docker"""


def test_a_docker_of_another_source_is_never_replaced_by_debian_s(provisioned: Machine, front: Front, tmp_path: Path):
    provisioned.run("sh", "-ec", ELSEWHERE)
    half = build_deb(tmp_path, "halfway", "1", {"/usr/bin/halfway": "#!/bin/sh\n"})
    provisioned.write("/run/halfway.deb", half.read_bytes())
    provisioned.run("dpkg", "--unpack", "/run/halfway.deb")
    said = front("provision", provisioned)
    assert said.code == 0, said.host["problem"]
    assert said.host["changed"] == ["docker_host: Finish what was left half installed"]
    assert provisioned.run("dpkg-query", "-W", "-f=${Status}", "docker-ce").stdout == "install ok installed"
    provisioned.run("dpkg", "--purge", "docker-cli")
    said = front("provision", provisioned)
    assert said.code == 1
    assert "is here without its client, and it is not the package docker.io" in said.host["problem"]
    assert provisioned.run("dpkg-query", "-W", "-f=${Status}", "docker-ce").stdout == "install ok installed"


def test_a_fresh_machine_whose_apt_has_read_no_index_gets_docker_with_its_client(fresh: Machine, front: Front):
    fresh.run("sh", "-c", "rm -rf /var/lib/apt/lists/* && touch /var/lib/apt/lists")
    foretold = front("provision", fresh, "--check", **DOCKER_ONLY)
    assert foretold.code == 0, foretold.host["problem"]
    assert "docker_host: Foretell Docker's packages" in foretold.host["changed"]
    said = front("provision", fresh, **DOCKER_ONLY)
    assert said.code == 0, said.host["problem"]
    assert cdi_is_on(fresh)
    for options in ((), ("--check",)):
        assert front("provision", fresh, *options, **DOCKER_ONLY).host["changed"] == []


def test_a_docker_without_its_client_gets_it_and_no_container_is_killed_for_it(provisioned: Machine, front: Front):
    unprovision(provisioned, FOREIGN)
    give_image(provisioned)
    run = ["docker", "run", "--detach", "--name=theirs", "--network=none", "--entrypoint=sleep", TINY_IMAGE, "600"]
    provisioned.run(*run)
    provisioned.run("dpkg", "--purge", "docker-cli")
    said = front("provision", provisioned)
    assert said.code == 1
    assert said.host["changed"] == ["docker_host: Install Docker's packages"]
    assert "it would kill: theirs" in said.host["problem"]
    assert "theirs" in provisioned.run("docker", "ps").stdout
    provisioned.run("docker", "rm", "--force", "theirs")
    said = front("provision", provisioned)
    assert said.code == 0, said.host["problem"]


def test_the_disk_that_is_judged_is_the_one_docker_keeps_images_on(provisioned: Machine, front: Front):
    provisioned.run("sh", "-ec", "mkdir -p /srv/docker && mount -t tmpfs -o size=200m tmpfs /srv/docker")
    unprovision(provisioned, {"data-root": "/srv/docker"})
    disk = next(each for each in front("doctor", provisioned).host["findings"] if each["id"] == "disk_image")
    assert (disk["ok"], disk["found"]) == (False, "0.2 GB free for /srv/docker")


def test_a_stale_cdi_spec_is_written_anew_and_a_hand_made_one_is_left_alone(provisioned: Machine, front: Front):
    spec = provisioned.read("/var/run/cdi/nvidia.yaml")
    provisioned.write("/var/run/cdi/nvidia.yaml", spec.replace(DRIVER, "580.95.05"))
    said = front("provision", provisioned)
    assert said.code == 0, said.host["problem"]
    assert said.host["changed"] == ["container_toolkit: Let the package's service write it"]
    assert provisioned.read("/var/run/cdi/nvidia.yaml") == spec
    provisioned.write("/etc/cdi/mine.yaml", spec.replace(DRIVER, "580.95.05"))
    looked = {each["id"]: each for each in front("doctor", provisioned).host["findings"]}
    assert looked["cdi_fresh"]["ok"] is False
    assert looked["cdi_shadowed"]["ok"] is False
    assert "/etc/cdi/mine.yaml" in looked["cdi_shadowed"]["found"]
    assert front("provision", provisioned).host["changed"] == []
    assert "580.95.05" in provisioned.read("/etc/cdi/mine.yaml")


def test_caches_of_others_are_named_and_left_as_they_are(provisioned: Machine, front: Front):
    theirs = "/home/cache-of-alice"
    hold = f"mkdir -p {theirs}/huggingface/hub && echo 1 >{theirs}/huggingface/hub/blob && chown -R 1234:1234 {theirs}"
    provisioned.run("sh", "-c", hold)
    before = {path: kind for path, kind in provisioned.state().items() if path.startswith("/home")}
    said = front("provision", provisioned, "--set", f"station_cache={theirs}/huggingface")
    assert said.code == 1
    assert (
        f"{theirs}/huggingface: found uid 1234, wanted 1000, the engine's. It is left as it is" in said.host["problem"]
    )
    owner = next(each for each in said.host["findings"] if each["id"] == "cache_owner")
    assert (owner["ok"], owner["found"][:8]) == (False, "uid 1234")
    assert front("provision", provisioned).host["changed"] == []
    assert {path: kind for path, kind in provisioned.state().items() if path.startswith("/home")} == before


def test_a_disk_that_is_nearly_full_is_told_before_a_byte_comes_and_the_next_run_completes(
    provisioned: Machine, front: Front
):
    small = "mount -t tmpfs -o size=40m,mode=755 tmpfs /var/lib/station-recipes && head -c 20000000 /dev/zero >$0"
    provisioned.run("sh", "-ec", small, "/var/lib/station-recipes/full")
    provisioned.run("sh", "-ec", "mkdir -p /srv/model && head -c 30000000 /dev/zero >/srv/model/weights.bin")
    model = {"repo": "maker/small", "revision": "0123456789abcdef0123456789abcdef01234567", "source": "/srv/model"}
    wanted = {"model_cache_models": [model], "model_cache_keep_free_gb": 0}
    said = front("provision", provisioned, **wanted)
    assert said.code == 1
    assert "free, wanted 30.0 MB: 30.0 MB to come" in said.host["problem"]
    assert "nothing was fetched" in said.host["problem"]
    disk = next(each for each in said.host["findings"] if each["id"] == "disk_weights")
    assert (disk["ok"], disk["found"]) == (False, "0 GB free for /var/lib/station-recipes/cache")
    assert provisioned.run("find", "/var/lib/station-recipes/cache", "-type", "f", "-size", "+1k").stdout == ""
    provisioned.run("rm", "/var/lib/station-recipes/full")
    said = front("provision", provisioned, **wanted)
    assert said.code == 0, said.host["problem"]
    there = f"/var/lib/station-recipes/cache/models/maker--small/{model['revision']}/weights.bin"
    assert provisioned.run("stat", "-c", "%s", there).stdout.strip() == "30000000"


def test_a_pending_reboot_is_left_with_its_reason_and_never_done(provisioned: Machine, front: Front):
    up_since = provisioned.run("stat", "-c", "%Y", "/proc/1").stdout
    provisioned.write("/run/reboot-required.pkgs", "linux-image-6.17\n")
    provisioned.write("/run/reboot-required", "")
    said = front("provision", provisioned)
    assert (said.code, said.host["changed"]) == (0, [])
    assert said.host["reboot_required"] == ["reboot: pending, for linux-image-6.17"]
    assert provisioned.run("stat", "-c", "%Y", "/proc/1").stdout == up_since


@pytest.fixture
def without_toolkit(provisioned: Machine) -> Machine:
    """Docker, a GPU, and no container toolkit; apt knows no archive that has it."""
    provisioned.run("apt-get", "-qy", "purge", "nvidia-container-toolkit")
    provisioned.run("sh", "-c", "rm -rf /etc/apt/sources.list.d/nvidia* /etc/apt/keyrings/nvidia* /var/run/cdi")
    provisioned.run("apt-get", "-q", "update")
    return provisioned


def test_apt_s_lock_is_waited_for(without_toolkit: Machine, front: Front):
    hold = "import fcntl,os,time; f=open('/var/lib/dpkg/lock-frontend','w'); fcntl.lockf(f,fcntl.LOCK_EX); "
    hold += "open('/run/held','w')\nwhile not os.path.exists('/run/let-go'): time.sleep(0.1)"
    holder = ["nsenter", f"--target={without_toolkit.pid}", "--all", "python3", "-c", hold]
    with subprocess.Popen(holder):
        try:
            while without_toolkit.run("test", "-e", "/run/held", check=False).returncode:
                time.sleep(0.1)
            said = front("provision", without_toolkit, container_toolkit_lock_timeout_s=1)
            assert said.code == 1
            assert "lock" in said.host["problem"].lower()
            threading.Timer(12, without_toolkit.write, ("/run/let-go", "")).start()
            said = front("provision", without_toolkit)
        finally:
            without_toolkit.write("/run/let-go", "")
    assert said.code == 0, said.host["problem"]
    assert without_toolkit.run("nvidia-ctk", "--version").stdout


def test_nvidia_s_archive_is_added_by_an_ansible_that_has_a_python_of_its_own_as_on_this_machine(
    without_toolkit: Machine, front: Front, settings: dict
):
    without_toolkit.run("apt-get", "-qy", "purge", "python3-debian")
    without_toolkit.run("python3", "-m", "venv", "--without-pip", "/opt/own")
    hosts = {"own": {**without_toolkit.inventory(), "ansible_python_interpreter": "/opt/own/bin/python3"}}
    foretold = front.ask("provision", hosts, ["--check"], settings)
    assert "container_toolkit: Foretell the archive" in foretold.host["changed"]
    said = front.ask("provision", hosts, [], settings)
    assert said.code == 0, said.host["problem"]
    assert "container_toolkit: Add the archive" in said.host["changed"]
    assert front.ask("provision", hosts, [], settings).host["changed"] == []


def test_an_archive_that_is_there_with_a_keyring_of_its_own_is_taken_as_it_is(
    without_toolkit: Machine, front: Front, archive: Archive, tmp_path: Path
):
    # Theirs is signed by their key, which ours is not; adding ours beside it would break apt.
    key = SigningKey(tmp_path / "gnupg", "theirs")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for deb in archive.folder.glob("*.deb"):
        (theirs / deb.name).write_bytes(deb.read_bytes())
    key.sign(theirs)
    for file in theirs.iterdir():
        without_toolkit.write(f"/srv/nvidia/{file.name}", file.read_bytes())
    without_toolkit.write("/usr/share/keyrings/theirs.asc", key.public)
    listed = "deb [signed-by=/usr/share/keyrings/theirs.asc] file:/srv/nvidia /\n"
    without_toolkit.write("/etc/apt/sources.list.d/theirs.list", listed)
    said = front("provision", without_toolkit)
    assert said.code == 0, said.host["problem"]
    assert "container_toolkit: Add the archive" not in said.host["changed"]
    assert without_toolkit.run("sh", "-c", "ls /etc/apt/sources.list.d").stdout.split() == [
        "debian.sources",
        "theirs.list",
    ]
    give_image(without_toolkit)
    assert UUID in in_container(without_toolkit, UUID).stdout


def test_an_archive_with_two_keys_is_reported_before_apt_breaks_on_it(without_toolkit: Machine, front: Front):
    for name in ("one", "two"):
        listed = f"deb [signed-by=/usr/share/keyrings/{name}.asc] file:/srv/nvidia /\n"
        without_toolkit.write(f"/etc/apt/sources.list.d/{name}.list", listed)
    said = front("provision", without_toolkit)
    assert said.code == 1
    assert "/etc/apt/sources.list.d/one.list, /etc/apt/sources.list.d/two.list" in said.host["problem"]
    assert "Keep one of the files" in said.host["problem"]


def test_dgx_os_is_validated_and_nothing_is_installed_or_written(fresh: Machine, front: Front):
    fresh.write("/etc/dgx-release", 'DGX_PLATFORM="DGX Server for DGX B200"\n')
    before = fresh.state()
    said = front("provision", fresh)
    assert said.code == 1
    assert "Nothing is installed or written here (DGX OS)" in said.host["problem"]
    assert said.host["changed"] == []
    new = fresh.state().keys() - before.keys()
    assert not {path for path in new if path.startswith(("/etc", "/usr")) and not path.endswith(".pyc")}
    assert fresh.run("dockerd", "--version", check=False).returncode == 127


def unpacking(machine: Machine) -> bool:
    """Whether dpkg has begun to unpack Docker."""
    return bool(list((machine.upper / "usr/sbin").glob("dockerd*")))


class PowerCut:
    """Ends a machine or a connection as soon as dpkg has begun to unpack Docker."""

    def __init__(self, machine: Machine, end) -> None:
        self._thread = threading.Thread(target=self._wait, args=(machine, end))

    def _wait(self, machine: Machine, end) -> None:
        deadline = time.monotonic() + 300
        while not unpacking(machine) and time.monotonic() < deadline:
            time.sleep(0.05)
        end()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def test_a_machine_that_goes_down_in_the_middle_is_completed_by_the_next_run(fresh: Machine, front: Front):
    with PowerCut(fresh, fresh.kill):
        said = front("provision", fresh, **DOCKER_ONLY)
    assert said.code == 1
    assert said.host["problem"]
    fresh.boot()
    assert fresh.run("dpkg", "--audit").stdout
    said = front("provision", fresh, **DOCKER_ONLY)
    assert said.code == 0, said.host["problem"]
    assert cdi_is_on(fresh)
    assert fresh.run("dpkg", "--audit").stdout == ""


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_a_run_that_is_ended_in_the_middle_says_so_and_the_next_run_completes(
    fresh: Machine, front: Front, ended: Ended, by: signal.Signals
):
    status, said = ended("provision", fresh, when=lambda: unpacking(fresh), by=by, **DOCKER_ONLY)
    if by is signal.SIGINT:
        assert status == 1
        assert said.rstrip().endswith("interrupted")
        assert "Traceback" not in said
    again = front("provision", fresh, **DOCKER_ONLY)
    assert again.code == 0, again.host["problem"]
    assert cdi_is_on(fresh)
    assert fresh.run("dpkg", "--audit").stdout == ""


def test_two_runs_at_once_on_a_host_end_well_both(fresh: Machine, front: Front):
    with ThreadPoolExecutor(2) as both:
        runs = [both.submit(front, "provision", fresh) for _ in range(2)]
    for run in runs:
        assert run.result().code == 0, run.result().host["problem"]
    assert cdi_is_on(fresh)
    assert front("provision", fresh).host["changed"] == []


@pytest.fixture
def by_ssh(fresh: Machine, tmp_path: Path) -> Iterator[dict]:
    """The same machine through a real sshd; the way there is a pipe, since it has a network of its own."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    fresh.write("/run/keys", key.with_suffix(".pub").read_text(), 0o600)
    fresh.run("sh", "-c", "mkdir -p /run/sshd && ssh-keygen -A")
    way = f"nsenter --target={fresh.pid} --all /usr/sbin/sshd -i -o AuthorizedKeysFile=/run/keys -o StrictModes=no"
    options = (
        f"-i {key} -o UserKnownHostsFile={tmp_path}/known -o StrictHostKeyChecking=accept-new -o ProxyCommand='{way}'"
    )
    yield {"ansible_host": "station.test", "ansible_user": "root", "ansible_ssh_common_args": options}


def test_a_connection_that_breaks_in_the_middle_is_told_and_the_next_run_completes(
    fresh: Machine, front: Front, by_ssh: dict, settings: dict
):
    def cut() -> None:
        fresh.run("sh", "-c", "kill -9 $(pgrep -x 'sshd|sshd-session|sshd-auth')", check=False)

    variables = {**settings, **DOCKER_ONLY}
    with PowerCut(fresh, cut):
        said = front.ask("provision", {"station": by_ssh}, [], variables)
    assert said.code == 1
    assert said.hosts["station"]["reached"] is False
    said = front.ask("provision", {"station": by_ssh}, [], variables)
    assert said.code == 0, said.hosts["station"]["problem"]
    assert cdi_is_on(fresh)


def test_several_hosts_fail_each_for_itself_and_are_told_in_one_table(
    base: Path, archive: Archive, provisioned: Machine, front: Front, settings: dict, tmp_path: Path
):
    with Machine("broken", [base]) as broken:
        give_gpu(broken, archive)
        broken.write(DAEMON_JSON, "[]")
        nobody = {"ansible_host": "127.0.0.1", "ansible_port": 5400}
        hosts = {"good": provisioned.inventory(), "broken": broken.inventory(), "gone": nobody}
        said = front.ask("provision", hosts, [], settings)
        assert said.code == 1
        assert said.hosts["good"]["problem"] is None
        assert "a list, not an object" in said.hosts["broken"]["problem"]
        assert said.hosts["broken"]["reached"] is True
        assert said.hosts["gone"]["reached"] is False
        looked = front.ask("doctor", hosts, [], settings)
        assert looked.code == 1
        assert {name: bool(host["findings"]) for name, host in looked.hosts.items()} == {
            "good": True,
            "broken": True,
            "gone": False,
        }
