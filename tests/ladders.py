"""A copy of the repository with a family of quick recipes, served by the reference engine: for tests of ladders."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from bench.ladder.journal import Boot, Journal
from bench.ladder.setting import Setting, write_setting
from recipes.load import LIBRARY, as_data, load_recipe
from recipes.schema import Recipe
from tests.runs import closed_loop, counters, write_run

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "tests" / "reference_engine"
ROOMS = ("bench", "images", "recipes", "ansible/library", "tasks.py")
FAMILY = "quick"
# Other work on the test machine's cores shows in these; what a ladder does with its boots doesn't depend on them.
NOISE = (
    "straggler",
    "cold_engine",
    "client_saturation",
    "dispatch_delay",
    "peak",
    "little",
    "telemetry_gaps",
)
FLAGS = {
    "async-scheduling": False,
    "enable-prefix-caching": False,
    "enforce-eager": True,
    "mamba-ssm-cache-dtype": "float32",
    "max-num-seqs": 16,
}
RUNGS = {
    "mtp1": {"flags": {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}}},
    "fp16-mamba-state": {"flags": {"mamba-ssm-cache-dtype": "float16"}},
}


def base(env: dict[str, str] | None = None, without: tuple[str, ...] = ()) -> dict:
    """The first rung: micro's tokenizer and a load of half a second."""
    model = as_data(load_recipe("micro/base").recipe)["model"]
    return {
        "schema": 1,
        "id": f"{FAMILY}/base",
        "title": "the reference engine",
        "status": "synthetic",
        "engine": {
            "image": "cpu",
            "version": "0.32.0",
            "flags": {name: value for name, value in FLAGS.items() if name not in without},
            "env": {"OMP_NUM_THREADS": "1", **(env or {})},
        },
        "model": {key: value for key, value in model.items() if value not in (None, [])},
        "runtime": {"stop_timeout_s": 1, "ready_timeout_s": 60},
        "proof": {"waive": [{"guard": guard, "reason": "a shared test machine"} for guard in NOISE]},
        "benchmark": {
            "prompt_source": "random-text",
            "input_len": 16,
            "output_len": 16,
            "concurrency": 4,
            "prompts": 40,
            "temperature": 0,
            "seed": 7,
        },
    }


def rung(name: str, before: str, engine: dict) -> dict:
    """A rung that changes flags or variables."""
    changes = [f"engine.{part}.{key}" for part in ("flags", "env") for key in engine.get(part, {})]
    delta = {"changes": sorted(changes), "reason": "a test", "source": "a test"}
    document = {"schema": 1, "id": f"{FAMILY}/{name}", "title": name, "status": "synthetic"}
    document["extends"] = f"{FAMILY}/{before}"
    return {**document, "engine": engine, "delta": delta}


class Workshop:
    """A copy of the rooms in a folder, with the family, and its own caches and state."""

    def __init__(self, folder: Path, rungs: dict[str, dict] | None = None, first: dict | None = None) -> None:
        """Make it; `rungs`: name to the engine's changes, each on the one before it."""
        self.folder = folder
        for name in ROOMS:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        library = folder / "recipes" / "library"
        family = library / FAMILY
        family.mkdir()
        (family / "model").symlink_to(LIBRARY / "micro" / "model")
        chain = rungs if rungs is not None else RUNGS
        documents, before = {"base": first or base()}, "base"
        for name, engine in chain.items():
            documents[name] = rung(name, before, engine)
            before = name
        ladder = {"schema": 1, "family": FAMILY, "title": "quick", "default": "base", "machines": []}
        documents["ladder"] = {**ladder, "rungs": [name for name in documents if name != "ladder"]}
        for name, document in documents.items():
            (family / f"{name}.yaml").write_text(yaml.safe_dump(document, sort_keys=False))

    @property
    def environ(self) -> dict[str, str]:
        """Where this copy keeps what it keeps."""
        kept = {
            "STATION_RECIPES_CACHE": str(self.folder / "cache"),
            "STATION_RECIPES_STATE": str(self.folder / "state"),
        }
        return {**os.environ, **kept}

    def argv(self, *options: str, port: int = 8611) -> list[str]:
        """The command line of a ladder."""
        engine = ["--engine-python", sys.executable, "--engine-path", str(ENGINE), "--engine-path", str(self.folder)]
        return [sys.executable, "tasks.py", "ladder", *options, *engine, "--port", str(port)]

    def ladder(self, *options: str, port: int = 8611) -> tuple[int, dict, str]:
        """Run a ladder: exit code, ladder.json, and what it said."""
        answer = subprocess.run(
            [*self.argv(*options, port=port), "--json"],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        table = json.loads(answer.stdout) if answer.stdout.startswith("{") else {}
        return answer.returncode, table, answer.stderr


def written_ladder(
    folder: Path,
    rungs: dict[str, list[float]],
    keep: str | None = None,
    changed: dict[str, dict] | None = None,
    tag: str = "",
) -> Path:
    """A ladder's folder as if it had run: micro's rungs, each with the token step (s) of each of its boots.

    `changed`: by a run's name (<rung>-<boot><tag>), what its manifest says otherwise. No quality, no settings asked.
    """
    setting = Setting(
        "micro", list(rungs), max(map(len, rungs.values())), 1, "replicated", None, keep, ["ttft_p95_ms"], False
    )
    folder.mkdir(parents=True)
    write_setting(folder, setting)
    journal = Journal(folder)
    for name, steps in rungs.items():
        subject = setting.applied(load_recipe(f"micro/{name}")).recipe.model_copy(
            update={"quality": None, "claims": []}
        )
        load = subject.benchmark
        for boot, step_s in enumerate(steps, start=1):
            run = f"{name}-{boot}{tag}"
            engine = {"name": "cpu", "identity": "0" * 16, "answered": ["0.32.0"]}
            manifest = {"engine": engine, "model": {"files": subject.model.files}, **(changed or {}).get(run, {})}
            window = closed_loop(load.concurrency, load.prompts, load.output_len, step_s)
            log = "\n".join(["a server log", *subject.proof.must_log])
            write_run(folder / "runs" / run, subject, [[window]], _counted(subject, window), manifest=manifest, log=log)
            journal.ended(Boot(name, boot, run, "finished"))
    return folder


def _counted(subject: Recipe, window: dict) -> dict:
    """Counters in which every second draft is accepted, where the recipe drafts at all."""
    if "speculative-config" not in subject.engine.flags:
        return counters(subject, arrays=window)
    tokens = subject.benchmark.prompts * subject.benchmark.output_len
    return counters(subject, accepted=tokens // 3, drafts=tokens - tokens // 3, arrays=window)
