"""Room images: the one way to run an external command to its end."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from images.console import echo_command, stage

TAIL_LINES = 15
POLL_S = 0.2


def run(argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run a short command and return its output as text. Never raises on a status."""
    return subprocess.run(argv, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def run_shown(
    argv: Sequence[str],
    description: str,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    status: Callable[[Path], str] | None = None,
) -> int:
    """Run a long command: echoed, its output to the end of `log`, its last line shown beside a spinner.

    `status` makes another text of the log to show there. Returns the exit status. The command is ended if we are
    interrupted.
    """
    echo_command(argv)
    with log.open("ab") as sink:
        process = subprocess.Popen(
            argv, env=env, cwd=cwd, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    try:
        return _wait(process, description, log, status or last_line)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen, description: str, log: Path, status: Callable[[Path], str]) -> int:
    with stage(description) as update:
        while process.poll() is None:
            update(status=status(log)[:60])
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
