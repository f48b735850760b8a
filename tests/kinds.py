"""The kinds of tests, and how each is run: one process a phase, so that no kind that measures shares the machine."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# In this order. Tests of the engine measure, and have the machine to themselves; a test machine has a network and a
# Docker engine of its own, so that it can be tested beside ours.
PHASES = (("unit",), ("engine", "browser", "gpu"), ("docker", "host"))
KINDS = tuple(kind for phase in PHASES for kind in phase)
WORKERS = min(4, os.cpu_count() or 1)
NOTHING = 5  # pytest's exit code where nothing was collected


def run_tests(chosen: list[str], required: list[str], names: str) -> int:
    """Run the chosen kinds, phase by phase; returns 0, 1 where a test failed, 2 where tests couldn't be run.

    `required` kinds may not be skipped; `names` chooses among the tests, as pytest's -k.
    """
    ended = {}
    for phase in PHASES:
        kinds = [kind for kind in phase if kind in chosen and (ROOT / "tests" / kind).is_dir()]
        if kinds:
            argv = [sys.executable, "-m", "pytest", f"--require={','.join(required)}", *_spread(kinds, names)]
            argv += ["-k", names] if names else []
            code = subprocess.run([*argv, *(f"tests/{kind}" for kind in kinds)], cwd=ROOT, check=False).returncode
            ended[" and ".join(kinds)] = code
    found = [code for code in ended.values() if code != NOTHING]
    _summary(ended, [kind for kind in KINDS if kind not in chosen])
    return max((code if code in {0, 1} else 2 for code in found), default=2)  # below 0: ended by a signal


def _spread(kinds: list[str], names: str) -> list[str]:
    """pytest's options to run tests of one phase side by side: a file of units, or a kind, to a worker."""
    if WORKERS < 2 or names:
        return []
    if kinds == ["unit"]:
        return ["-n", str(WORKERS), "--dist", "loadfile"]
    return ["-n", str(len(kinds)), "--dist", "loadscope"] if len(kinds) > 1 and "engine" not in kinds else []


def _summary(ended: dict[str, int], left_out: list[str]) -> None:
    said = [f"{'✔' if code == 0 else '–' if code == NOTHING else '✘'} {kinds}" for kinds, code in ended.items()]
    if len(said) > 1:
        sys.stdout.write(" · ".join(said) + "\n")
    if left_out:
        sys.stdout.write(f"left out: tests of {', '.join(left_out)}, not chosen by --only\n")
    sys.stdout.flush()
