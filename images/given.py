"""Room images: an engine that somebody installed: any interpreter that can import vLLM, as on hosts without Docker."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from images.command import run
from images.declaration import declaration
from images.engine import Engine
from images.errors import EngineProblem, UsageProblem

# Every distribution with its version; vLLM's own is asked of the metadata, so that nothing heavy is imported.
INSIDE = """
import hashlib, json, platform
from importlib import metadata
found = sorted({f"{each.metadata['Name']}=={each.version}".lower() for each in metadata.distributions()})
versions = dict(each.split("==", 1) for each in found)
text = "\\n".join([platform.python_version(), platform.machine(), *found])
print(json.dumps({"version": versions.get("vllm"), "identity": hashlib.sha256(text.encode()).hexdigest()[:16]}))
"""


def require_interpreter(python: str | None, paths: Sequence[str]) -> None:
    """Raise UsageProblem for folders of an interpreter that isn't named."""
    if paths and not python:
        raise UsageProblem("--engine-path is a folder for the interpreter of --engine-python, which isn't named")


def given_engine(name: str, python: str, paths: Sequence[str] = ()) -> Engine:
    """The engine behind an interpreter, standing in for the image `name`: it is what its distributions are.

    Its identity is the hash over Python's version, the architecture, and every installed distribution's name and
    version; `paths` go on its PYTHONPATH. Raises UsageProblem where the interpreter or a path isn't there,
    EngineProblem where it has no vLLM.
    """
    declaration(name)  # a wrong name is said before a wrong interpreter
    interpreter = Path(python)
    if not interpreter.is_file() or not os.access(interpreter, os.X_OK):
        raise UsageProblem(f"--engine-python {python}: wanted the path of a Python interpreter that can import vLLM")
    for path in paths:
        if not Path(path).is_dir():
            raise UsageProblem(f"--engine-path {path}: wanted a folder to put on the engine's PYTHONPATH")
    paths = tuple(str(Path(path).resolve()) for path in paths)
    engine = Engine(name, "", interpreter.absolute(), "", (), paths)
    answer = run([str(engine.python), "-c", INSIDE], env={**os.environ, **engine.environ()})
    try:
        said = json.loads(answer.stdout)
        version, identity = said["version"], said["identity"]
    except (ValueError, KeyError, TypeError):
        last = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EngineProblem(f"{python} can't say what it has installed: {last}") from None
    if not version:
        raise EngineProblem(
            f"{python} has no vLLM{' with ' + ':'.join(paths) if paths else ''}: install it there, or name its folder "
            "with --engine-path"
        )
    return Engine(name, version, engine.python, identity, (), paths)
