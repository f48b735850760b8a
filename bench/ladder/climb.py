"""Room bench: running a ladder: boot after boot as the sequence says, each a run of its own, each in the journal."""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bench.ladder.begun import as_begun, write_begun
from bench.ladder.idle import memory_in_use, wait_idle
from bench.ladder.journal import RUNS, Boot, Journal, locked, outcome, read_boots
from bench.ladder.resolve import resolved_record
from bench.ladder.resume import require_recipes, require_same_host, strays
from bench.ladder.sequence import Outlook, Rung, Unit, outlook, rungs_here
from bench.ladder.setting import OF_A_GPU, Setting, read_setting, write_setting
from bench.ladder.table import write_table
from bench.measure import gpus_of, measure
from bench.plan import Options, elsewhere, plan_for, runs_away, with_gpu
from bench.record import Plan
from bench.verdict import write_verdict
from images.console import note
from images.engine import Engine
from images.errors import OutsideProblem, Problem, RunProblem, UsageProblem
from images.given import given_engine
from images.yaml_source import shown
from recipes.compose import rungs_of
from recipes.graphs import graph_fit
from recipes.load import with_options
from recipes.machine import machine_facts
from recipes.rules import require_rules
from recipes.run.jit import restore, save
from recipes.run.process import refuse_taken_port
from recipes.run.supervised import interrupts_held

CORES_TO_ASK = 4
PORT_S = 20
POLL_S = 0.5


@dataclass(frozen=True)
class Visit:
    """How a ladder is run this time: what isn't part of what is measured, and may change when it is resumed.

    `only`: rungs to boot this time, None for all; `restore` and `keep_caches`: files of compiled kernels.
    """

    options: Options
    only: list[str] | None = None
    restore: Path | None = None
    keep_caches: Path | None = None


def new_ladder(root: Path, setting: Setting, rungs: Sequence[Rung]) -> Path:
    """Make the folder of a new ladder: <root>/ladder-<utc>-<family>-<6 hex>. Raises RunProblem when it can't.

    `rungs`: kept as they are now, so that its table is made from its folder alone, whatever the library says then.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = root / f"ladder-{stamp}-{setting.family}-{secrets.token_hex(3)}"
    try:
        folder.mkdir(parents=True)
        write_setting(folder, setting)
        if rungs:
            write_begun(folder, rungs)
    except OSError as error:
        raise RunProblem(f"can't make the ladder's folder {folder}: {error.strerror}") from error
    return folder


def climb(folder: Path, setting: Setting, visit: Visit) -> dict:
    """Run every boot that is still to be done, and return the table (ladder.json), written after each boot.

    A boot that fails is recorded with its cause and the ladder goes on; Ctrl-C at any moment ends it, and --resume
    goes on with what is left. Raises Problem where nothing can go on: another ladder at work here, no room for the
    journal, a finished boot of another recipe, engine or machine than it would be now.
    """
    facts, rungs = require_ready(setting, visit)
    rungs = as_begun(folder, setting, rungs)
    with locked(folder):
        try:
            note(f"Ladder {shown(folder)}: whatever ends it, ./inv ladder --resume {shown(folder)} goes on")
            if _rung_by_rung(folder, setting, visit, facts, rungs):
                return _table(folder, setting, rungs)
        except KeyboardInterrupt:
            note("Interrupted. What is finished is kept")
        with interrupts_held():
            return _table(folder, setting, rungs, interrupted=True)


def _rung_by_rung(folder: Path, setting: Setting, visit: Visit, facts: dict, rungs: list[Rung]) -> bool:
    """Boot after boot until none is left; False where one was cut off."""
    journal, idle_b, restored, asked = Journal(folder), None, False, False
    while True:
        boots = read_boots(folder)
        ahead = outlook(setting, rungs, folder, boots)
        if _voided(folder, setting, ahead, boots, journal):
            continue
        if not asked:
            if setting != read_setting(folder):  # more boots, asked for when it was resumed: nothing refused them
                write_setting(folder, setting)
            _ask_ahead(ahead, visit, facts)
            asked = True
        units = [unit for unit in ahead.units if visit.only is None or unit.rung.name in visit.only]
        write_table(folder, setting, rungs, boots, ahead)
        if not units:
            return True
        _say(units[0], ahead, setting)
        _wait_for_port(units[0].rung, visit)
        plan = _prepared(units[0], visit, facts, journal)
        if plan is None:
            continue
        require_same_host(folder, boots, facts, plan)
        if not restored and visit.restore:
            note(f"Caches restored from {shown(visit.restore)}: sha256 {restore(_engine(plan), visit.restore)}")
        restored = True
        gpus, _ = gpus_of(plan)
        idle_b = memory_in_use(gpus) if idle_b is None else idle_b
        if not _boot(folder, units[0], plan, journal, lambda gpus=gpus, idle=idle_b: wait_idle(gpus, idle)):
            return False
        if visit.keep_caches:
            _save(plan, visit.keep_caches)


def _table(folder: Path, setting: Setting, rungs: list[Rung], interrupted: bool = False) -> dict:
    boots = read_boots(folder)
    return write_table(folder, setting, rungs, boots, outlook(setting, rungs, folder, boots), interrupted)


def _voided(folder: Path, setting: Setting, ahead: Outlook, boots: list[Boot], journal: Journal) -> bool:
    """Whether boots were void because a decision turned since, so that their rung is tried on something else now.

    Raises RunProblem where it is the recipe that was changed.
    """
    if not setting.keep:
        require_recipes(folder, ahead.configurations, boots)
        return False
    found = strays(folder, ahead.configurations, boots)
    for boot, keys in found:
        cause = f"measured on another configuration than it is now tried on ({', '.join(keys[:5])} differ)"
        note(f"✘ {boot.rung}, boot {boot.boot} is done again: {cause}")
        journal.ended(replace(boot, state="void", cause=cause))
    return bool(found)


def _save(plan: Plan, file: Path) -> None:
    """Keep the caches; where that fails, the boot is none the worse for it."""
    try:
        save(_engine(plan), file)
    except Problem as problem:
        note(f"✘ Caches not kept: {problem}")


def _ask_ahead(ahead: Outlook, visit: Visit, facts: dict) -> None:
    """Where there are cores enough, ask the engine about every rung at once; the answers are kept."""
    rungs = {unit.rung.name: unit.rung for unit in ahead.units if visit.only is None or unit.rung.name in visit.only}
    if len(rungs) < 2 or (os.cpu_count() or 1) < 2 * CORES_TO_ASK:
        return
    with suppress(Problem):  # whoever boots the rung says what is wrong with it
        plans = [(plan_for(rung.loaded, visit.options, facts), rung.before) for rung in rungs.values()]
        with ThreadPoolExecutor(CORES_TO_ASK) as pool:
            list(pool.map(lambda pair: resolved_record(*pair), plans))


def require_ready(setting: Setting, visit: Visit) -> tuple[dict, list[Rung]]:
    """The machine's facts and the rungs on it, before anything is made or started.

    Raises UsageProblem where no rung can run here, a rung breaks a rule, or an option names what isn't there.
    """
    facts = with_gpu(machine_facts(), visit.options.gpu)
    rungs = rungs_here(setting, rungs_of(setting.family, ",".join(setting.rungs)), facts)
    here = [rung for rung in rungs if rung.absent is None]
    if not here:
        said = "".join(f"\n  {rung.name}: {rung.absent}" for rung in rungs)
        raise UsageProblem(f"none of these rungs can run on this machine:{said}\n`./inv list` shows what can.")
    for rung in here:
        require_rules(rung.loaded)
    _require_decidable(setting, here, facts)
    options, image = visit.options, here[0].loaded.recipe.engine.image
    if options.engine_python:
        given_engine(image, options.engine_python, options.engine_paths)
    elif runs_away(here[0].loaded, options):
        raise UsageProblem(elsewhere())
    with_options(here[0].loaded, options.port)
    _require_files(visit)
    return facts, rungs


def _require_files(visit: Visit) -> None:
    """Raise UsageProblem for files of kernels that can't be read, or written at the ladder's end."""
    if visit.restore and not visit.restore.is_file():
        raise UsageProblem(f"--caches {shown(visit.restore)}: there is no such file")
    kept = visit.keep_caches
    if kept and (kept.is_dir() or not os.access(kept.parent, os.W_OK)):
        raise UsageProblem(f"--keep-caches {shown(kept)}: wanted the name of a file in a folder that can be written")


def _require_decidable(setting: Setting, here: list[Rung], facts: dict) -> None:
    """Raise UsageProblem where --keep-if-better could decide nothing, however long it measured."""
    if not setting.keep:
        return
    asked = [metric for metric in [setting.keep, *setting.guards] if metric in OF_A_GPU]
    if asked and not facts["gpus"]:
        raise UsageProblem(f"{asked[0]}: this machine has no GPU whose driver could tell it. Choose another metric")
    roots = [rung.name for rung in here[1:] if rung.before is None]
    if roots:
        raise UsageProblem(
            f"--rungs: {roots[0]} stands behind {here[0].name}, but it is no change on anything: --keep-if-better "
            f"tries each rung's change on what was kept before. Put {roots[0]} first"
        )


def _engine(plan: Plan) -> Engine:
    if plan.box is not None:
        raise UsageProblem(
            "--caches and --keep-caches are for engines that run as a process; a container keeps its own"
        )
    return plan.engine


def _say(unit: Unit, ahead: Outlook, setting: Setting) -> None:
    left = f"{len(ahead.units)} boot(s) left{' at most' if setting.keep else ''}"
    note(f"\nRung {unit.rung.name}, boot {unit.boot} of {setting.boots} ({left}): {unit.rung.loaded.recipe.title}")


def _wait_for_port(rung: Rung, visit: Visit) -> None:
    """Give an engine whose ladder was killed the time to end. Raises OutsideProblem where the port stays taken."""
    runtime = rung.loaded.recipe.runtime
    deadline = time.monotonic() + PORT_S
    while True:
        try:
            return refuse_taken_port(runtime.host, visit.options.port or runtime.port)
        except OutsideProblem:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def _prepared(unit: Unit, visit: Visit, facts: dict, journal: Journal) -> Plan | None:
    """The plan of a boot; None, and the reason in the journal, where this rung makes no recipe that can run.

    Raises Problem where something stands in the way that isn't the rung's: no engine, no Docker, no disk.
    """
    try:
        require_rules(unit.rung.loaded)  # a change on another configuration than its own may make no sense
    except UsageProblem as problem:
        note(f"✘ {problem}")
        journal.ended(Boot(unit.rung.name, unit.boot, None, "failed", f"preparing: {problem}"))
        return None
    plan = plan_for(unit.rung.loaded, visit.options, facts)
    record = resolved_record(plan, unit.rung.before)
    fit = graph_fit(unit.rung.loaded.recipe, (record["after"]["resolved"] or {}).get("max_cudagraph_capture_size"))
    if fit and fit.said:
        note(f"→ {unit.rung.name}: {fit.said}.")
    return replace(plan, first_boot=unit.boot, resolved=record)


def _boot(folder: Path, unit: Unit, plan: Plan, journal: Journal, settle: Callable[[], object]) -> bool:
    """Measure one boot; whether the ladder goes on."""
    name, boot = unit.rung.name, unit.boot
    run = measure(plan, folder / RUNS, lambda made: journal.begun(name, boot, made.name))
    ended = outcome(folder, name, boot, run)
    if ended.state == "void":
        note(f"✘ {name}, boot {boot} was cut off: {ended.cause}. It counts for nothing; what is finished is kept")
        journal.ended(ended)
        return False
    if ended.state != "finished":
        note(f"✘ {name}, boot {boot}: {ended.cause}")
    with suppress(Problem) if ended.state == "failed" else nullcontext():  # what failed may not have come so far
        write_verdict(run)
    journal.ended(ended)
    try:
        settle()
    except Problem as problem:
        note(f"✘ {problem}")
        return False
    return True
