"""Room bench: a ladder's journal: what was begun and what ended, on disk before anything goes on."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.record import now
from bench.runfolder import SEAL, read_json, seal_faults
from images.errors import Problem, RunProblem

FILE = "journal.jsonl"
LOCK = ".lock"
RUNS = "runs"


@dataclass(frozen=True)
class Boot:
    """One boot of the journal: which rung, which boot of it, and what became of it.

    `state`: finished (measured to its end), failed (the engine or the rung's settings didn't do it: `cause`), or
    void (cut off from outside, or changed since: it is done again, and counts for nothing).
    """

    rung: str
    boot: int
    run: str | None
    state: str
    cause: str | None = None


class Journal:
    """Appends to a ladder's journal. Every line is on the disk when a call returns."""

    def __init__(self, folder: Path) -> None:
        """Open the journal of a ladder's folder."""
        self._file = folder / FILE

    def begun(self, rung: str, boot: int, run: str) -> None:
        """A boot begins, and will be recorded in `run`."""
        self._append({"event": "begun", "rung": rung, "boot": boot, "run": run})

    def ended(self, boot: Boot) -> None:
        """A boot has ended: finished or failed."""
        self._append({"event": boot.state, "rung": boot.rung, "boot": boot.boot, "run": boot.run, "cause": boot.cause})

    def _append(self, entry: dict) -> None:
        line = json.dumps({"at": now(), **entry}, sort_keys=True) + "\n"
        try:
            whole = self._file.read_bytes() if self._file.exists() else b""
            with self._file.open("ab") as sink:
                # A line that was cut off by a kill ends here, so that it costs itself and not the next one.
                sink.write((b"\n" if whole and not whole.endswith(b"\n") else b"") + line.encode())
                sink.flush()
                os.fsync(sink.fileno())
        except OSError as error:
            raise Problem(f"{self._file}: can't be written: {error.strerror}. Free some space and --resume") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a ladder's folder for a `with` block. Raises RunProblem when another process is at work in it."""
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunProblem(f"{folder}: another ./inv ladder is at work in it: wait for it, or stop it") from None
        yield


def read_boots(folder: Path) -> list[Boot]:
    """What became of every boot that was begun, in order. A boot without an end, or whose run changed, is void.

    Raises RunProblem where the journal can't be read.
    """
    found: dict[tuple[str, int, str | None], Boot] = {}
    for entry in _entries(folder):
        try:
            key = (str(entry["rung"]), int(entry["boot"]), entry["run"])
            state = "void" if entry["event"] == "begun" else str(entry["event"])
        except (KeyError, TypeError, ValueError):
            continue
        cause = "cut off: it has a beginning and no end" if state == "void" else entry.get("cause")
        found[key] = Boot(*key, state, cause)
    return [_checked(folder, boot) for boot in found.values()]


def _checked(folder: Path, boot: Boot) -> Boot:
    """The boot, void where its run is not what was sealed."""
    if boot.state != "finished" or boot.run is None:
        return boot
    run = folder / RUNS / Path(boot.run).name
    faults = seal_faults(run) if run.is_dir() else ["its folder is gone"]
    return Boot(boot.rung, boot.boot, boot.run, "void", "; ".join(faults[:3])) if faults else boot


def _entries(folder: Path) -> Iterator[dict]:
    file = folder / FILE
    if not file.is_file():
        return
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise RunProblem(f"{file}: can't be read: {error.strerror}") from error
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by a kill: the boot it spoke of counts as cut off too
            continue
        if isinstance(entry, dict):
            yield entry


def outcome(folder: Path, rung: str, boot: int, run: Path) -> Boot:
    """What a run that has just ended is to the ladder: finished, failed, or void where a person interrupted it."""
    failure = read_json(run / "manifest.json").get("failure")
    if failure is None and (run / SEAL).is_file():
        return Boot(rung, boot, run.name, "finished")
    cause = f"{failure['stage']}: {failure['cause']}" if failure else "its folder could not be sealed"
    interrupted = bool(failure) and failure["cause"] == "interrupted"
    return Boot(rung, boot, run.name, "void" if interrupted else "failed", cause)
