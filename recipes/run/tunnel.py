"""Room recipes: a port of the machine that ssh:// names as the Docker engine's, brought to the same port here."""

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from images.command import tail
from images.docker_engine import engine_host
from images.errors import EngineProblem
from recipes.run.supervised import base_environment, supervised

OPEN_TIMEOUT_S = 30
POLL_S = 0.1


def ssh_target(host: str) -> list[str] | None:
    """The words that name the machine for ssh; None where the Docker engine isn't reached over ssh."""
    parts = urlsplit(host)
    if parts.scheme != "ssh" or not parts.hostname:
        return None
    user = [f"{parts.username}@{parts.hostname}"] if parts.username else [parts.hostname]
    return [*(["-p", str(parts.port)] if parts.port else []), "--", *user]


@contextmanager
def tunnel(host: str, port: int) -> Iterator[None]:
    """Bring host:port of the Docker engine's machine here, while the block runs; nothing for a local engine.

    Raises EngineProblem when ssh can't.
    """
    target = ssh_target(engine_host())
    if target is None:
        yield
        return
    argv = ["ssh", "-N", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=15"]
    argv += ["-L", f"{host}:{port}:{host}:{port}", *target]
    environ = {**base_environment(), **{k: os.environ[k] for k in ("SSH_AUTH_SOCK",) if k in os.environ}}
    with tempfile.TemporaryDirectory(prefix="station-recipes-") as folder:
        log = Path(folder) / "ssh.log"
        with supervised(argv, environ, log) as process:
            deadline = time.monotonic() + OPEN_TIMEOUT_S
            while not _listens(host, port):
                if not process.alive() or time.monotonic() > deadline:
                    raise EngineProblem(f"port {port} of {target[-1]} can't be brought here by ssh: {tail(log, 3)}")
                time.sleep(POLL_S)
            yield


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0
