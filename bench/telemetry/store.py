"""Room bench: telemetry as a file of the run: written small, read back with every shape checked."""

import json
import os
import zipfile
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from bench.telemetry.devices import GPU_ARRAYS
from images.errors import RunProblem

SCHEMA = 1
MAX_BYTES = 1_000_000
MAX_UNPACKED_BYTES = 200_000_000
# Large or counted values keep all their digits, gauges don't need them.
WIDE = frozenset({"gpu_memory_used_b", "gpu_energy_j", "gpu_throttle_bits", "gpu_process_count", "gpu_foreign_count"})
PROCESS_ARRAYS = ("process_cpu_s", "process_rss_b", "process_wait_s")
HOST_ARRAYS = ("host_cpu_s", "host_load1", "host_memory_used_b", "sampler_cpu_s")
ROLES = ("client", "server")
META_KEYS = {
    "schema": int,
    "rate_hz": (int, float),
    "started_s": (int, float),
    "ended_s": (int, float),
    "gaps": list,
    "no_gpu": (str, type(None)),
    "gpus": list,
    "processes": list,
    "foreign": list,
    "overhead": dict,
    "kept_every": int,
    "stuck": bool,
}
GPU_NUMBERS = ("lost_s", "power_limit_default_w")


@dataclass(frozen=True)
class Telemetry:
    """What a sampler gathered: S samples of G GPUs and P processes; missing is NaN, never 0.

    Arrays: `time_s` (S,) on CLOCK_MONOTONIC; every name of GPU_ARRAYS (S, G); `process_cpu_s` and
    `process_wait_s` (cumulative: worked, and waited for a free core) and `process_rss_b` (S, P); `host_cpu_s`
    (cumulative, all cores), `host_load1`, `host_memory_used_b` and `sampler_cpu_s` (S,). What is asked once a
    second only is NaN in between. `meta` names the GPUs and processes, what a GPU lacks with NVML's error, and
    the sampler's own cost.
    """

    meta: dict
    arrays: dict[str, np.ndarray]


def save_telemetry(file: Path, telemetry: Telemetry) -> None:
    """Write telemetry.npz whole or not at all; beyond MAX_BYTES every second sample is kept, then every fourth, …"""
    every = 1
    packed = _packed(telemetry, every)
    while len(packed) > MAX_BYTES:
        every *= 2
        packed = _packed(telemetry, every)
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as sink:
        sink.write(packed)
        sink.flush()
        os.fsync(sink.fileno())
    partial.rename(file)


def _packed(telemetry: Telemetry, every: int) -> bytes:
    arrays = {}
    for name, array in telemetry.arrays.items():
        narrow = name in GPU_ARRAYS and name not in WIDE
        arrays[name] = array[_kept(array, every)].astype(np.float32 if narrow else np.float64)
    for name in ("time_s", "sampler_cpu_s", "process_wait_s"):
        arrays[name] = arrays[name].round(4)  # 0.1 ms: the digits after it are noise, and don't pack
    meta = json.dumps({**telemetry.meta, "kept_every": every}, sort_keys=True, allow_nan=False)
    sink = BytesIO()
    np.savez_compressed(sink, meta=np.asarray(meta), **arrays)
    return sink.getvalue()


def _kept(array: np.ndarray, every: int) -> slice | np.ndarray:
    """Which samples stay: groups of five, so that what is asked at every fifth stays too."""
    if every == 1:
        return slice(None)
    return (np.arange(len(array)) // 5) % every == 0


def read_telemetry(file: Path) -> Telemetry:
    """Read a window's telemetry, anybody's.

    Raises RunProblem when it is none: a file that can't be read, arrays whose shapes don't agree, a bad meta.
    """
    try:
        arrays, meta = _unpacked(file)
        _check(arrays, meta)
    except (OSError, ValueError, EOFError, KeyError, TypeError, MemoryError, zipfile.BadZipFile) as error:
        raise RunProblem(f"{file}: not a window's telemetry: {error}") from error
    except (NotImplementedError, RuntimeError, RecursionError, zlib.error) as error:
        raise RunProblem(f"{file}: not a window's telemetry: {error}") from error
    return Telemetry(meta, arrays)


def _unpacked(file: Path) -> tuple[dict[str, np.ndarray], dict]:
    with zipfile.ZipFile(file) as packed:
        if sum(entry.file_size for entry in packed.infolist()) > MAX_UNPACKED_BYTES:
            raise ValueError(f"unpacks to more than {MAX_UNPACKED_BYTES} bytes")
    names = ("time_s", *GPU_ARRAYS, *PROCESS_ARRAYS, *HOST_ARRAYS)
    with np.load(file, allow_pickle=False) as stored:
        return {name: stored[name] for name in names}, json.loads(str(stored["meta"]))


def _check(arrays: dict[str, np.ndarray], meta: dict) -> None:
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        raise ValueError(f"wanted meta of schema {SCHEMA}")
    for key, kind in META_KEYS.items():
        if not isinstance(meta.get(key, ...), kind):
            raise ValueError(f"meta: {key}: {meta.get(key)!r} is not what belongs there")
    for gpu in meta["gpus"]:
        if not isinstance(gpu.get("uuid"), str) or not isinstance(gpu.get("lacks"), dict):
            raise ValueError("meta: a GPU has no uuid")
        wrong = [name for name in GPU_NUMBERS if not isinstance(gpu.get(name), int | float | None)]
        if wrong:
            raise ValueError(f"meta: {wrong[0]} is no number")
    for gap in meta["gaps"]:
        if not (len(gap) == 2 and all(isinstance(edge, int | float) for edge in gap)):
            raise ValueError("meta: a gap has no two edges")
    if any(process.get("role") not in ROLES for process in meta["processes"]):
        raise ValueError(f"meta: a process is neither {' nor '.join(ROLES)}")
    samples = len(arrays["time_s"])
    shapes = dict.fromkeys(("time_s", *HOST_ARRAYS), (samples,))
    shapes |= dict.fromkeys(GPU_ARRAYS, (samples, len(meta["gpus"])))
    shapes |= dict.fromkeys(PROCESS_ARRAYS, (samples, len(meta["processes"])))
    for name, shape in shapes.items():
        array = arrays[name]
        if array.dtype.kind != "f" or array.shape != shape or np.isinf(array).any():
            raise ValueError(f"{name!r}: wanted finite numbers or NaN of shape {shape}")
    times = arrays["time_s"]
    if not np.isfinite(times).all() or (np.diff(times) < 0).any() or not 0 < meta["rate_hz"] < 1000:
        raise ValueError("'time_s' doesn't rise")
