"""Room bench: the runs that a bundle carries, chosen, sealed and judged again; and the quality suites' items."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from bench.evidence import Evidence, read_evidence
from bench.quality.suites import suite_items
from bench.verdict import judge
from images.errors import BundleProblem, Problem, UsageProblem
from images.yaml_source import shown
from recipes.bundle.layout import CarriedRun
from recipes.load import changes
from recipes.schema import Recipe

RESULTS = Path(__file__).resolve().parent.parent.parent / "results"
LADDER = "ladder.json"
OF_A_RUN = frozenset({"benchmark.boots", "benchmark.windows"})  # how often it is measured, not what


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
    """A run as a bundle carries it, judged again from its folder alone, by the claims that the recipe makes.

    Raises BundleProblem for a run of another recipe, or of this one as it was once, one that isn't sealed, or was
    altered since.
    """
    evidence, verdict = judged_for(run, recipe)
    if evidence.seal_faults:
        raise BundleProblem(f"{shown(run)} can't be carried: {evidence.seal_faults[0]}")
    return CarriedRun(name=run.name, machine=evidence.machine.slug, state=verdict["state"]), run


def judged_for(run: Path, recipe: Recipe) -> tuple[Evidence, dict]:
    """A run, read, and judged by the claims of a recipe: what the run's own copy of it claims counts for nothing.

    Raises BundleProblem for a run that doesn't show what this recipe does, RunProblem for one that can't be judged.
    """
    evidence = read_evidence(run)
    if evidence.recipe.id != recipe.id:
        raise BundleProblem(f"{shown(run)} is a run of {evidence.recipe.id}, not of {recipe.id}")
    differing = _other_work(evidence.recipe, recipe)
    if differing:
        keys = ", ".join(differing[:5])
        raise BundleProblem(f"{shown(run)} is a run of {recipe.id} with another {keys}: run the recipe as it is now")
    subject = evidence.recipe.model_copy(update={"claims": recipe.claims})
    return evidence, judge(replace(evidence, recipe=subject))


def published_runs(recipe: Recipe, results: Path = RESULTS) -> list[tuple[CarriedRun, Path]]:
    """The newest published run of exactly this recipe on each machine, those that prove nothing left out.

    A run that can't be read is no reason to fail: it is left out too.
    """
    newest: dict[str, tuple[CarriedRun, Path]] = {}
    for file in sorted(results.glob(f"*/{recipe.family}/*-{recipe.id.replace('/', '-')}-*/recipe.yaml")):
        run = file.parent
        try:
            found, _ = carried_run(run, recipe)
        except Problem:
            continue
        if found.state != "INVALID":
            newest[run.parent.parent.name] = (found, run)
    return [newest[machine] for machine in sorted(newest)]


def _other_work(ran: Recipe, wanted: Recipe) -> list[str]:
    """The keys in which a run's recipe does something else than this one.

    How it was started and how often it was booted are its own, and so is a commit of the model that the recipe
    leaves open.
    """
    own = OF_A_RUN if wanted.model.revision else OF_A_RUN | {"model.revision"}
    found = [key for key in changes(wanted, ran) if key not in own and not key.startswith("runtime.")]
    return found + (["status"] if ran.status != wanted.status else [])


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
