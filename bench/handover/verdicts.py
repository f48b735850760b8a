"""Room bench: the newest verdict of each recipe, from the runs that lie here: this machine's before others'."""

import json
from collections.abc import Iterator
from pathlib import Path

from bench.handover.runs import RESULTS
from bench.runfolder import seal_faults
from bench.verdict import EXIT_CODES
from images.errors import Problem
from recipes.catalogue import Verdict
from recipes.machine import machine_facts

RUNS = RESULTS.parent / ".runs"
MAX_BYTES = 4 << 20
Ranked = tuple[tuple[bool, bool, str], Verdict, Path]  # here, proves something, its name; the verdict; its run


def newest_verdicts(runs: Path = RUNS, results: Path = RESULTS, slug: str | None = None) -> dict[str, Verdict]:
    """The newest verdict by recipe id, and by the content of the bundle for adopted recipes.

    A run on this machine goes before others', and one that proves something before an INVALID one. Boots of
    ladders count as runs do. What can't be read is left out, and so is what isn't a sealed run of that recipe and
    machine: a listing is no place to fail, nor one for a file that somebody wrote.
    """
    slug = slug or machine_facts()["slug"]
    found: dict[str, list[Ranked]] = {}
    for file in [*_files(runs, "*"), *_files(results, "*/*/*")]:
        verdict, manifest = _read(file), _read(file.parent / "manifest.json")
        state, machine, recipe = (verdict.get(key) for key in ("state", "machine", "recipe"))
        if state not in EXIT_CODES or not isinstance(machine, str) or not isinstance(recipe, str):
            continue
        origin = manifest.get("origin")
        key = origin.get("content") if isinstance(origin, dict) else recipe
        if isinstance(key, str):
            rank = (machine == slug, state != "INVALID", file.parent.name)
            found.setdefault(key, []).append((rank, Verdict(state, machine, file.parent.name), file.parent))
    best = {key: _best(ranked) for key, ranked in found.items()}
    return {key: verdict for key, verdict in best.items() if verdict}


def _best(ranked: list[Ranked]) -> Verdict | None:
    """The first by rank that is a sealed run, with the newest INVALID one of the same machine that came after it.

    Only runs that are to be named have their files looked at: hashing all of them would take a listing's time.
    """
    ordered = sorted(ranked, key=lambda each: each[0], reverse=True)
    found = next((each for each in ordered if _sealed(each)), None)
    if found is None:
        return None
    (here, valid, name), best, _ = found
    later = [each for each in ordered if each[0][0] == here and not each[0][1] and each[0][2] > name]
    void = next((verdict for _, verdict, _ in filter(_sealed, later)), None) if valid else None
    return best._replace(invalid_since=void.run) if void else best


def _sealed(ranked: Ranked) -> bool:
    """Whether a verdict lies in a run folder as it was sealed, of the recipe and the machine that it names."""
    _, verdict, folder = ranked
    try:
        if seal_faults(folder):
            return False
    except (Problem, OSError):
        return False
    slug, ran = _read(folder / "machine.json").get("slug"), _read(folder / "manifest.json").get("recipe")
    return slug == verdict.machine and ran == _read(folder / "verdict.json").get("recipe")


def _files(folder: Path, depth: str) -> Iterator[Path]:
    yield from folder.glob(f"{depth}/verdict.json")
    yield from folder.glob(f"{depth}/runs/*/verdict.json")


def _read(file: Path) -> dict:
    try:
        if not file.is_file() or file.stat().st_size > MAX_BYTES:
            return {}
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
