"""Room bench: ladder.json: made from the plan, the journal and the runs, again and again, to the same bytes."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import compress
from pathlib import Path

from bench.analyse import rounded
from bench.evidence import Evidence
from bench.ladder.journal import Boot
from bench.ladder.rows import (
    Ladder,
    RungRuns,
    read_measured,
    rounds_drift,
    rung_row,
    whole_ladder,
)
from bench.ladder.sequence import Outlook, Rung
from bench.ladder.setting import Setting
from bench.runfolder import dump_json, write_text
from images.console import note
from recipes.compare import argument_changes
from recipes.load import Loaded
from recipes.schema import Benchmark

FILE = "ladder.json"
SENSITIVITY = 0.1


def write_table(
    folder: Path,
    setting: Setting,
    rungs: Sequence[Rung],
    boots: Sequence[Boot],
    ahead: Outlook,
    interrupted: bool = False,
) -> dict:
    """Make a ladder's table and write it into its folder; returns it."""
    measured = read_measured(folder, boots)
    table = build_table(setting, rungs, boots, ahead, measured)
    table["left"] = len(ahead.units) if not interrupted else max(1, len(ahead.units))
    table = rounded(table)  # to six digits, so that it has the same bytes everywhere
    try:
        write_text(folder / FILE, dump_json(table))
    except OSError as error:
        note(f"✘ {folder / FILE} could not be written: {error.strerror}. ./inv verdict makes it from the runs")
    return table


def build_table(
    setting: Setting,
    rungs: Sequence[Rung],
    boots: Sequence[Boot],
    ahead: Outlook,
    measured: dict[str, RungRuns],
) -> dict:
    """The mapping of ladder.json."""
    every = [measured.get(rung.name, RungRuns(rung.name, [], [])) for rung in rungs]
    ladder = Ladder(every, deciding=setting.keep is not None)
    rows, published = [], []
    for rung, runs in zip(rungs, every, strict=True):
        tried = ahead.configurations.get(rung.name, rung)
        plan = _plan_row(rung, tried)
        published.append(plan["published_tok_s"])
        rows.append(rung_row(plan, runs, _against(tried, measured), ladder))
    root = next((runs.rung for runs in every if runs.counting), None)
    kept = {decision.rung for decision in ahead.decisions if decision.kept}
    chain = _chain(setting, rungs, every, {root, *kept})
    first = next((each for runs in every for each in runs.measured), None)
    load = rungs[0].loaded.recipe.benchmark
    return {
        "schema": 1,
        "family": setting.family,
        "machine": first.evidence.machine.slug if first else None,
        "gpus": sorted({gpu.get("name") or "" for gpu in first.evidence.machine.gpus}) if first else [],
        "engine": _engine(first.evidence) if first else None,
        "status": rungs[0].loaded.recipe.status,
        "order": setting.order,
        "shape": _shape(load),
        "published_shape": _shape(rungs[0].own.benchmark),
        "begun_with": setting.begun_with,
        "windows_a_boot": load.windows,
        "visits": len(ladder.visits),
        "visit_gpus": ladder.cards,
        "void_boots": [asdict(boot) for boot in boots if boot.state == "void"],
        "rungs": rows,
        "whole": whole_ladder(ladder, list(compress(every, chain)), list(compress(published, chain))),
        "drift": rounds_drift(every) if setting.order == "interleaved" else None,
        "sensitivity": _sensitivity(list(compress(zip(rungs, every, strict=True), chain))),
        "keep_if_better": setting.keep,
        "decisions": [asdict(decision) for decision in ahead.decisions],
    }


def _chain(setting: Setting, rungs: Sequence[Rung], every: Sequence[RungRuns], kept: set[str | None]) -> list[bool]:
    """Which rungs the whole ladder's ratio is of: those kept, and no recipe that stands beside the ladder.

    Of recipes beside the ladder alone it is of all of them.
    """
    chosen = [not setting.keep or runs.rung in kept for runs in every]
    within = [each and rung.within for each, rung in zip(chosen, rungs, strict=True)]
    return within if sum(bool(runs.counting) for runs in compress(every, within)) > 1 else chosen


def _plan_row(rung: Rung, tried: Rung) -> dict:
    claims = [claim for claim in rung.own.claims if claim.metric == "output_tok_s"]
    return {
        "rung": rung.name,
        "title": rung.loaded.recipe.title,
        "delta": _delta(tried.before, tried.loaded) if tried.before else [],
        # On another configuration than the ladder's own, nothing was published.
        "published_tok_s": claims[0].published if claims and tried.loaded is rung.loaded else None,
        "applies": rung.absent,
    }


def _shape(load: Benchmark) -> str:
    return f"{load.input_len}/{load.output_len}/{load.concurrency}/{load.prompts}"


def _delta(before: Loaded, after: Loaded) -> list[str]:
    return [now or f"without {was}" for _, was, now in argument_changes(before, after)]


def _against(tried: Rung, measured: dict[str, RungRuns]) -> RungRuns | None:
    if tried.before is None:
        return None
    name = tried.before.recipe.id.split("/", maxsplit=1)[1]
    return measured.get(name, RungRuns(name, [], []))


def _engine(evidence: Evidence) -> dict:
    engine = evidence.manifest.engine
    return {"name": engine.name, "answered": sorted(set(engine.answered)), "identity": engine.identity}


def _sensitivity(chain: Sequence[tuple[Rung, RungRuns]]) -> dict | None:
    """For fixed synthetic acceptance: what the last rung's rate would be at ±0.1, all else equal. Modelled.

    tok/s = streams × acceptance length ÷ step time, and the step time doesn't depend on what is accepted.
    """
    measured = [(rung, runs) for rung, runs in chain if runs.counting]
    if len(measured) < 2:
        return None
    rung, runs = measured[-1]
    config = rung.loaded.recipe.engine.flags.get("speculative-config")
    rates = config.get("synthetic_acceptance_rates") if isinstance(config, dict) else None
    if not rates:
        return None
    length = 1 + sum(rates)
    lengths = {
        f"{sign:+.1f}": 1 + sum(min(1.0, max(0.0, rate + sign)) for rate in rates)
        for sign in (-SENSITIVITY, SENSITIVITY)
    }
    return {
        "rung": runs.rung,
        "acceptance_rates": list(rates),
        "rate_factor": {name: changed / length for name, changed in lengths.items()},
        "status": "modelled",
    }
