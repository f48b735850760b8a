"""Synthetic run folders with known truth, for tests of everything that comes after the load."""

import gzip
import hashlib
from pathlib import Path

import numpy as np

from bench.arrays import save_window
from bench.counters import COLUMNS
from bench.runfolder import SCHEMA, dump_json, dump_rows, seal, window_folder, write_recipe, write_text
from bench.telemetry.devices import GPU_ARRAYS, NvmlDevice
from bench.telemetry.sampler import gpu_record
from bench.telemetry.store import Telemetry, save_telemetry
from recipes.load import Loaded
from recipes.schema import Recipe
from recipes.spec import serving_spec

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


def claim(metric: str, published: float, tolerance: float, machine: str = "any", **more: object) -> dict:
    """A claim of a recipe."""
    return {
        "id": metric,
        "metric": metric,
        "published": published,
        "tolerance": tolerance,
        "status": "measured",
        "machine": machine,
        "source": "a test",
        **more,
    }


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
        "looping": np.zeros(requests, np.bool_),
        "texts": np.asarray(["text"], np.str_),
    }


def course(arrays: dict[str, np.ndarray], interval_s: float) -> dict[str, list]:
    """What looks at /metrics every `interval_s` (s) saw while the server gave a window's arrays."""
    start, end = arrays["start_s"], arrays["start_s"] + arrays["e2e_s"]
    times = np.arange(start.min() - 0.1, end.max() + 0.1, interval_s)
    share = np.clip((times[:, None] - start) / np.maximum(arrays["e2e_s"], 1e-9), 0, 1)
    lists = {name: [0] * len(times) for name in COLUMNS}
    lists |= {
        "t_s": times.round(3).tolist(),
        "generation_tokens": (share @ arrays["output_tokens"]).round().tolist(),
        "running": ((times[:, None] >= start) & (times[:, None] < end)).sum(axis=1).tolist(),
    }
    return lists


def telemetry(
    arrays: dict[str, np.ndarray],
    client: float = 0.3,
    gap: tuple[float, float] | None = None,
    gpu: dict[str, float] | None = None,
    default_w: float | None = 700.0,
    lost_s: float | None = None,
) -> Telemetry:
    """Telemetry at 5 Hz around a window: a client with `client` of a core, and one GPU where `gpu` gives its values.

    `gap`: shares of the window between which nothing was sampled.
    """
    begin, end = arrays["start_s"].min() - 1, (arrays["start_s"] + arrays["e2e_s"]).max() + 1
    times = np.arange(begin, end, 0.2)
    gaps = [] if gap is None else [[begin + 1 + share * (end - begin - 2) for share in gap]]
    for since, to in gaps:
        times = times[(times < since) | (times > to)]
    count = len(times)
    card = NvmlDevice("GPU-made", {"power_limit_default_w": default_w}, (), list)
    record = gpu_record(card, {}, {}, lost_s)
    meta = {
        "schema": 1,
        "rate_hz": 5.0,
        "started_s": float(begin),
        "ended_s": float(end),
        "gaps": gaps,
        "no_gpu": None if gpu is not None else "no NVIDIA driver",
        "gpus": [record] if gpu is not None else [],
        "processes": [{"role": "client", "index": 0}, {"role": "server", "index": 0}],
        "foreign": [],
        "overhead": {},
        "kept_every": 1,
        "stuck": False,
    }
    values = {name: np.full((count, len(meta["gpus"])), (gpu or {}).get(name, np.nan)) for name in GPU_ARRAYS}
    spent = np.stack([client * (times - begin), 1.5 * (times - begin)], axis=1)
    host = {name: np.zeros(count) for name in ("host_cpu_s", "host_load1", "host_memory_used_b", "sampler_cpu_s")}
    shares = {"process_cpu_s": spent, "process_wait_s": 0.01 * spent, "process_rss_b": np.full((count, 2), 1e9)}
    return Telemetry(meta, {"time_s": times, **values, **shares, **host})


GOOD_GPU = {
    "gpu_memory_used_b": 60e9,
    "gpu_power_w": 650.0,
    "gpu_power_limit_w": 700.0,
    "gpu_throttle_bits": float(0x4),
    "gpu_foreign_count": 0.0,
}


def counters(subject: Recipe, accepted: int = 0, drafts: int = 0, arrays: dict[str, np.ndarray] | None = None) -> dict:
    """counters.json of a window of `subject` without a fault; `arrays` the window's, default the ideal loop's."""
    load = subject.benchmark
    if arrays is None:
        arrays = closed_loop(load.concurrency, load.prompts, load.output_len, 0.01)
    names = {
        "request_success_total{finished_reason=length}": load.prompts,
        "generation_tokens_total": load.prompts * load.output_len,
        "prompt_tokens_total": load.prompts * load.input_len,
        "prefix_cache_hits_total": 0,
        "prefix_cache_queries_total": 0,
        "num_preemptions_total": 0,
        "e2e_request_latency_seconds_sum": float(arrays["e2e_s"].sum()),
        "e2e_request_latency_seconds_count": load.prompts,
    }
    if drafts:
        names |= {"spec_decode_num_drafts_total": drafts, "spec_decode_num_accepted_tokens_total": accepted}
    return {
        "before": dict.fromkeys(names, 7.0),
        "after": {name: value + 7.0 for name, value in names.items()},
        "series": course(arrays, 0.5),
        "host": {"boot": "b1", "dockerd": "d1"},
        "log_lines": {"before": 0, "after": 1},
    }


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
    seen: Telemetry | None = None,
) -> Path:
    """Write a run folder: one list of windows a boot (default: the recipe's shape, without a fault)."""
    load = subject.benchmark
    good = closed_loop(load.concurrency, load.prompts, load.output_len, 0.01)
    boots = boots if boots is not None else [[good] * load.windows] * load.boots
    run.mkdir(parents=True)
    write_recipe(run, subject)
    write_text(run / "machine.json", dump_json({"slug": slug, **(machine or {})}))
    base = {
        "schema": SCHEMA,
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
        argv = ["python", *serving_spec(Loaded(subject, Path(), {})).argv]
        env = {**subject.engine.env, "A": "1"}
        write_text(folder / "argv.json", dump_json({"rendered": argv, "live": live_argv or argv}))
        write_text(folder / "env.json", dump_json({"rendered": env, "live": env}))
        (folder / "server.log.gz").write_bytes(gzip.compress(log.encode(), mtime=0))
        for position, arrays in enumerate(windows, start=1):
            folder = window_folder(run, number, position)
            save_window(folder, arrays)
            write_text(folder / "counters.json", dump_rows(counted or counters(subject, arrays=arrays)))
            save_telemetry(folder / "telemetry.npz", seen or telemetry(arrays))
    if sealed:
        seal(run)
    return run
