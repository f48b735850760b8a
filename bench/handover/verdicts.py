"""Room bench: the newest verdict of each recipe, from the runs that lie here: this machine's before others'."""

import json
from collections.abc import Iterator
from pathlib import Path

from bench.handover.runs import RESULTS
from bench.verdict import EXIT_CODES
from recipes.catalogue import Verdict
from recipes.machine import machine_facts

RUNS = RESULTS.parent / ".runs"
MAX_BYTES = 4 << 20


def newest_verdicts(runs: Path = RUNS, results: Path = RESULTS, slug: str | None = None) -> dict[str, Verdict]:
    """The newest verdict by recipe id, and by the content of the bundle for adopted recipes.

    A run on this machine goes before others', and one that proves something before an INVALID one. Boots of
    ladders count as runs do. What can't be read is left out: a listing is no place to fail.
    """
    slug = slug or machine_facts()["slug"]
    found: dict[str, list[tuple[tuple[bool, bool, str], Verdict]]] = {}
    for file in [*_files(runs, "*"), *_files(results, "*/*/*")]:
        verdict, manifest = _read(file), _read(file.parent / "manifest.json")
        state, machine, recipe = (verdict.get(key) for key in ("state", "machine", "recipe"))
        if state not in EXIT_CODES or not isinstance(machine, str) or not isinstance(recipe, str):
            continue
        origin = manifest.get("origin")
        key = origin.get("content") if isinstance(origin, dict) else recipe
        if isinstance(key, str):
            rank = (machine == slug, state != "INVALID", file.parent.name)
            found.setdefault(key, []).append((rank, Verdict(state, machine, file.parent.name)))
    return {key: _best(ranked) for key, ranked in found.items()}


def _best(ranked: list[tuple[tuple[bool, bool, str], Verdict]]) -> Verdict:
    """The first by rank, with the newest INVALID run of the same machine that came after it."""
    (here, valid, name), best = max(ranked)
    later = [other for (there, proves, other), _ in ranked if there == here and not proves and other > name]
    return best._replace(invalid_since=max(later)) if valid and later else best


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
