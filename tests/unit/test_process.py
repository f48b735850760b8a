"""The process run: ready means ready, every failure is said, and nothing outlives us."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from images.engine import Engine
from images.errors import EngineProblem
from recipes.run.process import refuse_taken_port, serve
from recipes.run.supervised import interrupts_held, supervised
from recipes.run.supervisor import descendants_of
from recipes.spec import ServingSpec
from tests.ports import free_port

STUB = Path(__file__).parent.parent / "stub"
ENGINE = Engine("stub", "0", Path(sys.executable), "stub")


def spec(behaviour: str, timeout_s: int = 20) -> ServingSpec:
    port = free_port()
    return ServingSpec(
        recipe_id="test/stub",
        argv=("serve", "model", "--port", str(port)),
        env={"STUB": behaviour, "PYTHONPATH": str(STUB)},
        host="127.0.0.1",
        port=port,
        served_name="m",
        model_path=Path("model"),
        ready_timeout_s=timeout_s,
        stop_timeout_s=1,
    )


def our_children() -> list[int]:
    return descendants_of(os.getpid())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: list[int], limit_s: float = 10) -> list[int]:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.1)
    return [pid for pid in pids if alive(pid)]


def test_a_ready_server_shows_its_live_argv_and_environment_and_is_gone_afterwards(tmp_path: Path):
    subject = spec("ready")
    with serve(subject, ENGINE, tmp_path / "log") as server:
        assert server.argv == [*ENGINE.command(), *subject.argv]
        assert server.env["STUB"] == "ready"
        assert server.alive()
        started = our_children()
        assert len(started) >= 2
    assert wait_gone(started) == []


def test_an_engine_that_ends_is_reported_with_its_last_words(tmp_path: Path):
    with (
        pytest.raises(
            EngineProblem, match=r"(?s)ended before it was ready \(exit status 1\).*the stub engine ends here"
        ),
        serve(spec("die"), ENGINE, tmp_path / "log"),
    ):
        pass


def test_a_missing_interpreter_is_reported(tmp_path: Path):
    engine = Engine("stub", "0", tmp_path / "nowhere", "stub")
    with pytest.raises(EngineProblem, match="No such file"), serve(spec("ready"), engine, tmp_path / "log"):
        pass


def test_an_engine_that_is_never_ready_meets_the_deadline(tmp_path: Path):
    with pytest.raises(EngineProblem, match="not ready after 1 s"):
        with serve(spec("hang", timeout_s=1), ENGINE, tmp_path / "log"):
            pass
    assert wait_gone(our_children()) == []


def test_health_alone_is_not_ready(tmp_path: Path):
    with pytest.raises(EngineProblem, match="refused a completion for model 'm': 404"):
        with serve(spec("no-completion"), ENGINE, tmp_path / "log"):
            pass


def test_a_taken_port_is_refused_and_its_owner_named(tmp_path: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EngineProblem, match=f"port {port} .* in use by process {os.getpid()}"):
            refuse_taken_port("127.0.0.1", port)


def test_a_foreign_server_that_takes_the_port_meanwhile_is_never_measured(tmp_path: Path):
    subject = spec("hang")
    environment = {**os.environ, **subject.env, "STUB": "ready"}
    with pytest.raises(EngineProblem, match="it isn't the one we started"):
        foreign = None
        try:
            # Ours hangs; another server answers on the port we were promised.
            def start_foreign(_: str) -> None:
                nonlocal foreign
                if foreign is None:
                    foreign = subprocess.Popen([*ENGINE.command(), *subject.argv], env=environment)

            with serve(subject, ENGINE, tmp_path / "log", start_foreign):
                pass
        finally:
            assert foreign is not None and foreign.poll() is None, "another's process is never touched"
            foreign.kill()
            foreign.wait()


def test_a_stubborn_engine_and_its_detached_child_are_ended_too(tmp_path: Path):
    with serve(spec("stubborn"), ENGINE, tmp_path / "log"):
        started = our_children()
        assert len(started) >= 3, "supervisor, engine, detached child"
    assert wait_gone(started, 1) == []


def test_nothing_survives_when_we_are_killed_by_force(tmp_path: Path):
    program = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from tests.unit.test_process import *\n"
        "with serve(spec('stubborn'), ENGINE, Path(sys.argv[2])):\n"
        "    print(*our_children(), flush=True); time.sleep(600)\n"
    )
    root = str(Path(__file__).parent.parent.parent)
    parent = subprocess.Popen(
        [sys.executable, "-c", program, root, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) >= 3 and all(alive(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_gone(pids) == []


def test_the_command_s_exit_status_and_output_are_kept(tmp_path: Path):
    with supervised([sys.executable, "-c", "print('said'); raise SystemExit(3)"], {}, tmp_path / "log") as process:
        while process.alive():
            time.sleep(0.05)
        assert process.status() == 3
    assert (tmp_path / "log").read_text() == "said\n"


def test_an_interrupt_during_the_cleanup_waits_for_its_end_and_is_not_lost():
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = []
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_held():
            signal.raise_signal(signal.SIGINT)
            done.append("cleaned up")
        assert done == ["cleaned up"]
        with pytest.raises(KeyboardInterrupt, match="the first"):
            try:
                raise KeyboardInterrupt("the first")
            finally:
                with interrupts_held():
                    signal.raise_signal(signal.SIGINT)
        with interrupts_held(again=True):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_hangup_that_nohup_has_ignored_does_not_hide_an_interrupt_behind_it():
    previous = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_IGN}
    previous = {name: signal.signal(name, handler) for name, handler in previous.items()}
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_held():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGINT)
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)
