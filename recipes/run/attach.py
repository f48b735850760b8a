"""Room recipes: follows a container and ends it with us. Standard library only.

Run as `python attach.py STOP_S CONTAINER`: starts the created container, hands on its output, and ends with its status.
On SIGTERM the container is stopped and removed. `docker start --attach` alone would hand the signal on to the first
process of the container, where the kernel drops it as long as that process has no handler for it.
"""

import signal
import subprocess
import sys


class Ending(Exception):
    """We are asked to end."""


def main() -> int:
    """Follow the container to its end, or end it."""
    stop_s, container = sys.argv[1:]

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Ending

    signal.signal(signal.SIGTERM, end)
    follower = subprocess.Popen(["docker", "start", "--attach", container])
    try:
        return follower.wait()
    except Ending:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(["docker", "stop", "--time", stop_s, container], check=False, **quiet)
        subprocess.run(["docker", "rm", "--force", "--volumes", container], check=False, **quiet)
        follower.kill()
        return 143


if __name__ == "__main__":
    sys.exit(main())
