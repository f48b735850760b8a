"""Room images: the one way to run an external command to its end."""

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from images.console import echo_command, stage

TAIL_LINES = 15
POLL_S = 0.2


def run(argv: Sequence[str], env: Mapping[str, str] | None = None, text: bool = True) -> subprocess.CompletedProcess:
    """Run a short command and return its output, as text or as the bytes it is. Never raises on a status."""
    return subprocess.run(argv, env=env, capture_output=True, text=text, stdin=subprocess.DEVNULL, check=False)


def run_shown(
    argv: Sequence[str],
    description: str,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    watch: Callable[[], Mapping] | None = None,
) -> int:
    """Run a long command: echoed, its output to the end of `log`, its last line shown beside a spinner.

    `watch` is asked for the arguments of the stage's `update` instead, where a command says nothing itself.
    Returns the exit status. The command is ended if we are interrupted.
    """
    echo_command(argv)
    with log.open("ab") as sink:
        process = subprocess.Popen(
            argv, env=env, cwd=cwd, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    try:
        return _wait(process, description, watch or (lambda: {"status": last_line(log)[:60]}))
    finally:
        _end(process)


@contextmanager
def piped(
    argv: Sequence[str], feed: bool = False, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen, IO[bytes]]]:
    """Run a command whose output is read as it comes (`process.stdout`), or that is fed (`process.stdin`).

    Yields the process and the file with what else it says. It is ended if we leave before it does.
    """
    echo_command(argv)
    with tempfile.TemporaryFile() as said:
        ends = {"stdin": subprocess.PIPE, "stdout": said} if feed else {"stdin": subprocess.DEVNULL}
        process = subprocess.Popen(argv, env=env, **{"stdout": subprocess.PIPE, **ends}, stderr=said)
        try:
            yield process, said
        finally:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with suppress(BrokenPipeError):
                pipe.close()


def _wait(process: subprocess.Popen, description: str, watch: Callable[[], Mapping]) -> int:
    with stage(description) as update:
        while process.poll() is None:
            update(**watch())
            time.sleep(POLL_S)
    return process.returncode


def last_line(log: Path) -> str:
    """The last line of a log, or nothing."""
    said = tail(log, lines=1)
    return "" if said.startswith("(") else said


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, for an error message."""
    if not log.exists():
        return "(no log was written)"
    with log.open("rb") as source:
        source.seek(max(0, log.stat().st_size - 65536))
        text = source.read().decode(errors="replace").strip().splitlines()
    return "\n".join(text[-lines:]) or "(the log is empty)"
