"""Room bench: a ladder's journal: what was begun and what ended, on disk before anything goes on."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.record import now
from bench.runfolder import SEAL, read_json, refuse_large, seal_faults
from images.errors import OutsideProblem, Problem, RunProblem
from recipes.model_files import sha256

FILE = "journal.jsonl"
LOCK = ".lock"
RUNS = "runs"
MOST_BOOTS = 100_000
LONGEST = 20_000  # characters of a cause that are kept; a table shows its first line
NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,199}$"  # of a rung or a run: one name, never a path


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


class Entry(BaseModel):
    """A line of the journal. What is none is passed over: the boot that it spoke of counts as cut off."""

    model_config = ConfigDict(strict=True, extra="ignore")

    event: Literal["begun", "finished", "failed", "void"]
    rung: str = Field(pattern=NAME)
    boot: int = Field(ge=1, le=MOST_BOOTS)
    run: str | None = Field(pattern=NAME)
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
        """What became of a boot: finished, failed, or void after all."""
        cause = boot.cause[:LONGEST] if boot.cause else boot.cause
        self._append({"event": boot.state, "rung": boot.rung, "boot": boot.boot, "run": boot.run, "cause": cause})

    def _append(self, entry: dict) -> None:
        line = json.dumps({"at": now(), **entry}, sort_keys=True) + "\n"
        try:
            whole = self._file.read_bytes() if self._file.is_file() else b""
            # A line that was cut off by a kill ends here, so that it costs itself and not the next one.
            text = (b"\n" if whole and not whole.endswith(b"\n") else b"") + line.encode()
            with _plain(self._file, os.O_WRONLY | os.O_APPEND) as sink:
                while text:  # a disk that is nearly full takes a part, and refuses the rest
                    text = text[os.write(sink, text) :]
                os.fsync(sink)
        except OSError as error:
            raise OutsideProblem(
                f"{self._file}: can't be written: {error.strerror}. Free some space and --resume"
            ) from error


@contextmanager
def _plain(file: Path, flags: int) -> Iterator[int]:
    """A file of a ladder's folder, open, made if need be; never what a link points to, and no pipe to wait at."""
    descriptor = os.open(file, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a ladder's folder for a `with` block.

    Raises RunProblem when another process is at work in it, nothing can be written there, or its runs lie elsewhere.
    """
    if (folder / RUNS).is_symlink():
        raise RunProblem(f"{folder / RUNS} is a link: a ladder writes into its own folder only")
    try:
        with _plain(folder / LOCK, os.O_WRONLY) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                said = f"{folder}: another ./inv ladder is at work in it: wait for it, or stop it"
                raise RunProblem(said) from None
            yield
    except OSError as error:
        if Path(error.filename or "") != folder / LOCK:
            raise
        raise RunProblem(f"{folder}: a ladder can't be run in it: {error.strerror} ({LOCK})") from error


def read_boots(folder: Path) -> list[Boot]:
    """What became of every boot that was begun, in order. A boot without an end, or whose run changed, is void.

    A run counts once: as the first boot that names it, and only if it is no copy of another. Raises RunProblem
    where the journal can't be read.
    """
    found: dict[tuple[str, int, str | None], Boot] = {}
    for entry in _entries(folder):
        key = (entry.rung, entry.boot, entry.run)
        state = "void" if entry.event == "begun" else entry.event
        cause = "cut off: it has a beginning and no end" if entry.event == "begun" else entry.cause
        found[key] = Boot(*key, state, cause)
    seen: dict[str, str] = {}
    return [_once(folder, _checked(folder, boot), seen) for boot in found.values()]


def _checked(folder: Path, boot: Boot) -> Boot:
    """The boot, void where its run is not what was sealed."""
    if boot.state != "finished":
        return boot
    run = folder / RUNS / (boot.run or "")
    if boot.run is None or not run.is_dir():
        faults = ["its folder is gone"]
    elif run.is_symlink():
        faults = ["its folder is a link"]
    else:
        faults = seal_faults(run)
    return replace(boot, state="void", cause="; ".join(faults[:3])) if faults else boot


def _once(folder: Path, boot: Boot, seen: dict[str, str]) -> Boot:
    """The boot, void where its run, or a copy of that, was counted before."""
    if boot.state != "finished":
        return boot
    digest = sha256(folder / RUNS / boot.run / SEAL)
    named = f"{boot.rung}, boot {boot.boot}"
    if digest in seen:
        return replace(boot, state="void", cause=f"the same measurement as {seen[digest]}: it counts once")
    seen[digest] = named
    return boot


def _entries(folder: Path) -> Iterator[Entry]:
    file = folder / FILE
    if not file.is_file():
        return
    refuse_large(file)
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise RunProblem(f"{file}: can't be read: {error.strerror}") from error
    for line in lines:
        try:
            entry = Entry.model_validate_json(line)
        except (ValidationError, RecursionError):  # cut off by a kill, or no line of ours
            continue
        yield entry


def outcome(folder: Path, rung: str, boot: int, run: Path) -> Boot:
    """What a run that has just ended is to the ladder: finished, failed, or void where something outside ended it."""
    if not (run / SEAL).is_file():
        return Boot(
            rung, boot, run.name, "void", "its folder could not be closed: no space on its disk, or a fault of it"
        )
    try:
        failure = read_json(run / "manifest.json").get("failure")
    except Problem as problem:
        return Boot(rung, boot, run.name, "void", str(problem))
    if failure is None:
        return Boot(rung, boot, run.name, "finished")
    state = "void" if failure.get("outside") else "failed"
    return Boot(rung, boot, run.name, state, f"{failure['stage']}: {failure['cause']}")
