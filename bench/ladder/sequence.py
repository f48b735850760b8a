"""Room bench: which boot of which rung comes next, from what is done already. Pure but for reading the runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.ladder.decide import Decision, decide
from bench.ladder.journal import Boot
from bench.ladder.rows import Ladder, RungRuns, read_measured
from bench.ladder.setting import Setting
from recipes.compose import ancestor, compose
from recipes.load import Loaded, load_ladder
from recipes.machine import why_not
from recipes.schema import Recipe
from recipes.site import OwnSite


@dataclass(frozen=True)
class Rung:
    """A rung on this machine: its recipe with the ladder's load, what it is measured against, or why it can't be.

    `own`: the recipe with its own load and claims, as they were published; `within`: whether it is one of the family's
    ladder, and doesn't stand beside it.
    """

    name: str
    loaded: Loaded
    before: Loaded | None
    absent: str | None
    own: Recipe
    within: bool


@dataclass(frozen=True)
class Unit:
    """The next boot: of a rung, with the configuration it is tried on."""

    rung: Rung
    boot: int


@dataclass(frozen=True)
class Outlook:
    """What is left to do, in order as far as it is known, and what was decided so far."""

    units: list[Unit]
    decisions: list[Decision]
    configurations: dict[str, Rung]


def rungs_here(setting: Setting, loaded: Sequence[Loaded], facts: dict, own: OwnSite | None = None) -> list[Rung]:
    """Every rung with the ladder's load; those that can't exist here with the reason. `own`: see load_recipe."""
    families = {each.recipe.family for each in loaded}
    among = {f"{family}/{name}" for family in families for name in load_ladder(family).rungs}
    found = []
    for each in loaded:
        before = ancestor(each, facts, {other.recipe.id for other in loaded}, own)
        shaped = setting.applied(each)
        found.append(
            Rung(
                each.recipe.id.split("/", maxsplit=1)[1],
                shaped,
                None if before is None else setting.applied(before),
                why_not(each.recipe, facts),
                each.recipe,
                each.recipe.id in among,
            )
        )
    return found


def outlook(setting: Setting, rungs: Sequence[Rung], folder: Path, boots: Sequence[Boot]) -> Outlook:
    """What comes next. Boots that were cut off are done again; those that failed, or that a guard voids, are not."""
    missing = {rung.name: _missing(rung.name, setting.boots, boots) for rung in rungs}
    here = [rung for rung in rungs if rung.absent is None]
    if setting.keep:
        return _deciding(setting, here, folder, boots, missing)
    rounds = range(1, setting.boots + 1)
    if setting.order == "interleaved":
        every = [(rung, boot) for boot in rounds for rung in here]
    else:
        every = [(rung, boot) for rung in here for boot in rounds]
    left = [Unit(rung, boot) for rung, boot in every if boot in missing[rung.name]]
    return Outlook(left, [], {rung.name: rung for rung in here})


def _missing(rung: str, asked: int, boots: Sequence[Boot]) -> list[int]:
    """The numbers of a rung's boots that are still to be done. Those of another visit count, whatever their number."""
    done = [boot.boot for boot in boots if boot.rung == rung and boot.state in {"finished", "failed"}]
    return [number for number in range(1, asked + 1) if number not in done][: max(0, asked - len(done))]


def _deciding(
    setting: Setting, here: Sequence[Rung], folder: Path, boots: Sequence[Boot], missing: dict[str, list[int]]
) -> Outlook:
    """Rung by rung: the first that isn't done is next, on the configuration that was kept until then."""
    decisions: list[Decision] = []
    configurations: dict[str, Rung] = {}
    found = read_measured(folder, boots)
    measured = {rung.name: found.get(rung.name, RungRuns(rung.name, [], [])) for rung in here}
    ladder = Ladder(list(measured.values()), deciding=True)
    kept: Rung | None = None
    for number, rung in enumerate(here):
        current = rung if kept is None else _on(kept, rung)
        configurations[rung.name] = current
        left = [Unit(current, boot) for boot in missing[rung.name]]
        if left:
            rest = [Unit(each, boot) for each in here[number + 1 :] for boot in range(1, setting.boots + 1)]
            return Outlook([*left, *rest], decisions, configurations)
        if kept is None:  # the first that gives a figure is what changes are tried on
            kept = current if measured[rung.name].counting else None
            continue
        decision = decide(setting, measured[kept.name], measured[rung.name], ladder)
        decisions.append(decision)
        kept = current if decision.kept else kept
    return Outlook([], decisions, configurations)


def _on(kept: Rung, rung: Rung) -> Rung:
    """The rung's change on the configuration kept so far. Its change is against what it extends in its family."""
    if rung.before is None:
        return rung
    tried = compose(kept.loaded, rung.loaded, rung.before)
    return replace(rung, loaded=tried, before=kept.loaded, absent=None)
