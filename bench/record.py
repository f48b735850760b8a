"""Room bench: what a run records about itself: the plan it follows, and its manifest."""

import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.runfolder import SCHEMA, dump_json, write_text
from images.build import Built
from images.command import run as run_command
from images.engine import Engine
from images.index import cache_root
from recipes.load import Loaded
from recipes.model_files import observed_files
from recipes.rules import TABLE_VERSION
from recipes.spec import Container, ServingSpec

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Plan:
    """Everything a run needs, gathered before anything is started. `url`: a server someone else runs.

    Without `load` only the quality suites are run. With `box` the engine runs in a container of an image.
    """

    loaded: Loaded
    engine: Engine | Built
    spec: ServingSpec
    machine: dict
    url: str | None = None
    load: bool = True
    box: Container | None = None


class Recorder:
    """Collects the manifest of a run while it happens."""

    def __init__(self, plan: Plan) -> None:
        """Start the record.

        Raises Problem when the model's folder isn't there or can't be read.
        """
        load = plan.loaded.recipe.benchmark
        self.stage = "preparing"
        self.prompt_digests: dict[str, str] = {}
        self.manifest = {
            "schema": SCHEMA,
            "run": None,
            "recipe": plan.loaded.recipe.id,
            "started": now(),
            "planned_windows": load.boots * load.windows if plan.load else 0,
            "tool": tool_version(),
            "engine": {**_engine_record(plan), "answered": []},
            "model": {"files": None if plan.url else observed_files(plan.loaded)},
            "rules": TABLE_VERSION,
            "seed": load.seed,
            "url": plan.url,
            "boots": [],
            # Until the run is closed, this is true: a tool killed by force leaves just this behind.
            "failure": {"stage": "unknown", "cause": "the record was never closed: the tool itself was killed"},
        }

    def write(self, run: Path) -> None:
        """Write the manifest as it stands."""
        self.manifest["run"] = run.name
        write_text(run / "manifest.json", dump_json(self.manifest))

    def succeeded(self) -> None:
        """Record that every planned window was measured."""
        self.manifest["failure"] = None

    def failed(self, cause: str) -> None:
        """Record what ended the run, and in which stage."""
        self.manifest["failure"] = {"stage": self.stage, "cause": cause}


def _engine_record(plan: Plan) -> dict:
    """The engine that serves; of somebody else's only what it answers is known. The load client is always ours."""
    client = f"{plan.engine.name}-{plan.engine.identity}"
    if plan.url:
        return {"name": None, "identity": None, "patches": [], "client": client}
    return {
        "name": plan.engine.name,
        "version": plan.engine.version,
        "identity": plan.engine.identity,
        "patches": list(plan.engine.patches),
        "client": client,
        "image": None if plan.box is None else {"id": plan.engine.id, "reference": plan.box.image},
    }


def tool_version() -> dict:
    """Which version of this repository made the run: commit, and whether tracked files were changed."""
    git = ["git", "-C", str(REPOSITORY)]
    found = {"commit": None, "changed": None, "python": platform.python_version()}
    try:
        commit = run_command([*git, "rev-parse", "HEAD"])
        changed = run_command([*git, "status", "--porcelain", "--untracked-files=no"])
    except OSError:  # no git on this machine
        return found
    if commit.returncode != 0:
        return found
    return {**found, "commit": commit.stdout.strip(), "changed": bool(changed.stdout.strip())}


def anonymous(text: str, plan: Plan) -> str:
    """Write this machine's folders by name, so that a published run tells nothing of anybody's disk."""
    names = {
        str(plan.spec.model_path): "{model}",
        **({str(plan.engine.python.parent.parent): "{engine}"} if plan.box is None else {}),
        str(REPOSITORY): "{repository}",
        str(cache_root()): "{cache}",
        str(Path.home()): "{home}",
    }
    for path, name in names.items():
        if len(path) > 1:
            text = text.replace(path, name)
    return text


def not_measured() -> dict:
    """What machine.json says of the measures that this version doesn't make."""
    why = "not measured by this version"
    return {
        "noise_floor": None,
        "client_ceiling": None,
        "reasons": {"noise_floor": why, "client_ceiling": why},
    }


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
