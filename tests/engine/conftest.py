"""The real engine: one life through the front door is shared by the tests that only look at its run."""

import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent.parent


COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "clang++", "nvcc")


@dataclass(frozen=True)
class Reproduced:
    """What `./inv reproduce` did."""

    run: Path
    code: int
    stdout: str
    stderr: str
    peak_gb: float


@pytest.fixture(scope="session")
def path_without_compilers(tmp_path_factory) -> str:
    """The PATH of a host where nobody installed a compiler."""
    folder = tmp_path_factory.mktemp("path")
    for directory in os.environ["PATH"].split(":"):
        for program in Path(directory).glob("*"):
            name = program.name
            if not any(name == c or name.startswith(f"{c}-") for c in COMPILERS) and not (folder / name).exists():
                (folder / name).symlink_to(program)
    assert shutil.which("cc", path=str(folder)) is None and shutil.which("g++", path=str(folder)) is None
    return str(folder)


@pytest.fixture(scope="session")
def reproduced(tmp_path_factory, path_without_compilers) -> Reproduced:
    """`./inv reproduce` on the default recipe, on a host without a compiler."""
    out = tmp_path_factory.mktemp("runs")
    answer = subprocess.run(
        [str(ROOT / "inv"), "reproduce", "--out", str(out), "--port", str(free_port())],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path_without_compilers},
        timeout=840,
    )
    sys.stderr.write(answer.stderr + answer.stdout)
    # The engine's processes are descendants: the largest of them bounds each, three of them the sum.
    peak_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    return Reproduced(
        Path(answer.stdout.strip().splitlines()[-1]), answer.returncode, answer.stdout, answer.stderr, peak_gb
    )
