"""Dockerfiles as they are rendered, for both architectures and every base: what both builders know, and well written."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from images.base import BaseImage
from images.build import Order, dockerfile_values
from images.context import render_dockerfile
from images.declaration import PYTHON_OF, declaration, known_images
from images.docker_engine import DockerEngine
from images.pins_file import pins_for, read_pins
from images.wheels import CONTROL_PINS, Wheelhouse

IMAGES = Path(__file__).resolve().parent.parent.parent / "images"
# What the classic builder of Docker 20.10 knows without an extension; no ARG: nothing is set from outside.
KNOWN = {"FROM", "RUN", "COPY", "ENV", "LABEL", "VOLUME", "WORKDIR", "USER", "ENTRYPOINT"}
NOT_OURS = {
    "DL3008": "Debian keeps only a package's newest version: what pins the packages is the base's digest",
    "SC2211": "uv's folder in its wheel has its version in its name, which pins.txt knows",
}
PLACES = [(platform, suite) for platform in ("linux/amd64", "linux/arm64") for suite in PYTHON_OF]


@cache
def rendered(name: str, platform: str, suite: str, install: bool = False, archs: tuple[str, ...] = ()) -> str:
    facts = declaration(name)
    build, python = facts.sources.build, PYTHON_OF[suite]
    house = Wheelhouse(
        Path("/nowhere"), tuple(pins_for(IMAGES / name / "pins.txt", platform, python)), read_pins(CONTROL_PINS)["uv"]
    )
    packages = tuple(build.packages) if install else ()
    base = BaseImage(f"debian@sha256:{'a' * 64}", f"sha256:{'b' * 64}", suite, python, packages)
    engine = DockerEngine("20.10.24", platform)
    values = dockerfile_values(facts, build, Order(name, cuda_archs=archs), engine, base, house)
    return render_dockerfile(name, {**values, "identity": "0" * 16})


def instructions(text: str) -> list[tuple[str, str]]:
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [tuple(line.strip().split(None, 1)) for line in lines if line.strip()]


@pytest.mark.parametrize("name", known_images())
@pytest.mark.parametrize(("platform", "suite"), PLACES)
@pytest.mark.parametrize("install", [False, True])
def test_a_dockerfile_has_only_what_both_builders_know(name, platform, suite, install):
    text = rendered(name, platform, suite, install)
    assert not re.search(r"^#\s*(syntax|escape)\s*=", text, re.M), "a directive makes BuildKit fetch a front end"
    for word, rest in instructions(text):
        assert word in KNOWN, word
        options = set(re.findall(r"(?:^|\s)--([a-z]+)", rest)) if word in {"FROM", "COPY"} else set()
        assert options <= {"from"}, rest
        assert word != "RUN" or not re.match(r"--|.*<<", rest), "mounts and here-documents are BuildKit's alone"
        assert word != "COPY" or "://" not in rest


@pytest.mark.parametrize("name", known_images())
@pytest.mark.parametrize(("platform", "suite"), PLACES)
@pytest.mark.parametrize("install", [False, True])
def test_hadolint_has_nothing_to_say(tmp_path, name, platform, suite, install):
    file = tmp_path / "Dockerfile"
    file.write_text(rendered(name, platform, suite, install))
    ignored = [part for rule in NOT_OURS for part in ("--ignore", rule)]
    program = Path(sys.executable).with_name("hadolint")
    said = subprocess.run([program, "--no-color", *ignored, file], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (0, ""), said.stdout + said.stderr


def test_hadolint_would_notice_a_fault(tmp_path):
    file = tmp_path / "Dockerfile"
    file.write_text(
        rendered("cuda", "linux/arm64", "noble").replace("WORKDIR /cache", "WORKDIR cache\nRUN cd /x; sudo y")
    )
    program = Path(sys.executable).with_name("hadolint")
    said = subprocess.run([program, "--no-color", file], capture_output=True, text=True, check=False)
    assert said.returncode == 1 and {"DL3000", "DL3004"} <= set(re.findall(r"DL\d+", said.stdout))


@pytest.mark.parametrize("name", known_images())
@pytest.mark.parametrize(("platform", "suite"), PLACES)
def test_an_image_carries_every_pin_of_its_platform_as_a_label(name, platform, suite):
    text = rendered(name, platform, suite)
    label = re.search(r"^LABEL station-recipes\.pins=(.*)$", text, re.M)[1]
    carried = json.loads(json.loads(label))
    assert carried == {
        pin.name: pin.version for pin in pins_for(IMAGES / name / "pins.txt", platform, PYTHON_OF[suite])
    }
    assert carried[declaration(name).distribution] == declaration(name).sources.build.release


def test_the_architectures_of_kernels_are_as_ordered_else_as_declared():
    assert 'LABEL station-recipes.cuda-archs="9.0a 10.3a"' in rendered("cuda", "linux/arm64", "noble")
    assert 'LABEL station-recipes.cuda-archs="10.3a"' in rendered("cuda", "linux/arm64", "noble", archs=("10.3a",))


def test_the_cuda_image_differs_between_architectures_in_nothing_but_their_names():
    x86, arm = rendered("cuda", "linux/amd64", "noble"), rendered("cuda", "linux/arm64", "noble")
    assert x86 != arm and x86.replace("linux/amd64", "linux/arm64") == arm


def test_the_engine_never_runs_as_root_and_nothing_of_the_wheels_is_left():
    for name in known_images():
        last = rendered(name, "linux/amd64", "bookworm").rsplit("FROM ", 1)[1]
        uid = declaration(name).sources.build.uid
        assert instructions("FROM " + last)[-2:] == [("USER", f"{uid}:{uid}"), ("ENTRYPOINT", '["vllm"]')]
        assert "COPY wheels" not in last


def test_a_value_that_nobody_gave_is_never_rendered_as_nothing():
    with pytest.raises(Exception, match="'uid' is undefined"):
        render_dockerfile("cuda", {"base": "x", "platform": "y", "install": (), "python": "3.11"})
