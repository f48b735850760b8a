"""Synthetic run folders with known truth, for tests of everything that comes after the load."""

import gzip
import hashlib
from pathlib import Path

import numpy as np

from bench.load import save_window
from bench.runfolder import dump_json, seal, window_folder, write_recipe, write_text
from recipes.schema import Recipe

MODEL_FILES = {"model.safetensors": "a" * 64, "tokenizer.json": "b" * 64}


def recipe(**changes: object) -> Recipe:
    """A small valid recipe; `benchmark`, `claims` and `proof` can be changed."""
    benchmark = {
        "prompt_source": "random-text",
        "input_len": 64,
        "output_len": 32,
        "concurrency": 8,
        "prompts": 80,
        "temperature": 0,
        "seed": 1,
        **changes.pop("benchmark", {}),
    }
    return Recipe.model_validate(
        {
            "schema": 1,
            "id": "test/base",
            "title": "a test",
            "engine": {"image": "cpu", "version": "0.32.0"},
            "model": {"path": "model", "served_name": "m", "dtype": "float32", "files": MODEL_FILES},
            "runtime": {},
            "benchmark": benchmark,
            **changes,
        }
    )


def closed_loop(
    streams: int, requests: int, output_len: int, step_s: float, tokens_a_chunk: int = 1, ttft_s: float = 0.05
) -> dict[str, np.ndarray]:
    """Raw arrays of an ideal closed loop: every stream runs request after request without a pause.

    Each later chunk holds `tokens_a_chunk` tokens and takes `step_s`; the plateau's true rate is
    streams x output_len / (ttft_s + chunks x step_s).
    """
    later = (output_len - 1) // tokens_a_chunk
    assert later * tokens_a_chunk == output_len - 1, "tokens_a_chunk must divide output_len - 1"
    e2e = ttft_s + later * step_s
    index = np.arange(requests)
    starts = 1000.0 + (index % streams) * (e2e / streams) + (index // streams) * (e2e + 1e-7)
    return {
        "start_s": starts,
        "ttft_s": np.full(requests, ttft_s),
        "e2e_s": np.full(requests, e2e),
        "input_tokens": np.full(requests, 64, np.int32),
        "output_tokens": np.full(requests, output_len, np.int32),
        "chunks": np.full(requests, later + 1, np.int32),
        "gaps_us": np.full(requests * later, round(step_s * 1e6), np.uint32),
        "error": np.full(requests, "", np.str_),
        "text_sha256": np.asarray(
            [hashlib.sha256(bytes([n % 256])).hexdigest()[:16] for n in range(requests)], np.str_
        ),
        "texts": np.asarray(["text"], np.str_),
    }


def counters(subject: Recipe, accepted: int = 0, drafts: int = 0) -> dict:
    """Counters before and after a window of `subject` without a fault."""
    load = subject.benchmark
    names = {
        "request_success_total{finished_reason=length}": load.prompts,
        "generation_tokens_total": load.prompts * load.output_len,
        "prompt_tokens_total": load.prompts * load.input_len,
        "prefix_cache_hits_total": 0,
        "prefix_cache_queries_total": 0,
        "num_preemptions_total": 0,
    }
    if drafts:
        names |= {"spec_decode_num_drafts_total": drafts, "spec_decode_num_accepted_tokens_total": accepted}
    return {"before": dict.fromkeys(names, 7.0), "after": {name: value + 7.0 for name, value in names.items()}}


def write_run(
    run: Path,
    subject: Recipe,
    boots: list[list[dict[str, np.ndarray]]] | None = None,
    counted: dict | None = None,
    slug: str = "cpu-x86-64",
    manifest: dict | None = None,
    machine: dict | None = None,
    live_argv: list[str] | None = None,
    log: str = "a server log",
    sealed: bool = True,
) -> Path:
    """Write a run folder: one list of windows a boot (default: the recipe's shape, without a fault)."""
    load = subject.benchmark
    good = closed_loop(load.concurrency, load.prompts, load.output_len, 0.01)
    boots = boots if boots is not None else [[good] * load.windows] * load.boots
    run.mkdir(parents=True)
    write_recipe(run, subject)
    write_text(run / "machine.json", dump_json({"slug": slug, **(machine or {})}))
    base = {
        "recipe": subject.id,
        "planned_windows": load.boots * load.windows,
        "engine": {"answered": ["0.32.0"] * len(boots)},
        "model": {"files": MODEL_FILES},
        "failure": None,
    }
    write_text(run / "manifest.json", dump_json({**base, **(manifest or {})}))
    for number, windows in enumerate(boots, start=1):
        folder = run / "boots" / str(number)
        folder.mkdir(parents=True)
        argv = ["python", "serve"]
        write_text(folder / "argv.json", dump_json({"rendered": argv, "live": live_argv or argv}))
        write_text(folder / "env.json", dump_json({"rendered": {"A": "1"}, "live": {"A": "1"}}))
        (folder / "server.log.gz").write_bytes(gzip.compress(log.encode(), mtime=0))
        for position, arrays in enumerate(windows, start=1):
            save_window(window_folder(run, number, position), arrays)
            write_text(window_folder(run, number, position) / "counters.json", dump_json(counted or counters(subject)))
    if sealed:
        seal(run)
    return run
