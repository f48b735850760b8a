"""Room bench: a ladder's rungs as they were when it was begun, kept beside its plan: the library changes meanwhile."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from bench.ladder.journal import NAME, RUNS, Boot
from bench.ladder.sequence import Rung, rungs_here
from bench.ladder.setting import Setting
from bench.runfolder import dump_json, read_json, read_recipe, write_text
from images.console import note
from images.errors import RunProblem, UsageProblem
from images.yaml_source import Mark
from recipes.compose import rungs_of
from recipes.load import LIBRARY, Loaded, as_data
from recipes.schema import Recipe
from recipes.site import OwnSite

FILE = "recipes.json"
SCHEMA = 1


class Noted(BaseModel):
    """A rung as `Rung` has it: its recipe with its own load and claims, what it changes, and why it can't be here."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rung: str
    recipe: Recipe
    before: Recipe | None
    absent: str | None
    within: bool


class Begun(BaseModel):
    """recipes.json."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rungs: list[Noted]


def write_begun(folder: Path, rungs: Sequence[Rung]) -> None:
    """Write recipes.json into a new ladder's folder."""
    rows = [
        {
            "rung": rung.name,
            "recipe": as_data(rung.own),
            "before": None if rung.before is None else as_data(rung.before.recipe),
            "absent": rung.absent,
            "within": rung.within,
        }
        for rung in rungs
    ]
    write_text(folder / FILE, dump_json({"schema": SCHEMA, "rungs": rows}))


def read_begun(folder: Path, setting: Setting) -> dict[str, Rung]:
    """The rungs of a ladder as they were when it was begun, by name; empty for a ladder of before this file.

    Raises RunProblem where it can't be read.
    """
    if not (folder / FILE).is_file():
        return {}
    try:
        read = Begun.model_validate(read_json(folder / FILE))
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        raise RunProblem(f"{folder / FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for each in read.rungs:
        _require_of(each.recipe, setting, folder / FILE, each.rung)
    return {each.rung: _rung(each, setting) for each in read.rungs}


def _require_of(recipe: Recipe, setting: Setting, source: Path, rung: str) -> None:
    wanted = f"{setting.family}/{rung}"
    if recipe.id != wanted:
        raise RunProblem(f"{source}: the recipe of {recipe.id}, and by the ladder's plan it is {wanted}'s")


def _rung(noted: Noted, setting: Setting) -> Rung:
    before = None if noted.before is None else setting.applied(_loaded(noted.before))
    loaded = setting.applied(_loaded(noted.recipe))
    return Rung(noted.rung, loaded, before, noted.absent, noted.recipe, noted.within)


def _loaded(recipe: Recipe) -> Loaded:
    return Loaded(recipe, LIBRARY / recipe.family, {(): Mark(Path(FILE), 1)})


def as_begun(folder: Path, setting: Setting, rungs: Iterable[Rung]) -> list[Rung]:
    """Today's rungs, with what was published of them when the ladder was begun."""
    begun = read_begun(folder, setting)
    was = [(rung, begun.get(rung.name, rung)) for rung in rungs]
    return [replace(rung, own=then.own, within=then.within) for rung, then in was]


def rungs_then(folder: Path, setting: Setting, boots: Sequence[Boot]) -> list[Rung]:
    """The rungs of a ladder from its folder alone, on any machine.

    Of a ladder of before recipes.json the runs' own recipes tell as much as they hold, and today's library the rest: a
    rung that neither has is left out, and a note says so. Raises RunProblem where the plan names a rung twice, or what
    can be none.
    """
    wrong = [name for name in setting.rungs if not re.fullmatch(NAME, name) or setting.rungs.count(name) > 1]
    if wrong:
        raise RunProblem(f"{folder}: its plan has the rung {wrong[0]!r} twice, or it is no name of a rung")
    begun, ran = read_begun(folder, setting), _recorded(folder, boots)
    missing = [name for name in setting.rungs if name not in begun]
    found = begun | (_of_library(folder, setting, missing, ran) if missing else {})
    lost = [name for name in setting.rungs if name not in found]
    if lost:
        note(f"{folder}: not in the library any more, never measured, and left out: {', '.join(lost)}")
    if not found:
        raise RunProblem(
            f"{folder}: the library has none of its rungs, and none was measured: there is nothing to show"
        )
    found |= {
        name: replace(found[name], absent=None) for name in ran if name in found
    }  # another visit's machine had it
    return [found[name] for name in setting.rungs if name in found]


def _recorded(folder: Path, boots: Sequence[Boot]) -> dict[str, Path]:
    """By rung the run of its first finished boot."""
    finished = [boot for boot in boots if boot.state == "finished" and boot.run]
    return {boot.rung: folder / RUNS / boot.run for boot in reversed(finished)}


def _of_library(folder: Path, setting: Setting, names: Sequence[str], ran: dict[str, Path]) -> dict[str, Rung]:
    """Rungs by today's library, each with what its own run says of what was published; else by the run alone."""
    there, nobody = [], OwnSite()  # what is said of this machine is none of theirs
    for name in names:
        try:
            there += rungs_of(setting.family, name, nobody)
        except UsageProblem:
            continue
    runs = sorted((folder / RUNS).glob("*/machine.json"))
    facts = {"gpus": [], **read_json(runs[0])}  # of the machine that made the runs, not of this one
    found = {rung.name: rung for rung in rungs_here(setting, there, facts, nobody)}
    recipes = {name: read_recipe(run) for name, run in ran.items() if name in names}
    for name, recipe in recipes.items():
        _require_of(recipe, setting, ran[name], name)
    if not setting.shape and not setting.keep:  # else its load and its claims are not all that were its own
        found |= {name: replace(rung, own=recipes[name]) for name, rung in found.items() if name in recipes}
    return found | {name: _alone(recipe, recipes.values()) for name, recipe in recipes.items() if name not in found}


def _alone(recipe: Recipe, others: Collection[Recipe]) -> Rung:
    """A rung by its run alone, against what it extends if that was measured too."""
    before = next((_loaded(each) for each in others if each.id == recipe.extends), None)
    return Rung(recipe.id.split("/", maxsplit=1)[1], _loaded(recipe), before, None, recipe, True)
