"""The role monitoring on a machine with systemd: its own Prometheus runs, restarts when its files are newer, hides from the net."""

import json
import time

import pytest

from tests.host.conftest import give_old_systemd
from tests.host.fake_gpu import NVIDIA_SMI
from tests.host.machine import Machine
from tests.host.playbook import Played, play

UNITS = ("station-recipes-exporter", "station-recipes-prometheus")
DOCKER_WITH_ONE = "#!/bin/sh\necho 0123456789ab\n"


@pytest.fixture(scope="module")
def machine(base):
    """A fresh machine with a GPU."""
    with Machine("monitored", [base]) as booted:
        booted.write("/usr/bin/nvidia-smi", NVIDIA_SMI, 0o755)
        yield booted


@pytest.fixture(scope="module")
def apply(machine, tmp_path_factory):
    """apply("--check", monitoring_limits=…) → what the role did to the machine."""
    folder = tmp_path_factory.mktemp("play")

    def run(*options: str, **variables: object) -> Played:
        return play(folder, "monitoring", *options, **{**machine.inventory(), "monitoring_enabled": True, **variables})

    return run


def started(machine: Machine, unit: str) -> str:
    return machine.run("systemctl", "show", "--property=ExecMainPID", "--value", unit).stdout.strip()


def asked(machine: Machine, path: str) -> dict:
    question = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
    return json.loads(machine.run("python3", "-c", question, f"http://127.0.0.1:9490{path}").stdout)


def test_off_by_default_and_never_against_the_host(machine, apply):
    off = apply(monitoring_enabled=False)
    assert (off.code, off.changed) == (0, 0), off.text
    machine.write("/etc/dgx-release", 'DGX_PLATFORM="DGX Server for GALAXY-GB300"\n')
    assert "This is DGX OS, where nothing is installed unasked" in apply().text
    machine.run("rm", "/etc/dgx-release")
    machine.write("/usr/local/bin/docker", DOCKER_WITH_ONE, 0o755)
    assert "systemd has to reload its units, and 1 container(s) run" in apply().text
    machine.run("rm", "/usr/local/bin/docker")
    machine.write("/etc/systemd/system/prometheus.service", "[Service]\nExecStart=/opt/theirs\n")
    assert "a /etc/systemd/system/prometheus.service of somebody's own" in apply().text
    machine.run("rm", "/etc/systemd/system/prometheus.service")
    assert machine.run("which", "prometheus", check=False).returncode != 0


def test_a_fresh_machine_is_checked_converged_and_then_stays_as_it_is(machine, apply):
    checked = apply("--check")
    assert checked.code == 0, checked.text
    assert checked.changed > 5
    assert machine.run("which", "prometheus", check=False).returncode != 0
    converged = apply()
    assert converged.code == 0, converged.text
    pids = [started(machine, unit) for unit in UNITS]
    for options in ([], ["--check"]):
        again = apply(*options)
        assert (again.code, again.changed) == (0, 0), again.text
    assert [started(machine, unit) for unit in UNITS] == pids
    listening = machine.run("ss", "-Hltn").stdout
    assert "127.0.0.1:9490" in listening and "127.0.0.1:9491" in listening
    assert all("127.0.0.1:" in line for line in listening.splitlines()), listening
    for unit in UNITS:
        assert machine.run("systemctl", "is-enabled", unit).stdout.strip() == "enabled"
    assert machine.run("systemctl", "is-enabled", "prometheus", check=False).stdout.strip() == "masked"
    assert machine.run("systemctl", "is-active", "prometheus", check=False).stdout.strip() == "inactive"


def test_what_is_in_effect_decides_and_not_what_this_run_wrote(machine, apply):
    machine.run("systemctl", "stop", UNITS[1])
    revived = apply()
    assert (revived.code, revived.changed) == (0, 1), revived.text
    before = started(machine, UNITS[1])
    assert apply(monitoring_limit_waiting=7).code == 0
    assert started(machine, UNITS[1]) != before
    rules = json.dumps(asked(machine, "/api/v1/rules"))
    assert "vllm:num_requests_waiting) \\u003e 7" in rules or "vllm:num_requests_waiting) > 7" in rules
    deadline, jobs = time.monotonic() + 30, set()
    while jobs != {"vllm", "station"}:  # they are found a moment after it is ready
        assert time.monotonic() < deadline, jobs
        jobs = {each["labels"]["job"] for each in asked(machine, "/api/v1/targets")["data"]["activeTargets"]}


def test_an_old_systemd_tells_when_a_service_started_too(machine, apply):
    give_old_systemd(machine)
    try:
        assert apply().code == 0
        before = started(machine, UNITS[1])
        again = apply()
        assert (again.code, again.changed) == (0, 0), again.text
        assert started(machine, UNITS[1]) == before
        assert apply(monitoring_limit_waiting=8).code == 0
        assert started(machine, UNITS[1]) != before
    finally:
        machine.run("mv", "/usr/bin/systemctl.real", "/usr/bin/systemctl")


# Ends what runs apt, as a connection that breaks does, once dpkg is done.
BREAK = """DPkg::Post-Invoke { "test ! -e /run/break || { rm /run/break; kill -9 $(ps -o ppid= -p $PPID); }"; };\n"""


def test_an_installation_that_breaks_off_opens_no_port_to_the_net_and_the_next_run_completes(base, tmp_path):
    with Machine("broken-off", [base]) as machine:
        ours = {**machine.inventory(), "monitoring_enabled": True}
        machine.write("/etc/apt/apt.conf.d/99break", BREAK)
        machine.write("/run/break", "")
        broken = play(tmp_path, "monitoring", **ours)
        assert broken.code != 0, broken.text
        assert machine.run("dpkg-query", "-W", "-f=${Status}", "prometheus").stdout == "install ok installed"
        machine.kill()
        machine.boot()
        assert machine.run("ss", "-Hltn").stdout == ""
        assert not (machine.upper / "usr/sbin/policy-rc.d").exists(), (
            "it would keep every package's service from starting"
        )
        ours = {**machine.inventory(), "monitoring_enabled": True}
        completed = play(tmp_path, "monitoring", **ours)
        assert completed.code == 0, completed.text
        listening = machine.run("ss", "-Hltn").stdout
        assert "127.0.0.1:9490" in listening
        assert all("127.0.0.1:" in line for line in listening.splitlines()), listening
        again = play(tmp_path, "monitoring", **ours)
        assert (again.code, again.changed) == (0, 0), again.text


def test_no_unit_of_ours_waits_for_a_reload(machine):
    for unit in UNITS:
        shown = machine.run("systemctl", "show", "--property=NeedDaemonReload,ActiveState", unit).stdout
        assert "NeedDaemonReload=no" in shown and "ActiveState=active" in shown


def test_a_model_comes_to_the_machine_in_the_background(machine, tmp_path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    machine.write("/srv/model/config.json", "{}")
    ours = {"model_cache_source": "/srv/model", "model_cache_models": [{"repo": "maker/small", "revision": revision}]}
    ours |= {
        "model_cache_owner": 10001,
        "model_cache_group": 10001,
        "model_cache_keep_free_gb": 0.1,
        **machine.inventory(),
    }
    brought = play(tmp_path, "model_cache", **ours)
    assert brought.code == 0, brought.text
    finished = f"/var/lib/station-recipes/cache/models/maker--small/{revision}/config.json"
    assert machine.run("stat", "-c", "%u %a", finished).stdout.strip() == "10001 444"
