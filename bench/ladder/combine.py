"""Room bench: which runs belong together: boots of a rung as one body of evidence, rungs to be compared. Pure."""

from dataclasses import replace

from bench.evidence import Evidence, Settings
from bench.measurement import Several
from bench.quality.score import weakest
from images.errors import RunProblem
from recipes.load import changes
from recipes.schema import Claim, Recipe

CHOSEN = frozenset({"runtime.port", "runtime.kind"})  # by a visit's options: no part of what is measured


def combine(runs: list[Evidence], answered: list[Evidence] | None = None) -> Several:
    """One evidence of one or more runs of the same recipe on the same machine and engine; boots numbered anew.

    `answered`: the runs whose answers count, by default the same ones; each is judged, and the weakest shown. Raises
    RunProblem where the runs are not of one configuration.
    """
    first, answered = runs[0], runs if answered is None else answered
    for other in [*runs[1:], *answered]:
        _require_same(first, other)
    windows, boots, records, load = [], [], [], []
    for index, run in enumerate(runs, start=1):
        windows += [replace(window, boot=index) for window in run.windows]
        boots += [replace(boot, number=index) for boot in run.boots]
        records += [record.model_copy(update={"boot": index}) for record in run.manifest.boots]
        load += [record.model_copy(update={"boot": index}) for record in run.manifest.load]
    asked = tuple(run.quality for run in answered if run.quality)
    failures = [run.manifest.failure for run in runs if run.manifest.failure]
    engine = first.manifest.engine
    versions = [version for run in runs for version in run.manifest.engine.answered]
    manifest = first.manifest.model_copy(
        update={
            "planned_windows": sum(run.manifest.planned_windows for run in runs),
            "boots": records,
            "load": load,
            "failure": failures[0] if failures else None,
            "engine": engine.model_copy(update={"answered": versions}),
        }
    )
    put = {
        "manifest": manifest,
        "windows": windows,
        "boots": boots,
        "quality": weakest(asked),
        "answered_in": {suite: file for run in reversed(answered) for suite, file in run.answered_in.items()},
        "seal_faults": [fault for run in runs for fault in run.seal_faults],
        "asked": asked,
    }
    return Several(**{**vars(first), **put})


def other_recipe(first: Recipe, second: Recipe) -> list[str]:
    """The keys in which two recipes measure different things, `claims` among them; a port, a runtime and what a claim
    says of its source are none.
    """
    claims = ["claims"] if _claimed(first) != _claimed(second) else []
    return [key for key in changes(first, second) if key not in CHOSEN] + claims


def _claimed(recipe: Recipe) -> list[Claim]:
    return [claim.model_copy(update={"source": ""}) for claim in recipe.claims]


def incomparable(before: Evidence, after: Evidence) -> str | None:
    """Why a difference of two rungs is not the doing of the second one's change alone; None where it is.

    Their loads, their engine and model have to be one, unless their recipes name different ones; and what the second
    recorded as the configuration that it changes has to be what the first one really was given.
    """
    first, second = before.recipe, after.recipe
    engines = (first.engine.image, first.engine.version) == (second.engine.image, second.engine.version)
    pairs = {
        "the load": (first.benchmark, second.benchmark),
        "the engine": (before.manifest.engine.identity, after.manifest.engine.identity) if engines else (0, 0),
        "the model's files": (before.manifest.model.files, after.manifest.model.files)
        if first.model.files == second.model.files
        else (0, 0),
    }
    differing = [name for name, (mine, theirs) in pairs.items() if mine != theirs]
    recorded = after.resolved.before if after.resolved else None
    if recorded and recorded.id == first.id and before.resolved and _given(recorded) != _given(before.resolved.after):
        differing.append(f"the recipe of {first.id}")
    return f"{', '.join(differing)} changed between them" if differing else None


def _given(settings: Settings) -> tuple[list[str], dict[str, str]]:
    """What an engine is given, without the port and the card, which are chosen for a visit."""
    argv = list(settings.argv)
    if "--port" in argv[:-1]:
        at = argv.index("--port")
        del argv[at : at + 2]
    return argv, {name: value for name, value in settings.env.items() if name != "CUDA_VISIBLE_DEVICES"}


def _require_same(first: Evidence, other: Evidence) -> None:
    keys = other_recipe(first.recipe, other.recipe)
    pairs = {
        f"the recipe ({', '.join(keys)})": ([], keys),
        "the engine": (first.manifest.engine.identity, other.manifest.engine.identity),
        "the machine": (first.machine.slug, other.machine.slug),
        "the model's files": (first.manifest.model.files, other.manifest.model.files),
        "the schema": (first.manifest.schema_, other.manifest.schema_),
    }
    differing = [name for name, (mine, theirs) in pairs.items() if mine != theirs]
    if differing:
        raise RunProblem(
            f"boots of {first.recipe.id} can't be taken together: {', '.join(differing)} changed between them. "
            "Start a new ladder"
        )
