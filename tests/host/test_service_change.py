"""What is served is changed: a new unit is read, and what breaks off meanwhile is completed by the same command again.

The engine is a stand-in that starts at once: what is proved is the way there, which Ansible, systemd and Docker go.
test_story.py goes it with the real one.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host.conftest import Ended, Front, give_old_systemd
from tests.host.machine import Machine
from tests.host.test_story import Served

UNITS, THEIRS = "/etc/systemd/system", "station-recipes-theirs_base"
ENGINE = """#!/usr/bin/python3
import json, signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Engine(BaseHTTPRequestHandler):
    def say(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.say("vllm:num_requests_running 0\\nvllm:num_requests_waiting 0\\n")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.say(json.dumps({"model": asked["model"], "usage": {"completion_tokens": asked["max_tokens"]}}))

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Engine).serve_forever()
"""
IMPORT = """cd /run/engine
cp -a --parents /bin /lib /lib64 /usr/lib64 /usr/bin/python3* /usr/lib/python3* /usr/lib/*-linux-gnu .
tar -c . | docker import --change 'ENV PATH=/usr/local/bin:/usr/bin' - engine:1"""


@pytest.fixture(scope="module")
def served(provisioned_layers: list[Path], front: Front) -> Iterator[Served]:
    """A machine that serves micro/base, and served micro/mtp1 before."""
    with Machine("served", provisioned_layers) as machine:
        machine.write("/run/engine/usr/local/bin/vllm", ENGINE, 0o755)
        served = Served(machine, machine.run("sh", "-ec", IMPORT).stdout.strip(), {})
        for recipe in ("micro/mtp1", "micro/base"):
            said = front("provision", machine, "--recipe", recipe, "--image", served.image)
            assert said.code == 0, said.host["problem"]
        yield served


def names(served: Served) -> tuple[str, str]:
    """The services that the machine serves and served before, by its record; the first runs, the second doesn't."""
    kept = served.kept()
    now, before = kept["current"]["name"], kept["previous"]["name"]
    assert (served.active(now), served.active(before)) == (True, False)
    return now, before


def test_a_change_that_was_killed_after_the_stop_is_completed_and_the_service_before_is_not_lost(
    served: Served, front: Front, ended: Ended
):
    now, before = names(served)
    again = ("--recipe", served.kept()["previous"]["recipe"], "--image", served.image)
    ended("provision", served.machine, *again, when=lambda: not served.active(now))
    assert not served.active(before)
    said = front("provision", served.machine, *again)
    assert said.code == 0, said.host["problem"]
    assert names(served) == (before, now)


def test_a_rollback_that_was_killed_in_the_middle_is_gone_on_with_and_not_turned_round(
    served: Served, front: Front, ended: Ended
):
    kept, (now, before) = served.kept(), names(served)
    ended("provision", served.machine, "--rollback", when=lambda: served.kept() != kept)
    assert not served.active(now)
    for expected in ((before, now), (now, before)):  # the second time returns
        said = front("provision", served.machine, "--rollback")
        assert said.code == 0, said.host["problem"]
        assert names(served) == expected
    assert served.kept() == kept


@pytest.fixture
def theirs(served: Served) -> Iterator[dict[str, str]]:
    """A unit that somebody rendered, copied and enabled by hand, as its header says; it answers where ours does."""
    now = names(served)[0]
    unit = served.machine.read(f"{UNITS}/{now}.service").replace(now, THEIRS)
    served.machine.write(f"{UNITS}/{THEIRS}.service", unit)
    served.machine.run("systemctl", "enable", "--no-reload", THEIRS)
    yield
    served.machine.run("sh", "-c", f"rm -f {UNITS}/{THEIRS}.service {UNITS}/multi-user.target.wants/{THEIRS}.service")


def test_a_unit_that_somebody_installed_is_named_where_it_has_the_port_and_else_left_alone(
    served: Served, front: Front, theirs: None
):
    machine, (now, before) = served.machine, names(served)
    started, file = served.started(now), f"{UNITS}/{THEIRS}.service"
    for recipe in (served.kept()["current"]["recipe"], served.kept()["previous"]["recipe"]):
        said = front("provision", machine, "--recipe", recipe, "--image", served.image)
        assert said.code == 1
        assert f"somebody else has its port: {THEIRS}.service. It was not provisioned here" in said.host["problem"]
        assert served.started(now) == started
    machine.run("sed", "-i", "s/--port 8000/--port 8001/", file)
    unit = machine.read(file)
    said = front("provision", machine, "--rollback")
    assert said.code == 0, said.host["problem"]
    assert names(served) == (before, now)
    assert machine.read(file) == unit
    assert machine.run("systemctl", "is-enabled", THEIRS).stdout.strip() == "enabled"


def test_a_changed_unit_of_the_same_name_is_read_once_it_is_stopped_and_no_container_of_others_runs(
    served: Served, front: Front
):
    machine, name = served.machine, names(served)[0]
    before, recipe = served.started(name), served.kept()["current"]["recipe"]
    other = ("--recipe", recipe, "--image", served.image, "--set", "station_cache=/var/lib/station-recipes/other")
    theirs = ["docker", "run", "--detach", "--rm", "--name=theirs", "--network=none", "--entrypoint=python3"]
    machine.run(*theirs, served.image, "-c", "import time; time.sleep(600)")
    try:
        said = front("provision", machine, *other)
        assert said.code == 1
        assert "a running container can lose its GPU by that: theirs" in said.host["problem"]
        assert served.started(name) == before
    finally:
        machine.run("docker", "rm", "--force", "theirs")
    said = front("provision", machine, *other)
    assert said.code == 0, said.host["problem"]
    assert machine.run("systemctl", "show", "--property=NeedDaemonReload", name).stdout.strip() == "NeedDaemonReload=no"
    mounts = json.loads(machine.run("docker", "inspect", "--format", "{{json .Mounts}}", name).stdout)
    assert "/var/lib/station-recipes/other" in {mount["Source"] for mount in mounts}


def test_under_an_old_systemd_what_is_served_is_what_was_asked_for_and_a_second_time_changes_nothing(
    served: Served, front: Front
):
    give_old_systemd(served.machine)
    kept = served.kept()["current"]
    recipe = {"micro/base": "micro/mtp1", "micro/mtp1": "micro/base"}[kept["recipe"]]
    again = ("--recipe", recipe, "--image", served.image)
    for arguments in (again, (*again, "--set", "station_cache=/var/lib/station-recipes/third")):
        for changes in (True, False):
            said = front("provision", served.machine, *arguments)
            assert (said.code, bool(said.host["changed"])) == (0, changes), said.host
    name = served.kept()["current"]["name"]
    assert (served.active(name), served.active(kept["name"])) == (True, False)
    mounts = json.loads(served.machine.run("docker", "inspect", "--format", "{{json .Mounts}}", name).stdout)
    assert "/var/lib/station-recipes/third" in {mount["Source"] for mount in mounts}
