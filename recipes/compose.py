"""Room recipes: one rung's change applied to another configuration, so that a ladder can leave rungs out."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from images.errors import UsageProblem
from images.validate import validate
from recipes.load import Loaded, as_data, changes, leaves, load_ladder, load_recipe
from recipes.machine import why_not
from recipes.schema import Recipe
from recipes.site import OwnSite


def ancestor(loaded: Loaded, facts: dict, among: Collection[str] = (), own: OwnSite | None = None) -> Loaded | None:
    """The recipe that a rung's change is measured against here: the nearest one it extends that can run here.

    One whose id is `among` those given goes before nearer ones that aren't: the rungs that are measured. None for the
    first recipe of a family, and for one whose ancestors belong to another family. `own`: see load_recipe.
    """
    current, found = loaded, []
    while current.recipe.extends:
        current = load_recipe(current.recipe.extends, own=own)
        if current.recipe.family != loaded.recipe.family:
            break
        if why_not(current.recipe, facts) is None:
            found.append(current)
    return next((each for each in found if each.recipe.id in among), found[0] if found else None)


def compose(kept: Loaded, rung: Loaded, parent: Loaded) -> Loaded:
    """The configuration `kept` with what `rung` changes against `parent`; where kept is the parent, the rung itself.

    Raises UsageProblem where the change makes no valid recipe on that configuration.
    """
    differing = changes(parent.recipe, rung.recipe)
    if not changes(kept.recipe, parent.recipe):
        return rung
    wanted = dict(leaves(as_data(rung.recipe)))
    paths = {".".join(path): path for path in wanted.keys() | dict(leaves(as_data(parent.recipe))).keys()}
    data = as_data(kept.recipe)
    for key in differing:
        _set(data, paths[key], wanted)
    own = as_data(rung.recipe)
    data |= {key: own[key] for key in ("id", "title", "extends", "delta", "applies", "claims", "status")}
    data["title"] = f"{rung.recipe.title} (on {kept.recipe.id})"
    # A rung's figures were claimed on the rungs below it: on another configuration nothing is claimed of a rate.
    data["claims"] = [claim for claim in own["claims"] if claim["metric"] == "exact_match"]
    try:
        return replace(rung, recipe=validate(Recipe, data, rung.marks))
    except UsageProblem as problem:
        raise UsageProblem(f"{rung.recipe.id} can't be tried on {kept.recipe.id}: {problem}") from problem


def _set(data: dict, path: tuple[str, ...], wanted: dict[tuple[str, ...], Any]) -> None:
    for key in path[:-1]:
        data = data[key]
    if path in wanted:
        data[path[-1]] = wanted[path]
    else:
        data.pop(path[-1], None)


def rungs_of(family: str, chosen: str | None, own: OwnSite | None = None) -> list[Loaded]:
    """A family's rungs in the ladder's order, or those that are named (separated by commas), in the order given.

    `own`: see load_recipe. Raises UsageProblem for a family or rung that isn't there, or one named twice.
    """
    names = [name.strip() for name in chosen.split(",") if name.strip()] if chosen else load_ladder(family).rungs
    if len(set(names)) < len(names):
        raise UsageProblem(f"--rungs {chosen}: one stands twice")
    if not names:
        raise UsageProblem("--rungs: wanted names of rungs, separated by commas")
    return [load_recipe(f"{family}/{name}", own=own) for name in names]
