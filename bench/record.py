"""Room bench: what a run records about itself: the plan it follows, and its manifest."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.ceilings import stored_ceiling
from bench.clients import choose_clients
from bench.runfolder import SCHEMA, dump_json, write_text
from images.build import Built
from images.command import run as run_command
from images.engine import Engine
from images.index import cache_root
from recipes.load import Loaded
from recipes.model_files import observed_files, told_files
from recipes.rules import TABLE_VERSION
from recipes.run.jit import FOLDERS
from recipes.spec import CACHE_ENV, CACHE_IN_CONTAINER, ENGINE_READS, Container, ServingSpec
from recipes.weights import snapshot

# Variables of images that say where something lies or which it is: nothing is steered by them.
DESCRIBES = frozenset({"CUDA_HOME", "CUDA_PATH", "CUDA_VERSION", "NCCL_VERSION", "VLLM_USAGE_SOURCE"})
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Plan:
    """Everything a run needs, gathered before anything is started. `url`: a server someone else runs.

    Without `load` only the quality suites are run. With `box` the engine runs in a container of an image;
    with `service` it runs there already, as provisioning left it. Boots are counted from `first_boot`: it decides
    their seeds. `resolved` is what the engine makes of the recipe, beside what it made of the one before (see
    evidence.Resolved); a run keeps it. `weights` is the folder of a repository's model on this machine, None for
    another machine's.
    """

    loaded: Loaded
    engine: Engine | Built
    spec: ServingSpec
    machine: dict
    url: str | None = None
    load: bool = True
    box: Container | None = None
    service: bool = False
    first_boot: int = 1
    resolved: dict | None = None
    weights: Path | None = None

    @property
    def tokenizer_for_client(self) -> Path:
        """The model's folder as the load client sees it: in its container, where there is one."""
        if self.spec.model_path:
            return self.spec.model_path
        return snapshot(Path(CACHE_IN_CONTAINER), self.loaded.recipe.model) if self.box else self.weights


class Recorder:
    """Collects the manifest of a run while it happens."""

    def __init__(self, plan: Plan) -> None:
        """Start the record.

        Raises Problem when the model's folder isn't there or can't be read.
        """
        load = plan.loaded.recipe.benchmark
        self.stage = "preparing"
        self.clients = 1
        self._ceiling = stored_ceiling(plan.engine, plan.machine)
        self._expected: tuple[float | None, str] | None = None
        self._concurrency = load.concurrency
        self.prompt_digests: dict[str, str] = {}
        self.manifest = {
            "schema": SCHEMA,
            "run": None,
            "recipe": plan.loaded.recipe.id,
            "origin": plan.loaded.origin,  # the bundle an adopted recipe came in; null for the library's
            "started": now(),
            "planned_windows": load.boots * load.windows if plan.load else 0,
            "tool": tool_version(),
            "engine": {**_engine_record(plan), "answered": []},
            "model": _model_record(plan),
            "rules": TABLE_VERSION,
            "seed": load.seed,
            "url": plan.url,
            "boots": [],
            "load": [],
            # Until the run is closed, this is true: a tool killed by force leaves just this behind.
            "failure": {"stage": "unknown", "cause": "the record was never closed: the tool itself was killed"},
        }

    def write(self, run: Path) -> None:
        """Write the manifest as it stands."""
        self.manifest["run"] = run.name
        write_text(run / "manifest.json", dump_json(self.manifest))

    def choose_clients(self, expected_chunks_s: float | None) -> None:
        """Decide how many client processes apply the load: once a run, by its first warm-up."""
        if self._expected is None:
            ceiling = self._ceiling["chunks_per_s"] if self._ceiling else None
            self.clients, why = choose_clients(expected_chunks_s, ceiling, self._concurrency)
            self._expected = expected_chunks_s, why

    def load_applied(self, place: tuple[int, int], streams: list[int], prompts: list[int], skew_s: float) -> None:
        """Record which client processes sent a window's load: streams and prompts of each, skew of their starts."""
        expected, why = self._expected or (None, "")
        self.manifest["load"].append(
            {
                "boot": place[0],
                "window": place[1],
                "clients": len(streams),
                "streams": streams,
                "prompts": prompts,
                "start_skew_s": round(skew_s, 6),
                "expected_chunks_per_s": None if expected is None else round(expected, 1),
                "why": why,
            }
        )

    def succeeded(self) -> None:
        """Record that every planned window was measured."""
        self.manifest["failure"] = None

    def failed(self, cause: str, outside: bool = False) -> None:
        """Record what ended the run, and in which stage; `outside`: not by the engine's or the recipe's doing."""
        self.manifest["failure"] = {"stage": self.stage, "cause": cause, **({"outside": True} if outside else {})}


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


def _model_record(plan: Plan) -> dict:
    """The model's files by sha256; of a hub's commit also what the cache, where it is here, says of its files."""
    if plan.url:
        return {"files": None}
    told = told_files(plan.weights) if plan.weights else {}
    return {"files": observed_files(plan.loaded, plan.weights), **({"told": told} if told else {})}


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
        str(plan.spec.model_path or plan.weights or ""): "{model}",
        plan.spec.env.get("HF_HOME", ""): "{hub}",
        **({str(plan.engine.python.parent.parent): "{engine}"} if plan.box is None else {}),
        str(REPOSITORY): "{repository}",
        str(cache_root()): "{cache}",
        str(Path.home()): "{home}",
    }
    for path, name in names.items():
        if len(path) > 1:
            text = text.replace(path, name)
    return text


def environment_record(spec: ServingSpec, live: dict[str, str], image: Mapping[str, str] | None = None) -> dict:
    """env.json of a boot: what was rendered, what of it the engine's process had, and what it had beside that.

    `undeclared`: names of variables that an engine is known to read, and nobody declared: a service may set them.
    Names only: a value may be a secret, and a run is meant to be shown. What the `image` sets for every container of
    it is declared by its digest.
    """
    own = {*spec.env, *CACHE_ENV, *FOLDERS, *DESCRIBES, spec.api_key_env}
    own |= {name for name, value in (image or {}).items() if live.get(name) == value}
    undeclared = sorted(name for name in live if ENGINE_READS.fullmatch(name) and name not in own)
    return {
        "rendered": spec.env,
        "live": {name: live.get(name) for name in spec.env},
        "undeclared": undeclared,
    }


def stored_measures(plan: Plan) -> dict:
    """What machine.json says beside the facts: measures of this machine made earlier, or why there is none."""
    ceiling = stored_ceiling(plan.engine, plan.machine)
    reasons = {"noise_floor": "not measured by this version"}
    if ceiling is None:
        reasons["client_ceiling"] = "not measured on this machine with this engine: ./inv ceiling"
    return {"noise_floor": None, "client_ceiling": ceiling, "reasons": reasons}


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
