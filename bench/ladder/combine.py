"""Room bench: several runs of one rung, a boot each, as one body of evidence: boots are judged together. Pure."""

from dataclasses import replace

from bench.evidence import Evidence
from images.errors import RunProblem


def combine(runs: list[Evidence]) -> Evidence:
    """One evidence of one or more runs of the same recipe on the same machine and engine; boots numbered anew.

    Quality is the first run's that has it. Raises RunProblem where the runs are not of one configuration.
    """
    first = runs[0]
    for other in runs[1:]:
        _require_same(first, other)
    windows, boots, records, load = [], [], [], []
    for index, run in enumerate(runs, start=1):
        windows += [replace(window, boot=index) for window in run.windows]
        boots += [replace(boot, number=index) for boot in run.boots]
        records += [record.model_copy(update={"boot": index}) for record in run.manifest.boots]
        load += [record.model_copy(update={"boot": index}) for record in run.manifest.load]
    failures = [run.manifest.failure for run in runs if run.manifest.failure]
    engine = first.manifest.engine
    answered = [version for run in runs for version in run.manifest.engine.answered]
    manifest = first.manifest.model_copy(
        update={
            "planned_windows": sum(run.manifest.planned_windows for run in runs),
            "boots": records,
            "load": load,
            "failure": failures[0] if failures else None,
            "engine": engine.model_copy(update={"answered": answered}),
        }
    )
    return replace(
        first,
        manifest=manifest,
        windows=windows,
        boots=boots,
        quality=next((run.quality for run in runs if run.quality), {}),
        seal_faults=[fault for run in runs for fault in run.seal_faults],
    )


def _require_same(first: Evidence, other: Evidence) -> None:
    pairs = {
        "the recipe": (first.recipe, other.recipe),
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
