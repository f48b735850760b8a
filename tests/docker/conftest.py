"""The Docker engine: the CPU image is built once through the front door; everything ours carries a label of ours."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docker.registry import registry, second_registry  # noqa: F401
from tests.docker.small_images import engine, small, twin  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Built:
    """What `./inv build` printed as JSON, and how long it took."""

    data: dict
    seconds: float
    stderr: str

    @property
    def id(self) -> str:
        return self.data["id"]


def docker(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess:
    """Run a docker command."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, input=text, check=False)


def inv(*arguments: str, timeout: float = 2300, **environ: str) -> subprocess.CompletedProcess:
    """Run the front door."""
    argv = [str(ROOT / "inv"), *arguments]
    env = {**os.environ, **environ}
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False, env=env)
    sys.stderr.write(answer.stderr)
    return answer


def build(*arguments: str) -> Built:
    """`./inv build --image cpu …`, which must succeed."""
    started = time.monotonic()
    answer = inv("build", "--image", "cpu", "--json", *arguments)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return Built(json.loads(answer.stdout), time.monotonic() - started, answer.stderr)


@pytest.fixture(scope="session")
def cpu_image() -> Built:
    """The CPU engine's image, built and proved."""
    return build()


@pytest.fixture
def derived(cpu_image):
    """Make an image that differs from the CPU image by what a Dockerfile says; it is removed afterwards."""
    made = []

    def make(lines: str) -> str:
        text = f"FROM {cpu_image.id}\nUSER root\n{lines}\nUSER 1000:1000\n"
        answer = docker("build", "--quiet", "--network", "none", "-", text=text)
        assert answer.returncode == 0, answer.stderr
        made.append(answer.stdout.strip())
        return made[-1]

    yield make
    for image in made:
        docker("image", "rm", "--force", image)
