"""Room bench: asking an engine what it makes of a rung, and of the configuration that the rung changes."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import replace

from bench.record import Plan
from bench.runfolder import dump_json, read_json, write_text
from images.docker_engine import is_remote
from images.errors import Problem
from images.index import cache_root
from images.probe import ask, resolved_config
from recipes.compare import RESOLVED
from recipes.load import Loaded, changes
from recipes.machine import load_machines, machine_profile
from recipes.spec import MACHINE_S, Container, ServingSpec, serving_spec
from recipes.weights import HUB

WEIGHTS = "/weights"  # where a container sees the cache that only holds weights for it
SILENT = ("proof.", "quality.", "runtime.", "benchmark.", "choices.")  # nothing that an engine could take in


def resolved_record(plan: Plan, before: Loaded | None) -> dict:
    """What resolved.json says of a plan (see evidence.Resolved): the rung's settings, and those it is to change.

    An engine that gives no answer costs the proof, not the boot: the reason stands in its place.
    """
    after = plan.loaded
    changed = changes(before.recipe, after.recipe) if before else []
    return {
        "schema": 1,
        "changes": [key for key in changed if not key.startswith(SILENT)],
        "before": _settings(plan, before) if before else None,
        "after": _settings(plan, after),
    }


def _settings(plan: Plan, loaded: Loaded) -> dict:
    spec = serving_spec(loaded, machine_profile(plan.machine, load_machines()))
    chosen = {name: value for name, value in plan.spec.env.items() if name in MACHINE_S}
    spec = replace(spec, env={**spec.env, **chosen})
    resolved, why = None, None
    try:
        resolved = _asked(plan, spec, loaded)
    except Problem as problem:
        why = str(problem)
    said = {"id": loaded.recipe.id, "argv": list(spec.argv), "env": spec.env, "resolved": resolved}
    return said if why is None else {**said, "why": why}


def _asked(plan: Plan, spec: ServingSpec, loaded: Loaded) -> dict:
    """The engine's answer, kept by engine, command line and model: asking takes 10 to 30 s."""
    env = {name: value for name, value in spec.env.items() if name not in MACHINE_S}
    names = sorted(RESOLVED.values())  # what this program asks for, which an older one may have asked less of
    on = [plan.engine.identity, plan.machine["slug"]]
    question = [*on, list(spec.argv), env, dict(loaded.recipe.model.files), names]
    name = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:24]
    file = cache_root() / "resolved" / f"{name}.json"
    with suppress(Problem):
        kept = read_json(file)
        if isinstance(kept, dict):
            return kept
    answer = _in_container(spec, plan.box) if plan.box else resolved_config(plan.engine, spec.argv, spec.env)
    with suppress(OSError):
        write_text(file, dump_json(answer))
    return answer


def _in_container(spec: ServingSpec, box: Container) -> dict:
    """Ask inside the image, with the container's own mounts and device, and no network."""
    if is_remote():
        raise Problem("the Docker engine is on another machine: what its engine makes of the settings was not asked")
    command = ["docker", "run", "--rm", "--network", "none", "--read-only", "--cap-drop", "ALL"]
    command += ["--tmpfs", "/tmp", "--tmpfs", f"/cache:uid={box.user},exec", "--user", f"{box.user}:{box.user}"]  # noqa: S108
    command += ["--device", box.device] if box.device else []
    if spec.model_path:
        command += ["--volume", f"{spec.model_path}:{spec.model_path}:ro"]
    else:  # a repository's model lies in the cache, which nothing may be written to here
        command += ["--volume", f"{box.cache}:{WEIGHTS}:ro", "--env", f"HF_HOME={WEIGHTS}/{HUB}"]
    for variable, value in spec.env.items():
        command += ["--env", f"{variable}={value}"]
    command += ["--entrypoint", "python3", box.image]
    question = {"ask": "config", "argv": list(spec.argv)}
    return ask(command, question, dict(os.environ), "asking the image what it makes of the flags")
