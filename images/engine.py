"""Room images: an engine as a Python environment in the user's cache, for hosts without Docker.

The environment's folder is named by the hash of everything that decides its content. A marker is
written into it last, so an interrupted build is never used; a lock keeps two builds apart.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from images.alterations import alter
from images.command import run, run_shown, tail
from images.console import note
from images.declaration import IMAGES, Declaration, declaration
from images.errors import EngineProblem
from images.index import cache_root, uv_command, uv_environment

MARKER = "engine.json"
REMEDIES = (
    (
        "no space left on device",
        "the disk is full: free some space, or set STATION_RECIPES_CACHE to a larger disk",
    ),
    (
        "hash mismatch",
        "a downloaded file is not the pinned one: the index serves altered files, or a broken cache",
    ),
    ("failed to fetch", "the package index could not be reached: check the network or pip's index settings"),
    ("no solution found", "the package index lacks a pinned version: check pip's index settings"),
)


@dataclass(frozen=True)
class Engine:
    """An engine that can be started: an interpreter whose environment holds vLLM.

    `version` is what the engine answers on /version; `identity` names the exact build (pins' hash);
    `patches` are the declared changes to it, each with file and reason; `paths` are put on its PYTHONPATH.
    """

    name: str
    version: str
    python: Path
    identity: str
    patches: tuple[dict, ...] = ()
    paths: tuple[str, ...] = ()

    def environ(self) -> dict[str, str]:
        """What every process of this interpreter needs in its environment."""
        return {"PYTHONPATH": os.pathsep.join(self.paths)} if self.paths else {}

    def command(self) -> list[str]:
        """The start of every vLLM command line."""
        return [str(self.python), "-m", "vllm.entrypoints.cli.main"]


def engine_identity(name: str, python: str | None = None, machine: str | None = None) -> str:
    """The hash over pins, patches, Python version and architecture: 16 hex digits.

    `python` (cpython-311) and `machine` (x86_64) default to those that run us.
    """
    facts = declaration(name)
    digest = hashlib.sha256(f"{facts.distribution} {facts.version} {facts.device} {facts.requires}".encode())
    for file in ("pins.txt", *patch_files(name)):
        digest.update((IMAGES / name / file).read_bytes())
    digest.update(f"{python or sys.implementation.cache_tag} {machine or platform.machine()}".encode())
    return digest.hexdigest()[:16]


def patch_files(name: str) -> list[str]:
    """The files below images/<name> that change the engine, by name."""
    return [patch.file for patch in declaration(name).patches]


def declared_patches(name: str) -> tuple[dict, ...]:
    """The declared changes to an engine, as a run records them: file and reason of each."""
    return tuple(patch.model_dump() for patch in declaration(name).patches)


def engine_home(name: str) -> Path:
    """The folder of an engine's environment in the cache, present or not."""
    return cache_root() / "engines" / f"{name}-{engine_identity(name)}"


def find_engine(name: str) -> Engine | None:
    """Return the installed engine, or None when it is absent or its build was interrupted."""
    facts = declaration(name)
    if not _installable(name):
        return None
    home = engine_home(name)
    python = home / "bin" / "python"
    if not (home / MARKER).exists() or not python.exists():
        return None
    return Engine(name, facts.version, python, engine_identity(name), declared_patches(name))


def ensure_engine(name: str, wheels: Path | None = None) -> Engine:
    """Return the engine, installing it first when it is absent: from the index, or from a folder of `wheels` alone.

    Whatever that holds, only files with the pinned hashes are installed. Raises EngineProblem when it can't be
    installed on this host.
    """
    if not _installable(name):
        raise EngineProblem(f"the {name} engine can't be installed as an environment, only built or pulled as an image")
    found = find_engine(name)
    if found:
        return found
    home = engine_home(name)
    with build_lock(home):
        if not find_engine(name):  # another run may have built it while we waited
            _check_disk(name, home.parent)
            _build(name, home, wheels)
    built = find_engine(name)
    if built is None:
        raise EngineProblem(f"the engine in {home} does not work: remove that folder and run again")
    return built


def _installable(name: str) -> bool:
    """Whether an engine is meant to run as an environment too: the CUDA one needs more of its host than Python."""
    return declaration(name).disk_gb is not None


@contextmanager
def build_lock(home: Path) -> Iterator[None]:
    """Hold the lock beside `home` for a `with` block; waits, and says so, while another run holds it.

    Raises EngineProblem when the cache can't be written.
    """
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        lock = home.with_suffix(".lock").open("w")
    except OSError as error:
        raise EngineProblem(
            f"can't write to the cache {home.parent}: {error.strerror}. Set STATION_RECIPES_CACHE to another folder."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("Another run is building this engine: waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_disk(name: str, folder: Path) -> None:
    wanted_gb = declaration(name).disk_gb
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < wanted_gb:
        raise EngineProblem(
            f"the {name} engine needs {wanted_gb} GB in {folder}, {free_gb:.1f} GB are free. "
            "Free some space, or set STATION_RECIPES_CACHE to a folder on a larger disk."
        )


def _build(name: str, home: Path, wheels: Path | None) -> None:
    facts = declaration(name)
    note(f"Installing the engine: {facts.title}, about {facts.disk_gb} GB, once, into {home}")
    shutil.rmtree(home, ignore_errors=True)
    log = home.with_suffix(".log")
    log.unlink(missing_ok=True)
    # uv's own cache would keep every package twice; this one goes when the engine stands.
    downloads = home.with_suffix(".downloads")
    environ = {**uv_environment(os.environ), "UV_CACHE_DIR": str(downloads), "UV_LINK_MODE": "hardlink"}
    uv = uv_command()
    _step([*uv, "venv", "--python", sys.executable, str(home)], "1/3 making the environment", log, environ)
    python = home / "bin" / "python"
    install = [*uv, "pip", "install", "--python", str(python), "--require-hashes", "--no-deps"]
    if wheels:
        install += ["--no-index", "--find-links", str(wheels)]
    else:
        install += torch_source(facts.requires, python, environ)
    _step([*install, "-r", str(IMAGES / name / "pins.txt")], "2/3 installing the pinned packages", log, environ)
    _alter(facts, home)
    # Without bytecode every one of the engine's three processes compiles vLLM and torch at each start.
    compiling = [str(python), "-m", "compileall", "-qq", "-j", "0", str(home / "lib")]
    run_shown(compiling, "3/3 compiling bytecode", log)  # a few files of other Python versions never compile
    shutil.rmtree(downloads, ignore_errors=True)
    marker = {"name": name, "version": facts.version, "identity": engine_identity(name)}
    partial = home / (MARKER + ".partial")
    with partial.open("w") as sink:
        json.dump(marker, sink)
        sink.flush()
        os.fsync(sink.fileno())
    partial.rename(home / MARKER)


def _alter(facts: Declaration, home: Path) -> None:
    for site in home.glob("lib/python*/site-packages"):
        original = site / f"{facts.module}-{facts.version}.dist-info"
        alter(facts, site, (original / "entry_points.txt").read_text())


def torch_source(requirement: str, python: Path, environ: dict[str, str]) -> list[str]:
    """Return the option that adds PyTorch's CPU index, or nothing where the configured index will do."""
    probe = [*uv_command(), "pip", "install", "--python", str(python), "--dry-run", "--no-deps", requirement]
    if run(probe, env=environ).returncode == 0:
        return []
    note(f"The configured package index has no {requirement}: PyTorch's CPU index is added.")
    return ["--torch-backend", "cpu"]


def _step(argv: list[str], description: str, log: Path, environ: dict[str, str]) -> None:
    if run_shown(argv, description, log, env=environ) == 0:
        return
    said = tail(log)
    causes = [remedy for sign, remedy in REMEDIES if sign in said.lower()]
    cause = causes[0] if causes else "the installer's last words are above"
    raise EngineProblem(f"{said}\n\nThe engine could not be installed: {cause}. Whole log: {log}")
