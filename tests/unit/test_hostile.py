"""What strangers hand us, and what goes wrong around us: one clear error, nothing of others touched, every run closed."""

import io
import json
import os
import socket
import tempfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from bench.arrays import save_window
from bench.counters import Sample
from bench.evidence import read_evidence
from bench.measure import measure, require_url
from bench.record import Plan
from bench.runfolder import read_json, read_result, seal, seal_faults, window_folder, write_text
from bench.verdict import judge, write_verdict
from bench.watch import Watch, ask_all
from images.console import out, table
from images.engine import Engine
from images.errors import EngineProblem, Problem, RunProblem, UsageProblem
from recipes.load import load_recipe
from recipes.run.fetch import fetch
from recipes.spec import serving_spec
from tests.runs import closed_loop, recipe, write_run

GOOD = closed_loop(8, 80, 32, 0.01)


def npz(arrays: dict[str, np.ndarray]) -> bytes:
    sink = io.BytesIO()
    np.savez_compressed(sink, **arrays)
    return sink.getvalue()


def zipped(name: str, data: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(name, data)
    return sink.getvalue()


def npy() -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.zeros(3))
    return sink.getvalue()


def damaged(arrays: dict[str, np.ndarray]) -> bytes:
    """A window as we write it, one byte of its packed data another."""
    with tempfile.TemporaryDirectory() as folder:
        save_window(Path(folder), arrays)
        data = bytearray((Path(folder) / "client.npz").read_bytes())
    data[80:90] = bytes(10)  # behind the first member's name
    return bytes(data)


TICKS = {"gap_ticks": GOOD["gaps_us"].astype(np.uint16), "tick_us": np.array([100], np.uint16)}
HOSTILE = {
    "a plain npy": npy(),
    "a member that is no array": zipped("start_s.npy", b"rubbish"),
    "a missing array": npz({name: value for name, value in GOOD.items() if name != "chunks"}),
    "two dimensions": npz({**GOOD, "e2e_s": np.ones((80, 2))}),
    "no dimension": npz({**GOOD, "e2e_s": np.float64(1)}),
    "another length": npz({**GOOD, "ttft_s": GOOD["ttft_s"][:5]}),
    "not a number": npz({**GOOD, "e2e_s": np.full(80, np.nan)}),
    "for ever": npz({**GOOD, "e2e_s": np.full(80, np.inf)}),
    "before its time": npz({**GOOD, "start_s": -GOOD["start_s"]}),
    "ticks of another kind": npz({**GOOD, **TICKS, "gap_ticks": GOOD["gaps_us"].astype(float)}),
    "fewer ticks than chunks": npz({**GOOD, **TICKS, "gap_ticks": np.ones(3, np.uint16)}),
    "ticks of no length": npz({**GOOD, **TICKS, "tick_us": np.zeros(1, np.uint16)}),
    "ticks of a length that isn't told": npz({**GOOD, "gap_ticks": np.ones(3, np.uint16)}),
    "a gap of days": npz({**GOOD, **TICKS, "gap_ticks": np.full(GOOD["gaps_us"].size, 2**32 - 1, np.uint32)}),
    "packed data that is damaged": damaged(GOOD),
    "negative chunks": npz({**GOOD, "chunks": -GOOD["chunks"]}),
    "time differences": npz({**GOOD, "chunks": np.zeros(80, "timedelta64[s]")}),
    "pickles": npz({**GOOD, "error": np.array([""] * 79, object)}) if False else npz({**GOOD, "error": np.zeros(80)}),
    "a header that promises too much": zipped(
        "start_s.npy",
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }".ljust(128)
        + b"\n",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_window_is_one_clear_error(tmp_path: Path, case: str):
    run = write_run(tmp_path / "run", recipe())
    (window_folder(run, 1, 1) / "client.npz").write_bytes(HOSTILE[case])
    with pytest.raises(RunProblem, match=r"client\.npz"):
        write_verdict(run)


def test_arrays_nobody_asked_for_are_not_even_unpacked(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe(), boots=[[{**GOOD, "bomb": np.zeros(50_000_000, np.uint8)}]])
    assert set(read_evidence(run).windows[0].arrays) == set(GOOD) - {"texts", "text_sha256"}


def test_a_log_that_unpacks_to_more_than_a_log_has_is_not_unpacked_whole(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("bench.evidence.MAX_LOG_BYTES", 1000)
    run = write_run(tmp_path / "run", recipe(), log="x" * 1001)
    assert read_evidence(run).boots[0].log is None, "what can't be read proves nothing"


def test_a_client_s_result_may_be_larger_than_a_run_s_own_files_and_not_without_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("bench.runfolder.MAX_TEXT_BYTES", 10)
    monkeypatch.setattr("bench.runfolder.MAX_RESULT_BYTES", 100)
    file = tmp_path / "result.json"
    file.write_text(json.dumps([1] * 20))
    assert len(read_result(file)) == 20
    with pytest.raises(RunProblem, match="more than 10 bytes, the most that is read of a text file of a run"):
        read_json(file)
    file.write_text(json.dumps([1] * 50))
    with pytest.raises(RunProblem, match="more than 100 bytes, the most that is read of a client's result file"):
        read_result(file)


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "boots/1/w1/counters.json",
        "quality/micro-tasks.jsonl",
        "quality/micro-tasks.jsonl.gz",
        "SHA256SUMS",
    ],
)
def test_a_text_file_larger_than_a_run_has_is_not_read(tmp_path: Path, monkeypatch, name: str):
    run = write_run(tmp_path / "run", recipe(quality={"suites": ["micro-tasks"], "items": 2, "seed": 3}))
    monkeypatch.setattr("bench.runfolder.MAX_TEXT_BYTES", 100_000)
    (run / "quality").mkdir()
    with (run / name).open("a") as sink:
        sink.truncate(100_001)  # a hole: it takes no room
    with pytest.raises(RunProblem, match="more than 100000 bytes"):
        read_evidence(run)


@pytest.mark.parametrize("name", ["boots/²/w1", "boots/1/w²", "boots/x/w1"])
def test_folders_with_odd_numbers_are_no_boots(tmp_path: Path, name: str):
    run = write_run(tmp_path / "run", recipe(), sealed=False)
    (run / name).mkdir(parents=True)
    (run / name / "client.npz").write_bytes(b"")
    seal(run)
    assert judge(read_evidence(run))["state"] == "MEASURED"


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe())
    for name in ("boots/1/env.json", "manifest.json"):
        (run / name).unlink()
        os.mkfifo(run / name)
    with pytest.raises(RunProblem, match="manifest"):
        write_verdict(run)


def test_missing_evidence_of_our_own_run_voids_it(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe(), sealed=False)
    (run / "boots/1/argv.json").unlink()
    (run / "boots/1/env.json").unlink()
    seal(run)
    verdict = judge(read_evidence(run))
    assert {guard["id"] for guard in verdict["guards"] if guard["ok"] is False} == {"live_argv", "live_env"}


def test_writing_never_follows_a_link_and_added_files_break_the_seal(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe())
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run / "verdict.json").symlink_to(victim)
    (run / "verdict.json.partial").symlink_to(victim)
    write_verdict(run)
    assert victim.read_text() == "mine"
    assert not (run / "verdict.json").is_symlink()
    assert seal_faults(run) == ["verdict.json.partial was added"]


def test_many_verdicts_at_once_leave_one_whole_file(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe())
    write_verdict(run)
    whole = (run / "verdict.json").read_bytes()
    failures: list[BaseException] = []

    def judge_again() -> None:
        try:
            write_verdict(run)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=judge_again) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (run / "verdict.json").read_bytes() == whole
    assert seal_faults(run) == []


def test_a_verdict_that_cannot_be_stored_is_still_given(tmp_path: Path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", recipe())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bench.verdict.write_text", full)
    assert write_verdict(run)["state"] == "MEASURED"
    assert "could not be stored" in capsys.readouterr().err


def test_a_write_that_fails_leaves_the_old_file_and_no_rubbish(tmp_path: Path):
    file = tmp_path / "x.json"
    write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "\ud800")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def plan() -> Plan:
    loaded = load_recipe("micro")
    engine = Engine("cpu", "0.32.0", Path("/nonexistent/bin/python"), "x")
    spec = replace(serving_spec(loaded), port=1)
    return Plan(loaded, engine, spec, {"slug": "cpu-x86-64", "cpu": {}, "gpus": []})


@pytest.mark.parametrize(
    "fault", [RuntimeError("odd"), MemoryError(), KeyError("x"), OSError(28, "No space left on device")]
)
def test_a_run_is_closed_whatever_goes_wrong(tmp_path: Path, monkeypatch, fault):
    def break_down(*_: object) -> None:
        raise fault

    monkeypatch.setattr("bench.measure._boots", break_down)
    run = measure(plan(), tmp_path)
    assert seal_faults(run) == []
    verdict = write_verdict(run)
    assert verdict["state"] == "INVALID"
    assert verdict["guards"][1]["id"] == "finished" and verdict["guards"][1]["ok"] is False


def test_a_run_that_cannot_be_closed_says_so_and_is_invalid(tmp_path: Path, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bench.measure._boots", full)
    monkeypatch.setattr("bench.measure.seal", full)
    run = measure(plan(), tmp_path)
    assert "could not be closed: No space left on device" in " ".join(capsys.readouterr().err.split())
    assert write_verdict(run)["state"] == "INVALID"


def test_a_missing_model_is_said_before_a_run_is_begun(tmp_path: Path):
    begun = plan()
    model = begun.loaded.recipe.model.model_copy(update={"path": "nowhere"})
    loaded = replace(begun.loaded, recipe=begun.loaded.recipe.model_copy(update={"model": model}))
    with pytest.raises(Problem, match="isn't there"):
        measure(replace(begun, loaded=loaded), tmp_path)
    assert list(tmp_path.iterdir()) == []


class Silent:
    """A server that accepts, and answers nothing or drips a byte now and then."""

    def __init__(self, drip: bytes = b"") -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._drip = drip
        self._over = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        kept = []
        while not self._over.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            kept.append(connection)
            threading.Thread(target=self._feed, args=(connection,), daemon=True).start()

    def _feed(self, connection: socket.socket) -> None:
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" if self._drip else b"")
            while self._drip and not self._over.wait(0.1):
                connection.sendall(self._drip)
        except OSError:
            return

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._socket.close()


@pytest.mark.parametrize("drip", [b"", b"x"])
def test_a_server_that_never_finishes_its_answer_does_not_hold_us(drip):
    with Silent(drip) as server, pytest.raises(EngineProblem):
        fetch(server.url, limit_s=0.5)


def test_an_engine_that_gives_no_token_any_more_is_stuck(monkeypatch):
    monkeypatch.setattr("bench.watch.POLL_S", 0.05)
    look = lambda: Sample(0.0, {"generation_tokens_total": 5.0}, {})  # noqa: E731

    async def ask(client: httpx.AsyncClient, _: int) -> None:
        await client.get("/never")

    with Silent() as server, pytest.raises(EngineProblem, match="stuck: no token for 0.3 s"):
        ask_all(server.url, [1, 2, 3], 2, ask, Watch(server.url, lambda: True, stall_s=0.3, look=look))


def test_an_engine_that_ends_under_load_is_noticed():
    with pytest.raises(EngineProblem, match="the engine ended"):
        Watch("http://x", lambda: False, look=lambda: Sample(0.0, {}, {})).check()


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://x",
        "http://",
        "http://x:0",
        "http://x/v1",
        "http://x?y",
        "http://x:y",
        "http://x\n",
        "http://[::",
    ],
)
def test_an_odd_address_is_refused(url):
    with pytest.raises(UsageProblem, match="wanted http://HOST:PORT"):
        require_url(url)


def test_a_password_in_an_address_is_refused_and_not_repeated():
    with pytest.raises(UsageProblem) as caught:
        require_url("http://me:s3cret@host:8000")
    assert "s3cret" not in str(caught.value)
    assert require_url("http://[::1]:8000/") == "http://[::1]:8000"


def test_a_stranger_s_text_is_shown_as_it_is_and_moves_no_cursor(capsys):
    out().print(table("t [/b]", ("a", "b"), [("[bold]x[/red]", "\x1b[2J")]))
    said = capsys.readouterr().out
    assert "[bold]x[/red]" in said and "\x1b" not in said
