"""Long-lived servers: found again, drained before they are stopped, and never mistaken for another process."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from images.errors import EngineProblem, OutsideProblem, UsageProblem
from recipes.run import longlived
from recipes.run.longlived import condition, find, in_flight, machine_boot, records, start, stop
from recipes.run.supervised import birth_of
from tests.ports import free_port
from tests.unit.test_process import ENGINE, alive, spec, wait_gone


@pytest.fixture
def state(tmp_path: Path):
    yield tmp_path
    for record in records(tmp_path):
        stop(record, tmp_path, 0, lambda _: None)


def busy(behaviour: str, seconds: float):
    subject = spec(behaviour)
    return replace(subject, env={**subject.env, "STUB_BUSY_S": str(seconds)})


def test_a_server_is_found_again_by_another_command_and_stopped_with_all_it_started(state):
    record = start(spec("stubborn"), ENGINE, state)
    assert records(state) == [record]
    assert condition(record) == "ready"
    tree = [record.pid, *(int(pid) for pid in children(record.pid))]
    assert len(tree) == 2
    assert stop(find(records(state), record.port), state, 0, lambda _: None) == 0
    assert wait_gone(tree) == []
    assert records(state) == []


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_stop_waits_for_requests_in_flight(state):
    record = start(busy("ready", 3), ENGINE, state)
    assert in_flight(record) == 2
    waited: list[int] = []
    assert stop(record, state, 30, waited.append) == 0
    assert waited and set(waited) == {2}


def test_past_its_deadline_stop_says_how_many_it_cut_off(state):
    record = start(busy("ready", 600), ENGINE, state)
    assert stop(record, state, 0.5, lambda _: None) == 2
    assert wait_gone([record.pid]) == []


def test_a_stale_pid_is_never_trusted_and_its_new_owner_never_touched(state):
    record = start(spec("ready"), ENGINE, state)
    os.kill(record.pid, signal.SIGKILL)
    os.waitpid(record.pid, 0)
    assert condition(record) == "gone"
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        reused = replace(record, pid=stranger.pid)  # the pid now belongs to somebody else
        assert birth_of(stranger.pid) != record.birth
        assert condition(reused) == "gone"
        stop(reused, state, 0, lambda _: None)
        assert alive(stranger.pid)
        rebooted = replace(record, pid=stranger.pid, birth=birth_of(stranger.pid), machine_boot="another boot")
        assert condition(rebooted) == "gone"
        stop(rebooted, state, 0, lambda _: None)
        assert alive(stranger.pid)
    finally:
        stranger.kill()
        stranger.wait()


def test_a_server_that_does_not_become_ready_leaves_nothing(state):
    with pytest.raises(EngineProblem, match="not ready after 1 s"):
        start(spec("hang", timeout_s=1), ENGINE, state)
    assert records(state) == []


def test_a_killed_command_leaves_a_record_of_the_server_it_had_started(tmp_path):
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from tests.unit.test_process import spec, ENGINE\n"
        "from recipes.run.longlived import start\n"
        "start(spec('hang', timeout_s=600), ENGINE, Path(sys.argv[2]))\n"
    )
    root = str(Path(__file__).resolve().parent.parent.parent)
    command = subprocess.Popen([sys.executable, "-c", program, root, str(tmp_path)])
    deadline = time.monotonic() + 20
    while not records(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    command.kill()
    command.wait()
    (record,) = records(tmp_path)
    assert condition(record) == "starting or stuck"
    stop(record, tmp_path, 0, lambda _: None)
    assert wait_gone([record.pid]) == []


def test_a_second_start_on_a_port_leaves_the_first_one_and_its_log_and_record_alone(state):
    subject, refusals = spec("hang", timeout_s=2), []

    def again(_: str) -> None:
        if not refusals:
            with pytest.raises(OutsideProblem, match="another `./inv serve` is starting a server on port") as refused:
                start(subject, ENGINE, state)
            refusals.append(refused)
            (record,) = records(state)
            assert condition(record) == "starting or stuck"

    with pytest.raises(EngineProblem, match="not ready after 2 s"):
        start(subject, ENGINE, state, again)
    assert refusals and records(state) == []


def test_a_server_whose_starter_was_killed_keeps_its_port_although_it_does_not_listen_yet(state):
    record = start(spec("ready"), ENGINE, state)
    elsewhere = replace(record, port=free_port())  # recorded on a port where nothing listens
    (state / "servers" / f"{elsewhere.port}.json").write_text(json.dumps(asdict(elsewhere)))
    with pytest.raises(OutsideProblem, match=rf"recorded on port {elsewhere.port} .* \./inv stop --port"):
        start(replace(spec("ready"), port=elsewhere.port), ENGINE, state)
    assert elsewhere in records(state)


def test_a_server_that_can_not_be_recorded_is_ended(state, monkeypatch):
    begun = []

    def full(_: Path, record: longlived.Record) -> None:
        begun.append(record)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(longlived, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        start(spec("hang"), ENGINE, state)
    assert wait_gone([begun[0].pid]) == []


def test_stopping_a_server_never_forgets_the_one_that_has_its_port_by_now(state):
    record = start(spec("ready"), ENGINE, state)
    before = replace(record, pid=2**22 + 1)
    stop(before, state, 0, lambda _: None)
    assert records(state) == [record]


def test_which_server_is_asked_for_when_there_are_several(state):
    with pytest.raises(UsageProblem, match="none is recorded"):
        find(records(state), None)
    first = start(spec("ready"), ENGINE, state)
    assert find(records(state), None) == first
    second = start(spec("ready"), ENGINE, state)
    with pytest.raises(UsageProblem, match="several servers are recorded"):
        find(records(state), None)
    assert find(records(state), second.port) == second


def test_a_broken_state_file_hides_no_other_server(state):
    record = start(spec("ready"), ENGINE, state)
    (state / "servers" / "1.json").write_text("{")
    (state / "servers" / "2.json").write_text(json.dumps({"pid": 1}))
    assert records(state) == [record]


def test_a_docker_engine_that_does_not_answer_is_said_by_status_and_hides_no_server(inv, state):
    record = start(spec("ready"), ENGINE, state)
    answer = inv("status", "--json", STATION_RECIPES_STATE=str(state), DOCKER_HOST=f"unix://{state}/none.sock")
    assert [each["port"] for each in json.loads(answer.stdout)] == [record.port]
    said = "Docker could not be asked which servers of ours it has" in answer.stderr
    assert said is (shutil.which("docker") is not None), answer.stderr


def test_status_and_stop_through_the_front_door(inv, state):
    record = start(spec("ready"), ENGINE, state)
    answer = inv("status", "--json", STATION_RECIPES_STATE=str(state))
    assert [each["state"] for each in json.loads(answer.stdout)] == ["ready"]
    assert asdict(record).items() <= json.loads(answer.stdout)[0].items()
    answer = inv("stop", STATION_RECIPES_STATE=str(state))
    assert "no request(s) were cut off" in answer.stdout
    assert inv("stop", STATION_RECIPES_STATE=str(state)).returncode == 2


def test_the_ids_that_tell_one_process_from_another_are_there_at_all():
    assert birth_of(os.getpid()) and machine_boot()
    with socket.socket():
        assert birth_of(2**22 + 1) is None
