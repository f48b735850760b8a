"""A test runs once more only where the machine stood still while it failed, and pytest says so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CONFTEST = "import tests.stood_still\ndef pytest_configure(config): config.pluginmanager.register(tests.stood_still)"
TESTS = """
import os, subprocess, time
from pathlib import Path

def still():
    halt = f"kill -STOP {os.getpid()}; sleep 1; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", halt])
    time.sleep(0.5)

def test_of_a_clock():
    marks = Path(__file__).with_name("marks")
    before = marks.read_text() if marks.exists() else ""
    marks.write_text(before + "x")
    if not before:
        still()
    assert before

def test_that_is_wrong():
    assert False

def test_that_is_wrong_and_disturbed():
    still()
    assert False
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_only_a_test_that_the_machine_disturbed_runs_again_and_twice_wrong_is_wrong(tmp_path: Path, workers):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers]
    argv += ["--rootdir", str(tmp_path), str(tmp_path)]
    answer = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert "2 failed, 1 passed, 2 rerun" in answer.stdout, answer.stdout
    told = re.search(
        r"run again: test_it\.py::test_of_a_clock\S* \(the machine stood still for ([\d.]+) s\)", answer.stdout
    )
    assert told and float(told[1]) > 0.25, answer.stdout
    assert "run again: test_it.py::test_that_is_wrong (" not in answer.stdout
