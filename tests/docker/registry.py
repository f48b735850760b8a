"""A real registry on loopback (Debian's docker-registry), which tests may stop in the middle of anything."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port

PORTS = range(5300, 5350)
CONFIG = """version: 0.1
storage: {{filesystem: {{rootdirectory: "{folder}"}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


class Registry:
    """One registry process and its folder. `address` is HOST:PORT; it speaks plain http."""

    def __init__(self, folder: Path, port: int):
        self.folder, self.port, self.address = folder, port, f"127.0.0.1:{port}"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder.with_suffix(".yml")
        config.write_text(CONFIG.format(folder=self.folder, port=self.port))
        program = shutil.which("docker-registry") or shutil.which("registry")
        with self.folder.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
        for _ in range(100):
            if self.process.poll() is not None:
                raise RuntimeError(self.folder.with_suffix(".log").read_text())
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise RuntimeError("the registry does not answer")

    def freeze(self) -> None:
        """Stop it where it is, without ending it."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait()

    def receiving(self) -> int:
        """Bytes of uploads that are under way."""
        total = 0
        for file in self.folder.rglob("_uploads/*/data"):
            try:
                total += file.stat().st_size
            except OSError:
                continue
        return total

    def tags(self, name: str) -> list[str]:
        """The tags of a repository, from the registry's own folder."""
        return sorted(
            path.name for path in self.folder.glob(f"docker/registry/v2/repositories/{name}/_manifests/tags/*")
        )


@contextmanager
def running_registry(folder: Path) -> Iterator[Registry]:
    """A registry that is gone at the end. Skips where none is installed."""
    if not (shutil.which("docker-registry") or shutil.which("registry")):
        pytest.skip("there is no docker-registry (Debian: apt install docker-registry)")
    made = Registry(folder / "registry", free_port())
    made.start()
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """A registry of this test's own."""
    with running_registry(tmp_path) as made:
        yield made


@pytest.fixture
def second_registry(tmp_path: Path, registry: Registry) -> Iterator[Registry]:
    """Another one, beside `registry`."""
    with running_registry(tmp_path / "second") as made:
        yield made
