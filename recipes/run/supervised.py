"""Room recipes: our end of a supervised process: start it, watch it, end it with all it started."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from recipes.run.supervisor import descendants_of

SUPERVISOR = Path(__file__).with_name("supervisor.py")
MARGIN_S = 5
PASSED_ENV = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ", "XDG_CACHE_HOME", "LD_LIBRARY_PATH")


def base_environment() -> dict[str, str]:
    """What every process we start inherits of ours; everything else is declared or absent."""
    return {name: os.environ[name] for name in PASSED_ENV if name in os.environ}


class Supervised:
    """A running command. Only made by `supervised()`, which ends it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path, grace_s: float) -> None:
        """Start the command; its output goes to `log`."""
        self.log = log
        self._grace_s = grace_s
        with log.open("ab") as sink:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-S", str(SUPERVISOR), str(grace_s), *argv],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,  # Ctrl-C is for us; we then end the command in order
            )
        first = json.loads(self._supervisor.stdout.readline() or "{}")
        self.pid: int | None = first.get("pid")
        self.failed_to_start: str | None = first.get("failed")
        self._status: int | None = None
        self._birth = birth_of(self.pid) if self.pid else None

    def alive(self) -> bool:
        """Whether the command still runs."""
        return self._supervisor.poll() is None

    def status(self) -> int | None:
        """The command's exit status once it has ended (negative: the signal that killed it), else None."""
        if self.alive():
            return None
        last = self._supervisor.stdout.read().decode().strip().splitlines()
        if last:
            self._status = json.loads(last[-1]).get("status")
        return self._status

    def processes(self) -> list[int]:
        """The pids of the command and of everything below it."""
        return descendants_of(self._supervisor.pid)

    def _sweep(self) -> None:
        """If the supervisor itself was killed, end what it had started, as long as it is still that process."""
        if self.pid is not None and birth_of(self.pid) == self._birth:
            for pid in [*descendants_of(self.pid), self.pid]:
                _kill(pid)

    def stop(self) -> None:
        """End the command and everything it started. Never raises; a second call does nothing."""
        if not self.alive():
            self._sweep()
        else:
            self._supervisor.stdin.close()
            try:
                self._supervisor.wait(timeout=self._grace_s + MARGIN_S)
            except subprocess.TimeoutExpired:
                for pid in self.processes():
                    _kill(pid)
                self._supervisor.kill()
                self._supervisor.wait()


def birth_of(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine's boot; None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def supervised(argv: Sequence[str], env: Mapping[str, str], log: Path, grace_s: float = 5) -> Iterator[Supervised]:
    """Run a command for the length of a `with` block; it is gone afterwards, whatever happened."""
    process = Supervised(argv, env, log, grace_s)
    try:
        yield process
    finally:
        with interrupts_held():
            process.stop()


@contextmanager
def interrupts_held(again: bool = False) -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back while we clean up: they must not leave an orphan, and must not be lost either.

    One that came meanwhile is delivered at the end, unless an interrupt is under way or was dealt with (`again`).
    """
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    names = [name for name in names if signal.getsignal(name) is not signal.SIG_IGN]  # nohup: not ours to hear
    came: list[int] = []
    previous = {name: signal.signal(name, lambda number, _frame: came.append(number)) for name in names}
    try:
        yield
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)
        if came and not again and not isinstance(sys.exception(), KeyboardInterrupt):
            signal.raise_signal(came[0])
