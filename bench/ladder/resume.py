"""Room bench: going on with a ladder: whether the finished boots are still boots of what would be run now."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.ladder.combine import other_recipe
from bench.ladder.journal import RUNS, Boot
from bench.ladder.sequence import Rung
from bench.record import Plan
from bench.runfolder import read_json, read_recipe
from images.errors import RunProblem
from recipes.load import Loaded
from recipes.schema import Recipe


def strays(folder: Path, configurations: Mapping[str, Rung], boots: Sequence[Boot]) -> list[tuple[Boot, list[str]]]:
    """Finished boots of another configuration than their rung has now, each with the keys that differ."""
    found = []
    for boot in boots:
        rung = configurations.get(boot.rung)
        if boot.state != "finished" or rung is None:
            continue
        differing = other_recipe(read_recipe(folder / RUNS / boot.run), rung.loaded.recipe)
        if differing:
            found.append((boot, differing))
    return found


def as_measured(folder: Path, rungs: Sequence[Rung], boots: Sequence[Boot]) -> list[Rung]:
    """The rungs with the recipes that their finished boots have: the library may have changed since."""
    recorded: dict[str, Recipe] = {}
    for boot in boots:
        if boot.state == "finished" and boot.rung not in recorded:
            recorded[boot.rung] = read_recipe(folder / RUNS / boot.run)

    def then(loaded: Loaded | None) -> Loaded | None:
        recipe = recorded.get(loaded.recipe.id.split("/", maxsplit=1)[1]) if loaded else None
        return replace(loaded, recipe=recipe) if recipe else loaded

    return [replace(rung, loaded=then(rung.loaded), before=then(rung.before)) for rung in rungs]


def require_recipes(folder: Path, configurations: Mapping[str, Rung], boots: Sequence[Boot]) -> None:
    """Raise RunProblem where a recipe isn't any more what finished boots were measured with."""
    found = strays(folder, configurations, boots)
    if found:
        boot, keys = found[0]
        recipe = configurations[boot.rung].loaded.recipe.id
        raise RunProblem(
            f"{recipe} is another recipe than when boot {boot.boot} of it was measured: {', '.join(keys[:5])}. "
            "Boots of two recipes are never mixed: put it back, or start a new ladder. What differs: "
            f"./inv diff {folder / RUNS / boot.run} {recipe}"
        )


def require_same_host(folder: Path, boots: Sequence[Boot], facts: dict, plan: Plan) -> None:
    """Raise RunProblem where finished boots were measured on another kind of machine, or by another engine.

    Another card or host of the same kind is another visit, and no problem: steps are taken within visits.
    """
    for boot in boots:
        if boot.state != "finished":
            continue
        run = folder / RUNS / boot.run
        try:
            slug = read_json(run / "machine.json")["slug"]
            engine = read_json(run / "manifest.json")["engine"]
            name, identity = engine["name"], engine["identity"]
        except (TypeError, KeyError) as error:
            raise RunProblem(f"{run}: can't be read as a run: {error!r}") from error
        now = {"machine": facts["slug"], "engine": plan.engine.identity}
        was = {"machine": slug, "engine": identity if name == plan.engine.name else plan.engine.identity}
        for what, before in was.items():
            if before != now[what]:
                raise RunProblem(
                    f"this ladder was begun with another {what}: {before} (boot {boot.boot} of {boot.rung}); it is "
                    f"{now[what]} now. Boots of two are never mixed: go on as it was begun, or start a new ladder"
                )
