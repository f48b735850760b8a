"""Ctrl-C while an image is proved: the container goes with the command that started it."""

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.docker.conftest import docker

ROOT = Path(__file__).resolve().parent.parent.parent


def proving(image: str) -> list[str]:
    asked = ("--filter", "label=station-recipes.kind=verify", "--filter", f"ancestor={image}")
    return docker("ps", "--quiet", *asked).stdout.split()


def test_an_interrupted_proof_leaves_no_container(cpu_image):
    before = set(proving(cpu_image.id))
    argv = [str(ROOT / "inv"), "build", "--image", "cpu", "--verify"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as command:
        deadline = time.monotonic() + 120
        while set(proving(cpu_image.id)) <= before and command.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert set(proving(cpu_image.id)) - before, "the proof began"
        os.kill(command.pid, signal.SIGINT)  # to the command alone, as a supervisor does
        said = command.communicate(timeout=60)[1]
    assert command.returncode == 1 and "interrupted" in said
    for _ in range(50):
        if set(proving(cpu_image.id)) <= before:
            return
        time.sleep(0.2)
    raise AssertionError("the container outlived the command")
