"""Room bench: running a ladder: boot after boot as the sequence says, each a run of its own, each in the journal."""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bench.ladder.idle import memory_in_use, wait_idle
from bench.ladder.journal import RUNS, Boot, Journal, locked, outcome, read_boots
from bench.ladder.resolve import resolved_record
from bench.ladder.sequence import Outlook, Rung, Unit, outlook, rungs_here
from bench.ladder.setting import Setting, write_setting
from bench.ladder.table import write_table
from bench.measure import gpus_of, measure
from bench.plan import Options, plan_for, with_gpu
from bench.record import Plan
from bench.verdict import write_verdict
from images.console import note
from images.engine import Engine
from images.errors import EngineProblem, Problem, RunProblem, UsageProblem
from images.yaml_source import shown
from recipes.compose import rungs_of
from recipes.machine import machine_facts
from recipes.run.jit import restore, save
from recipes.run.process import refuse_taken_port

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


def new_ladder(root: Path, setting: Setting) -> Path:
    """Make the folder of a new ladder: <root>/ladder-<utc>-<family>-<6 hex>. Raises RunProblem when it can't."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = root / f"ladder-{stamp}-{setting.family}-{secrets.token_hex(3)}"
    try:
        folder.mkdir(parents=True)
        write_setting(folder, setting)
    except OSError as error:
        raise RunProblem(f"can't make the ladder's folder {folder}: {error.strerror}") from error
    return folder


def climb(folder: Path, setting: Setting, visit: Visit) -> dict:
    """Run every boot that is still to be done, and return the table (ladder.json), written after each boot.

    A boot that fails is recorded with its cause and the ladder goes on; Ctrl-C ends it, and --resume goes on with
    what is left. Raises Problem where nothing can go on: another ladder at work here, no room for the journal.
    """
    facts = with_gpu(machine_facts(), visit.options.gpu)
    chosen = rungs_of(setting.family, ",".join(setting.rungs))
    rungs = rungs_here(setting, chosen, facts)
    _refuse_nothing(rungs)
    with locked(folder):
        journal, idle_b, restored = Journal(folder), None, False
        _ask_ahead(outlook(setting, rungs, folder, read_boots(folder)), visit, facts)
        while True:
            boots = read_boots(folder)
            ahead = outlook(setting, rungs, folder, boots)
            units = [unit for unit in ahead.units if visit.only is None or unit.rung.name in visit.only]
            table = write_table(folder, setting, rungs, boots, ahead)
            if not units:
                return table
            _say(units[0], ahead, setting)
            _wait_for_port(units[0].rung, visit)
            plan = _prepared(units[0], visit, facts, journal)
            if plan is None:
                continue
            if not restored and visit.restore:
                note(f"Caches restored from {shown(visit.restore)}: sha256 {restore(_engine(plan), visit.restore)}")
            restored = True
            gpus, _ = gpus_of(plan)
            idle_b = memory_in_use(gpus) if idle_b is None else idle_b
            if not _boot(folder, units[0], plan, journal, lambda gpus=gpus, idle=idle_b: wait_idle(gpus, idle)):
                return write_table(folder, setting, rungs, read_boots(folder), ahead, interrupted=True)
            if visit.keep_caches:
                save(_engine(plan), visit.keep_caches)


def _ask_ahead(ahead: Outlook, visit: Visit, facts: dict) -> None:
    """Where there are cores enough, ask the engine about every rung at once; the answers are kept."""
    rungs = {unit.rung.name: unit.rung for unit in ahead.units if visit.only is None or unit.rung.name in visit.only}
    if len(rungs) < 2 or (os.cpu_count() or 1) < 2 * CORES_TO_ASK:
        return
    with suppress(Problem):  # whoever boots the rung says what is wrong with it
        plans = [(plan_for(rung.loaded, visit.options, facts), rung.before) for rung in rungs.values()]
        with ThreadPoolExecutor(CORES_TO_ASK) as pool:
            list(pool.map(lambda pair: resolved_record(*pair), plans))


def _refuse_nothing(rungs: Sequence[Rung]) -> None:
    if all(rung.absent for rung in rungs):
        said = "".join(f"\n  {rung.name}: {rung.absent}" for rung in rungs)
        raise UsageProblem(f"none of these rungs can run on this machine:{said}\n`./inv list` shows what can.")


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
    """Give an engine whose ladder was killed the time to end. Raises EngineProblem where the port stays taken."""
    runtime = rung.loaded.recipe.runtime
    deadline = time.monotonic() + PORT_S
    while True:
        try:
            return refuse_taken_port(runtime.host, visit.options.port or runtime.port)
        except EngineProblem:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def _prepared(unit: Unit, visit: Visit, facts: dict, journal: Journal) -> Plan | None:
    """The plan of a boot; None, and the reason in the journal, where this rung makes no recipe that can run.

    Raises Problem where something stands in the way that isn't the rung's: no engine, no Docker, no disk.
    """
    try:
        plan = plan_for(unit.rung.loaded, visit.options, facts)
        record = resolved_record(plan, unit.rung.before)
    except UsageProblem as problem:
        note(f"✘ {problem}")
        journal.ended(Boot(unit.rung.name, unit.boot, None, "failed", f"preparing: {problem}"))
        return None
    return replace(plan, first_boot=unit.boot, resolved=record)


def _boot(folder: Path, unit: Unit, plan: Plan, journal: Journal, settle: Callable[[], object]) -> bool:
    """Measure one boot; whether the ladder goes on."""
    name, boot = unit.rung.name, unit.boot
    run = measure(plan, folder / RUNS, lambda made: journal.begun(name, boot, made.name))
    ended = outcome(folder, name, boot, run)
    if ended.state == "void":
        note(f"Interrupted. What is finished is kept: ./inv ladder --resume {shown(folder)}")
        return False
    write_verdict(run)
    if ended.state != "finished":
        note(f"✘ {name}, boot {boot}: {ended.cause}")
    journal.ended(ended)
    try:
        settle()
    except Problem as problem:
        note(f"✘ {problem}")
        return False
    return True
