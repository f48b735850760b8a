"""Room bench: the noise floor of a machine: what the same thing differs by from boot to boot (an A/A run)."""

import json
import re
from pathlib import Path

from pydantic import ValidationError

from bench.evidence import Evidence, NoiseFloor, read_evidence
from bench.floors import hardware_of, load_of, mismatch
from bench.guards import run_guards
from bench.measurement import measure_evidence
from bench.runfolder import dump_json, read_json, write_text
from bench.statistics import BOOTS_FOR_INTERVAL, noise_floor, smallest_difference, spread
from bench.verdict import EXIT_CODES
from images.console import emit_json, note, out, table
from images.errors import Problem, RunProblem, UsageProblem
from images.index import state_root
from images.yaml_source import shown
from recipes.machine import machine_facts
from recipes.schema import Recipe

SCHEMA = 1
# Metrics whose value depends on the machine's speed, so that boots scatter.
METRICS = ("output_tok_s", "output_tok_s_steady", "ttft_p95_ms", "tpot_p95_ms")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def noise_file(slug: str, engine: str, recipe: str, state: Path | None = None) -> Path:
    """Where the noise floor of a machine, an engine's identity and a recipe (family/rung) lies.

    Raises RunProblem when one of the names, which may be a stranger's, is no plain name.
    """
    family, _, rung = recipe.partition("/")
    for name in (slug, engine, family, rung):
        if not NAME.fullmatch(name):
            raise RunProblem(f"{name!r} can't name a noise floor: wanted letters, digits and . _ + -")
    return (state or state_root()) / "noise" / slug / engine / family / f"{rung}.json"


def floor_of(evidence: Evidence, values: dict[str, list[float]], run: str, voided: list[str], here: dict) -> dict:
    """The noise floor that an A/A run shows: the record of noise_file.

    `values`: by metric one value a boot; `here`: this machine's facts. Raises RunProblem where the run can't
    tell: fewer than three boots, an invalid run, somebody else's server, another machine than this one.
    """
    boots = len({window.boot for window in evidence.windows})
    machine, engine = evidence.machine, evidence.manifest.engine.identity
    if voided:
        raise RunProblem(f"{run} is invalid ({', '.join(voided)}): it shows no noise floor")
    if evidence.manifest.foreign or not engine:
        raise RunProblem(f"{run} measured an engine that isn't ours to identify: it shows no noise floor")
    if boots < BOOTS_FOR_INTERVAL:
        raise RunProblem(f"{run} has {boots} boot(s); a noise floor needs {BOOTS_FOR_INTERVAL}, and five are better")
    if not _made_here(machine.model_dump(), here):
        raise RunProblem(f"{run} is of {machine.slug}, another machine than this one: a noise floor is a machine's own")
    metrics = {}
    for metric in METRICS:
        found = values.get(metric) or []
        if len(found) == boots:
            scatter = spread(found)
            metrics[metric] = {
                "values": found,
                "mean": scatter.mean,
                "relative_sd": scatter.sd / scatter.mean,
                "relative": noise_floor(found),
            }
    load = evidence.recipe.benchmark
    return {
        "schema": SCHEMA,
        "machine": machine.slug,
        "engine": engine,
        "family": evidence.recipe.family,
        "recipe": evidence.recipe.id,
        "load": load_of(load),
        "hardware": hardware_of(machine.model_dump()),
        "run": run,
        "boots": boots,
        "windows": load.windows,
        "metrics": metrics,
    }


def _made_here(facts: dict, here: dict) -> bool:
    """Whether a run's machine is this one, not one with the same slug; it may have used one GPU of several."""
    cpus = [(each.get("slug"), each.get("cpu") or {}) for each in (facts, here)]
    machines = [(slug, cpu.get("model"), cpu.get("cores")) for slug, cpu in cpus]
    gpus, present = ({gpu.get("uuid") for gpu in each.get("gpus") or []} for each in (facts, here))
    return machines[0] == machines[1] and gpus <= present


def store(record: dict, state: Path | None = None) -> Path:
    """Keep a noise floor for later runs on this machine; it takes the place of the one before.

    Raises Problem when the state folder can't be written.
    """
    file = noise_file(record["machine"], record["engine"], record["recipe"], state)
    try:
        write_text(file, dump_json(record))
    except OSError as error:
        raise Problem(f"the noise floor can't be stored in {file}: {error.strerror}") from error
    return file


def stored_floor(
    machine: dict, engine: str | None, recipe: Recipe, state: Path | None = None
) -> tuple[dict | None, str]:
    """The stored noise floor of a recipe on a machine (its facts, with the cards that are used).

    Or None and the reason: none was measured, its file can't be read, or it is of another load or card.
    """
    measure = f"./inv noise --recipe {recipe.id}"
    if not engine:
        return None, "somebody else's server"
    file = noise_file(machine["slug"], engine, recipe.id, state)
    if not file.is_file():
        return None, f"no A/A run of {recipe.id} on this engine and machine yet: {measure}"
    try:
        record = read_json(file)
        other = mismatch(NoiseFloor.model_validate(record), machine, engine, recipe.id, recipe.benchmark)
    except (RunProblem, ValidationError):
        return None, f"the stored one can't be read; measure again: {measure}"
    return (None, f"{other}; measure again: {measure}") if other else (record, "")


def stored_floors(state: Path | None = None) -> list[dict]:
    """Every noise floor stored on this machine; files that can't be read are left out."""
    found = []
    for file in sorted(((state or state_root()) / "noise").glob("*/*/*/*.json")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            NoiseFloor.model_validate(record)
        except (OSError, ValueError):
            continue
        found.append(record)
    return found


def with_noise_floor(machine: dict, engine: str | None, recipe: Recipe, state: Path | None = None) -> dict:
    """machine.json with the noise floor that was known when the run began, or the reason why none was."""
    floor, why = stored_floor(machine, engine, recipe, state)
    reasons = {name: said for name, said in machine.get("reasons", {}).items() if name != "noise_floor"}
    return {**machine, "noise_floor": floor, "reasons": reasons | ({} if floor else {"noise_floor": why})}


def learn(run: Path, state: Path | None = None) -> tuple[dict, Path]:
    """Take the noise floor from a run and store it: the record, and its file.

    Raises RunProblem where the run can't tell (floor_of), UsageProblem where it is no run.
    """
    if not run.is_dir():
        raise UsageProblem(f"{run} is no run's folder")
    evidence = read_evidence(run)
    measured = measure_evidence(evidence)
    values = {"output_tok_s": measured.whole, "output_tok_s_steady": measured.steady, **measured.latency_p95_ms}
    voided = [guard.id for guard in run_guards(evidence) if guard.voids]
    record = floor_of(evidence, values, run.resolve().name, voided, machine_facts())
    return record, store(record, state)


def require_question(recipe: str | None, run: str | None, boots: int) -> None:
    """Raise UsageProblem where what is asked makes no sense; nothing is started yet."""
    if recipe and run:
        raise UsageProblem("noise takes either --recipe NAME, to make an A/A run, or --run RUN, to use one")
    if recipe and boots < BOOTS_FOR_INTERVAL:
        raise UsageProblem(f"--boots {boots}: a noise floor needs {BOOTS_FOR_INTERVAL} boots, and five are better")


def print_noise(run: Path | None, fresh: bool, as_json: bool) -> int:
    """Learn a run's noise floor (None: take those stored on this machine) and print it; the exit code.

    Of a `fresh` run the folder is printed last, whatever it shows: INVALID's code where it can't tell, a fault's where
    the floor can't be stored. Raises as `learn` does for one that isn't.
    """
    code = 0
    try:
        records = [learn(run)[0]] if run else stored_floors()
    except Problem as problem:
        if not fresh:
            raise
        note(f"✘ {problem}")
        records, code = None, EXIT_CODES["INVALID"] if isinstance(problem, RunProblem) else problem.exit_code
    if as_json:
        emit_json({"floors": records, "run": shown(run)} if fresh else records)
    elif records is not None:
        _print_floors(records)
    if fresh and not as_json:
        out().print(f"\n{shown(run)}")
    return code


def _print_floors(records: list[dict]) -> None:
    console = out()
    if not records:
        console.print("No noise floor is known on this machine. ./inv noise --recipe NAME measures one.")
        return
    rows = [
        (
            f"{record['recipe']} on {record['machine']}",
            metric,
            f"{each['relative_sd']:.2%}",
            f"{each['relative']:.2%}",
            f"{record['boots']} boots",
            record["run"],
        )
        for record in records
        for metric, each in record["metrics"].items()
    ]
    columns = ("recipe", "metric", "between boots", "noise floor", "from", "run")
    console.print(table("Noise: one configuration, boot after boot", columns, rows))
    for record in records:
        sd = record["metrics"].get("output_tok_s", {}).get("relative_sd")
        if sd:
            seen = ", ".join(f"{boots} boots {smallest_difference(boots, sd):.1%}" for boots in (3, 6, 10))
            console.print(f"{record['recipe']}: a shortfall beyond the tolerance is seen, 4 times in 5, from: {seen}")
