"""Room bench: the newest verdict of each recipe, from the runs that lie here: this machine's before others'."""

import json
from pathlib import Path

from bench.handover.runs import RESULTS
from bench.verdict import EXIT_CODES
from recipes.catalogue import Verdict
from recipes.machine import machine_facts

RUNS = RESULTS.parent / ".runs"
MAX_BYTES = 4 << 20


def newest_verdicts(runs: Path = RUNS, results: Path = RESULTS, slug: str | None = None) -> dict[str, Verdict]:
    """The newest verdict by recipe id, and by the content of the bundle for adopted recipes.

    A run on this machine goes before others'. What can't be read is left out: a listing is no place to fail.
    """
    slug = slug or machine_facts()["slug"]
    found: dict[str, tuple[tuple[bool, str], Verdict]] = {}
    files = [*runs.glob("*/verdict.json"), *results.glob("*/*/*/verdict.json")]
    for file in files:
        verdict, manifest = _read(file), _read(file.parent / "manifest.json")
        state, machine, recipe = (verdict.get(key) for key in ("state", "machine", "recipe"))
        if state not in EXIT_CODES or not isinstance(machine, str) or not isinstance(recipe, str):
            continue
        origin = manifest.get("origin")
        key = origin.get("content") if isinstance(origin, dict) else recipe
        rank = (machine == slug, file.parent.name)
        if isinstance(key, str) and (key not in found or found[key][0] < rank):
            found[key] = rank, Verdict(state, machine, file.parent.name)
    return {key: verdict for key, (_, verdict) in found.items()}


def _read(file: Path) -> dict:
    try:
        if file.stat().st_size > MAX_BYTES:
            return {}
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
