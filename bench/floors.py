"""Room bench: is a noise floor of the very thing that is judged: machine, cards, engine, recipe and load. Pure."""

from bench.evidence import Evidence, NoiseFloor
from recipes.schema import Benchmark

# How often it was booted and measured, and by which seed, makes no other load.
NO_LOAD = {"boots", "windows", "seed"}


def hardware_of(facts: dict) -> dict:
    """What tells one machine from another with the same slug, from its facts; the cards by their UUIDs."""
    cpu = facts.get("cpu") or {}
    uuids = [gpu.get("uuid") for gpu in facts.get("gpus") or []]
    return {"cpu": cpu.get("model"), "cores": cpu.get("cores"), "gpus": uuids}


def load_of(load: Benchmark) -> dict:
    """What of a load makes boots scatter, as it stands in a noise floor's record."""
    return load.model_dump(mode="json", exclude=NO_LOAD)


def mismatch(record: NoiseFloor, machine: dict, engine: str | None, recipe: str, load: Benchmark) -> str | None:
    """What a noise floor is of another of than what is judged; None where it is of the very same.

    `machine`: its facts, with the cards that are used. Boots of another rung, load or card scatter otherwise.
    """
    pairs = {
        "machine": (record.machine, machine.get("slug")),
        "hardware": (record.hardware, hardware_of(machine)),
        "engine": (record.engine, engine),
        "recipe": (record.recipe, recipe),
        "load": (record.load, load_of(load)),
    }
    differing = [name for name, (theirs, ours) in pairs.items() if theirs != ours]
    return f"the noise floor is of another {', '.join(differing)}" if differing else None


def known_floor(evidence: Evidence) -> tuple[NoiseFloor | None, str | None]:
    """The noise floor that counts for a run, of those it knew when it began; or None and, where it knew one, why."""
    record, recipe = evidence.machine.noise_floor, evidence.recipe
    if record is None:
        return None, None
    machine, engine = evidence.machine.model_dump(), evidence.manifest.engine.identity
    other = mismatch(record, machine, engine, recipe.id, recipe.benchmark)
    return (None, other) if other else (record, None)
