"""Room bench: everything a verdict may rest on, read from a run folder alone."""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.counters import Counters, difference
from bench.runfolder import read_json, read_recipe, seal_faults, windows_of
from images.errors import RunProblem
from recipes.schema import Recipe

NAMES = {
    "start_s": np.floating,
    "ttft_s": np.floating,
    "e2e_s": np.floating,
    "input_tokens": np.integer,
    "output_tokens": np.integer,
    "chunks": np.integer,
    "gaps_us": np.integer,
    "error": np.str_,
}


@dataclass(frozen=True)
class Window:
    """A finished window: raw arrays, and what the server counted during it (None: not readable)."""

    boot: int
    number: int
    arrays: dict[str, np.ndarray]
    counted: Counters | None


@dataclass(frozen=True)
class Boot:
    """One life of the server: what was rendered, what was live, and its log."""

    number: int
    argv: dict
    env: dict
    log: str


@dataclass(frozen=True)
class Evidence:
    """A run, read."""

    recipe: Recipe
    manifest: dict
    machine: dict
    windows: list[Window]
    boots: list[Boot]
    seal_faults: list[str]


def read_evidence(run: Path) -> Evidence:
    """Read a run folder.

    Raises RunProblem when it is no run folder or a file in it can't be read.
    """
    recipe = read_recipe(run)
    boots = [folder for folder in run.glob("boots/*") if folder.name.isdigit()]
    return Evidence(
        recipe=recipe,
        manifest=read_json(run / "manifest.json"),
        machine=read_json(run / "machine.json"),
        windows=[_read_window(boot, number, folder) for boot, number, folder in windows_of(run)],
        boots=[_read_boot(folder) for folder in sorted(boots, key=lambda folder: int(folder.name))],
        seal_faults=seal_faults(run),
    )


def _read_window(boot: int, number: int, folder: Path) -> Window:
    file = folder / "client.npz"
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise RunProblem(f"{file}: not a window's raw arrays: {error}") from error
    for name, kind in NAMES.items():
        if name not in arrays or not np.issubdtype(arrays[name].dtype, kind):
            raise RunProblem(f"{file}: wanted an array {name!r} of {kind.__name__}")
    requests = {len(arrays[name]) for name in NAMES if name != "gaps_us"}
    gaps = int((arrays["chunks"] - (arrays["ttft_s"] > 0)).sum())
    if len(requests) != 1 or gaps != len(arrays["gaps_us"]):
        raise RunProblem(f"{file}: the arrays' lengths don't agree")
    counters = folder / "counters.json"
    counted = None
    if counters.exists():
        stored = read_json(counters)
        counted = difference(stored["before"], stored["after"])
    return Window(boot, number, arrays, counted)


def _read_boot(folder: Path) -> Boot:
    log = folder / "server.log.gz"
    text = gzip.decompress(log.read_bytes()).decode(errors="replace") if log.exists() else ""
    argv, env = folder / "argv.json", folder / "env.json"
    return Boot(
        number=int(folder.name),
        argv=read_json(argv) if argv.exists() else {},
        env=read_json(env) if env.exists() else {},
        log=text,
    )
