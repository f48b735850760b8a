"""The CUDA image's stages, built for real without the engine's 4 GB: the base, an environment, the toolkit made of wheels."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from images.base import BaseImage, ensure_base
from images.build import STAGE, Order, dockerfile_values
from images.context import render_dockerfile
from images.declaration import IMAGES, declaration
from images.docker_engine import docker_engine
from images.pins_file import pins_for, read_pins
from images.wheels import CONTROL_PINS, Wheelhouse
from tests.docker.conftest import docker

IDENTITY = "test-cuda-stages"
FACTS = declaration("cuda")
ENGINE = docker_engine() if shutil.which("docker") and docker("info").returncode == 0 else None
FEW = ("nvidia-cuda-crt", "nvidia-cuda-runtime")  # CUDA's headers, and the library that everything links with


def base_of(name: str, folder: Path) -> BaseImage:
    return ensure_base(declaration(name).sources.build, None, ENGINE, folder / "base.log")


def context(folder: Path, base: BaseImage) -> Path:
    """Everything that the Dockerfile copies, but of the wheels only FEW and uv."""
    (folder / "wheels").mkdir(parents=True)
    pins = tuple(pin for pin in pins_for(IMAGES / "cuda/pins.txt", ENGINE.platform, base.python) if pin.name in FEW)
    house = Wheelhouse(folder / "wheels", pins, read_pins(CONTROL_PINS)["uv"])
    (folder / "pins.txt").write_text(house.pins_text)
    (folder / "uv.txt").write_text(house.installer.line + "\n")
    (folder / "site").mkdir()
    argv = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
    ]
    for file in ("pins.txt", "uv.txt"):
        subprocess.run([*argv, "--dest", folder / "wheels", "-r", folder / file], check=True, capture_output=True)
    (folder / "Dockerfile").write_text(dockerfile(base, house))
    return folder


def dockerfile(base: BaseImage, house: Wheelhouse) -> str:
    values = dockerfile_values(FACTS, FACTS.sources.build, Order("cuda"), ENGINE, base, house)
    return render_dockerfile("cuda", {**values, "identity": IDENTITY})


def built(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return docker("build", "--network", "none", "--force-rm", *arguments, str(folder))


@pytest.fixture(scope="module")
def engine_stage(tmp_path_factory):
    """The stage `engine` on the declared base, with few of its packages."""
    folder = tmp_path_factory.mktemp("stage")
    tag = f"station-recipes/{IDENTITY}"
    answer = built(context(folder / "context", base_of("cuda", folder)), "--target", "engine", "--tag", tag)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    yield tag
    docker("rmi", tag)
    docker("image", "prune", "--force", "--filter", f"label={STAGE}={IDENTITY}")


def inside(image: str, script: str, text: str = "") -> subprocess.CompletedProcess:
    return docker(
        "run", "--rm", "--interactive", "--network", "none", "--entrypoint", "sh", image, "-ec", script, text=text
    )


PROGRAM = """#include <cuda.h>
#include <cuda_runtime_api.h>
int devices(void) { int n; return cuInit(0) + cudaGetDeviceCount(&n); }
"""


def test_the_toolkit_made_of_wheels_links_where_no_driver_is(engine_stage):
    link = "cc -shared -fPIC -Wl,-z,defs -x c - -o /f.so -I$CUDA/include -L$CUDA/lib64 {} -lcudart -lcuda"
    link = "CUDA=/opt/engine/cuda; " + link + "; readelf -d /f.so"
    linked = inside(engine_stage, link.format("-L$CUDA/lib64/stubs"), PROGRAM)
    assert linked.returncode == 0, linked.stderr
    assert "[libcuda.so.1]" in linked.stdout and "[libcudart.so.13]" in linked.stdout
    without = inside(engine_stage, link.format(""), PROGRAM)
    assert without.returncode != 0 and "cannot find -lcuda" in without.stderr, "the stand-in is what makes it link"


def test_the_stand_in_for_the_driver_is_where_only_linkers_look(engine_stage):
    """Loaded at run time instead of the driver's own file, it would answer every call with nothing."""
    found = inside(engine_stage, "find /opt /usr -name 'libcuda.so*'").stdout.split()
    assert [path.partition("/site-packages/")[2] for path in found] == ["nvidia/cu13/lib/stubs/libcuda.so"]
    asked = inside(engine_stage, "/opt/engine/bin/python -c 'import ctypes; ctypes.CDLL(\"libcuda.so.1\")'")
    assert asked.returncode != 0 and "cannot open shared object file" in asked.stderr


@pytest.mark.parametrize(
    ("base", "python", "said"),
    [("cpu", "3.11", "the base lacks c++"), ("cuda", "3.12", "wanted Python 3.12, found Python 3.11")],
)
def test_a_base_that_lacks_something_stops_the_build_before_the_wheels_are_copied(tmp_path, base, python, said):
    wrong = replace(base_of(base, tmp_path), python=python)
    house = Wheelhouse(tmp_path, (), read_pins(CONTROL_PINS)["uv"])
    (tmp_path / "Dockerfile").write_text(dockerfile(wrong, house))
    answer = built(tmp_path)
    assert answer.returncode != 0
    assert said in answer.stdout + answer.stderr
    assert "COPY wheels" not in answer.stdout
