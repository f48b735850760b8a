"""Room recipes: keeps one command and everything it starts from outliving us. Standard library only.

Run as `python supervisor.py GRACE_S COMMAND…`. It ends the whole process tree when the command ends, on
SIGTERM, or when its standard input closes, which happens however its parent dies, kill -9 included.
It tells its parent what happens in JSON lines on standard output; the command's own output goes to
standard error, which the parent points at a log.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.1


def main() -> int:
    """Run the command to its end, or end it."""
    grace_s, argv = float(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the command become ours, not init's
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stopping: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            # If even this supervisor is killed, the command is asked to end.
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),  # noqa: PLW1509
        )
    except OSError as error:
        tell(failed=f"{argv[0]}: {error.strerror}")
        return 127
    tell(pid=child.pid)
    while child.poll() is None and not stopping and not parent_is_gone():
        reap_orphans(child.pid)
    if child.poll() is None:
        child.terminate()
        wait_until(lambda: child.poll() is not None, grace_s)
    kill_tree()
    tell(status=child.wait())
    return 0


def tell(**event: object) -> None:
    """Send one event to the parent, if it still listens."""
    with suppress(OSError):
        print(json.dumps(event), flush=True)


def parent_is_gone() -> bool:
    """Wait a moment for the end of standard input: the parent holds the other end as long as it lives."""
    readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def reap_orphans(command: int) -> None:
    """Collect adopted processes that have ended; the command's own status is left to Popen."""
    for pid in children_of(os.getpid()):
        if pid != command:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def children_of(pid: int) -> list[int]:
    """The direct children of a process."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def descendants_of(pid: int) -> list[int]:
    """Every process below one, nearest first."""
    found = children_of(pid)
    for child in found:
        found.extend(descendants_of(child))
    return list(dict.fromkeys(found))


def kill_tree() -> None:
    """Kill everything below us until nothing is left; killed processes' orphans arrive here and go too."""

    def nothing_left() -> bool:
        for pid in descendants_of(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        return False

    wait_until(nothing_left, 10)


def wait_until(condition, limit_s: float) -> None:
    """Poll a condition until it holds or the time is up."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(POLL_S / 2)


if __name__ == "__main__":
    sys.exit(main())
