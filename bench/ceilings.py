"""Room bench: measured ceilings of load clients, kept a machine and an engine in the user's state folder."""

import json
import math
from pathlib import Path

from bench.runfolder import dump_json, write_text
from images.engine import Engine
from images.index import state_root

SCHEMA = 1


def ceiling_file(engine: Engine, machine: dict) -> Path:
    """Where the ceiling of an engine's client on a machine is kept."""
    return state_root() / "ceilings" / f"{machine['slug']}-{engine.name}-{engine.identity}.json"


def store_ceiling(engine: Engine, machine: dict, ceiling: dict) -> Path:
    """Keep a ceiling; the one before it is replaced. Raises OSError."""
    file = ceiling_file(engine, machine)
    write_text(file, dump_json(ceiling))
    return file


def stored_ceiling(engine: Engine, machine: dict) -> dict | None:
    """The ceiling that was measured with this engine on this very processor; None without one."""
    try:
        ceiling = json.loads(ceiling_file(engine, machine).read_text())
        usable = ceiling["schema"] == SCHEMA and ceiling["cpu"] == cpu_of(machine)
        rate = float(ceiling["chunks_per_s"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or a file of another version: measure again
        return None
    return ceiling if usable and math.isfinite(rate) and rate > 0 else None


def cpu_of(machine: dict) -> dict:
    """What must be the same for a ceiling to hold: the state folder may be shared by several machines."""
    return {"model": machine["cpu"].get("model"), "cores": machine["cpu"].get("cores")}
