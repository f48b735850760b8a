"""Room bench: proves the sampler on a machine's own GPU.

    python -m bench.telemetry --seconds 30 --out telemetry.json

Keeps the GPU busy with matrix products (PyTorch, in a process of its own; --no-load leaves that out), first
without a pause, then in bursts, samples it like a run does, and checks: which fields are told, energy counter
against the integral of power, the sampler's own cost, gaps. Ends with 0 when all hold, 1 when one doesn't.
Needs numpy and nvidia-ml-py, and PyTorch for the load.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pynvml

from bench.energy import energy
from bench.telemetry.devices import DeviceError, NvmlDevice, all_uuids, open_devices
from bench.telemetry.sampler import RATE_HZ, Sampler, Watched
from bench.telemetry.store import Telemetry, read_telemetry, save_telemetry
from bench.telemetry.window import window_figures

OVERHEAD_LIMIT = 0.01
GAP_LIMIT = 0.05
ASKED = 20
MUST_BE_TOLD = ("gpu_power_w", "gpu_energy_j", "gpu_utilisation_pct", "gpu_memory_used_b", "gpu_sm_clock_mhz")
MATMUL = """
import sys, time, torch
seconds, burst_s, pause_s = map(float, sys.argv[1:])
torch.cuda.init()
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
b = (a @ a).sum().item()
print("ready", flush=True)
sys.stdin.readline()
begin = time.monotonic()
while time.monotonic() < begin + seconds:
    until = time.monotonic() + burst_s
    while time.monotonic() < until:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
    time.sleep(pause_s)
"""


def main() -> int:
    """Sample, check, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30, help="how long to sample, two halves (default 30)")
    parser.add_argument("--out", type=Path, required=True, help="JSON record; the samples go beside it as .npz")
    parser.add_argument("--uuid", action="append", help="GPU to sample (default: every GPU)")
    parser.add_argument("--no-load", action="store_true", help="don't run matrix products meanwhile")
    options = parser.parse_args()
    try:
        uuids, refusal = options.uuid or all_uuids(), "the driver shows no GPU"
    except pynvml.NVMLError as error:
        uuids, refusal = [], type(error).__name__
    with open_devices(uuids) as (devices, refused):
        no_gpu = refused or (None if devices else refusal)
        costs = {device.uuid: _costs(device) for device in devices}
        telemetry, halves = _sample(devices, no_gpu, options.seconds, not options.no_load and bool(devices))
    file = options.out.with_suffix(".npz")
    save_telemetry(file, telemetry)
    record = _record(read_telemetry(file), halves, file.stat().st_size, costs)
    options.out.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    sys.stdout.write(json.dumps(record["checks"], indent=2) + "\n")
    return 0 if all(check["ok"] for check in record["checks"]) else 1


def _sample(
    devices: list[NvmlDevice], no_gpu: str | None, seconds: float, load: bool
) -> tuple[Telemetry, dict[str, tuple[float, float]]]:
    """Sample a steady half and a bursty half; the bounds keep a second from each half's edges."""
    half = seconds / 2
    halves = {}
    pids: list[int] = []
    sampler = Sampler(devices, lambda: [Watched("server", 0, lambda: list(pids))], no_gpu, RATE_HZ)
    sampler.start()
    for name, burst_s, pause_s in (("steady", half, 0.0), ("bursts", 1.0, 0.7)):
        argv = [sys.executable, "-c", MATMUL, str(half), str(burst_s), str(pause_s)]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) if load else None
        with process or nullcontext():
            if process:
                pids[:] = [process.pid]
                if process.stdout.readline().strip() != "ready":
                    sys.exit("✘ the matrix products did not start: is PyTorch with CUDA on this Python's path?")
                process.stdin.write("go\n")
                process.stdin.flush()
            begin = time.monotonic()
            time.sleep(half)
            halves[name] = (begin + 1, begin + half - 1)
    return sampler.stop(), halves


def _costs(device: NvmlDevice) -> dict[str, dict[str, float | str]]:
    """What each question costs, in microseconds of wall time and of CPU."""
    questions: dict[str, Callable[[], object]] = {probe.array: probe.ask for probe in device.probes}
    questions["gpu_process_count"] = device.processes
    found = {}
    for name, ask in questions.items():
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            for _ in range(ASKED):
                ask()
        except DeviceError as error:
            found[name] = {"error": str(error)}
            continue
        micro = 1e6 / ASKED
        found[name] = {
            "wall_us": round((time.perf_counter() - wall) * micro, 1),
            "cpu_us": round((time.thread_time() - cpu) * micro, 1),
        }
    return found


def _record(telemetry: Telemetry, halves: dict, size_b: int, costs: dict) -> dict:
    figures = {name: asdict(window_figures(telemetry, bounds)) for name, bounds in halves.items()}
    energies = {name: asdict(energy(telemetry, bounds, 1.0)) for name, bounds in halves.items()}
    for found in energies.values():
        del found["j_per_token"]  # there were no tokens
    share = telemetry.meta["overhead"]["share"]
    gaps = max(each["gap_share"] for each in figures.values())
    told = {name: bool(np.isfinite(telemetry.arrays[name]).any()) for name in MUST_BE_TOLD}
    checks = [
        {"id": "gpu", "ok": telemetry.meta["no_gpu"] is None, "observed": telemetry.meta["no_gpu"] or "sampled"},
        {"id": "fields", "ok": all(told.values()), "observed": told},
        {"id": "overhead", "ok": share < OVERHEAD_LIMIT, "observed": share, "limit": OVERHEAD_LIMIT},
        {"id": "gaps", "ok": gaps <= GAP_LIMIT, "observed": gaps, "limit": GAP_LIMIT},
        *({"id": f"energy {name}", "ok": each["agree"] is True, "observed": each} for name, each in energies.items()),
    ]
    return {
        "checks": checks,
        "figures": figures,
        "question_costs": costs,
        "meta": telemetry.meta,
        "samples": len(telemetry.arrays["time_s"]),
        "file_bytes": size_b,
    }


if __name__ == "__main__":
    sys.exit(main())
