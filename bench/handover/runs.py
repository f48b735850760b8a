"""Room bench: the runs that a bundle carries, chosen, sealed and judged again; and the quality suites' items."""

import json
from dataclasses import asdict
from pathlib import Path

from bench.evidence import read_evidence
from bench.quality.suites import suite_items
from bench.runfolder import seal_faults
from bench.verdict import judge
from images.errors import BundleProblem, Problem, UsageProblem
from images.yaml_source import shown
from recipes.bundle.layout import CarriedRun
from recipes.load import as_data
from recipes.schema import Recipe

RESULTS = Path(__file__).resolve().parent.parent.parent / "results"
LADDER = "ladder.json"


def items_of(recipe: Recipe) -> dict[str, bytes]:
    """The items of a recipe's quality suites as JSON lines, by suite; empty without one."""
    if recipe.quality is None:
        return {}
    found = {}
    for suite in recipe.quality.suites:
        items = suite_items(suite, recipe.quality.seed, recipe.quality.items)
        lines = [json.dumps(asdict(item), sort_keys=True, ensure_ascii=False) + "\n" for item in items]
        found[suite] = "".join(lines).encode()
    return found


def carried_run(run: Path, recipe: Recipe) -> tuple[CarriedRun, Path]:
    """A run as a bundle carries it, judged again from its folder alone.

    Raises BundleProblem for a run of another recipe, one that isn't sealed, or was altered since.
    """
    evidence = read_evidence(run)
    if evidence.recipe.id != recipe.id:
        raise BundleProblem(f"{shown(run)} is a run of {evidence.recipe.id}, not of {recipe.id}")
    faults = seal_faults(run)
    if faults:
        raise BundleProblem(f"{shown(run)} can't be carried: {faults[0]}")
    verdict = judge(evidence)
    return CarriedRun(name=run.name, machine=evidence.machine.slug, state=verdict["state"]), run


def published_runs(recipe: Recipe, results: Path = RESULTS) -> list[tuple[CarriedRun, Path]]:
    """The newest published run of exactly this recipe on each machine, those that prove nothing left out.

    A run that can't be read is no reason to fail: it is left out too.
    """
    newest: dict[str, tuple[CarriedRun, Path]] = {}
    wanted = as_data(recipe)
    for file in sorted(results.glob(f"*/{recipe.family}/*-{recipe.id.replace('/', '-')}-*/recipe.yaml")):
        run = file.parent
        try:
            found, _ = carried_run(run, recipe)
            same = _same_work(as_data(read_evidence(run).recipe), wanted)
        except Problem:
            continue
        if same and found.state != "INVALID":
            newest[run.parent.parent.name] = (found, run)
    return [newest[machine] for machine in sorted(newest)]


def _same_work(ran: dict, wanted: dict) -> bool:
    """Whether a run's recipe does what this one does; how often it was booted, and its texts, are its own."""
    kept = ("engine", "model", "quality", "proof")
    loads = [{**data["benchmark"], "boots": 0, "windows": 0} for data in (ran, wanted)]
    return all(ran.get(key) == wanted.get(key) for key in kept) and loads[0] == loads[1]


def published_ladders(recipe: Recipe, results: Path = RESULTS) -> list[tuple[str, Path]]:
    """The newest ladder of the recipe's family on each machine, by its name in a bundle."""
    newest = {}
    for file in sorted(results.glob(f"*/{recipe.family}/ladder-*/{LADDER}")):
        newest[file.parent.parent.parent.name] = file.parent
    return [(f"{machine}-{folder.name}", folder) for machine, folder in sorted(newest.items())]


def chosen_runs(recipe: Recipe, runs: list[str], with_results: bool) -> list[tuple[CarriedRun, Path]]:
    """The runs a person named, else with `with_results` the published ones; none where none was published.

    Raises UsageProblem for a run that was named twice, BundleProblem for one that can't be carried.
    """
    if runs:
        named = [carried_run(Path(run), recipe) for run in runs]
        if len({found.name for found, _ in named}) != len(named):
            raise UsageProblem("a run was named twice")
        return sorted(named, key=lambda pair: pair[0].name)
    return published_runs(recipe) if with_results else []
