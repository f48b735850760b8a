"""Room bench: what the GPUs did while a rate was measured: memory, energy, clocks, power, throttling. Pure."""

from dataclasses import dataclass, field

import numpy as np

from bench.analyse import WindowResult
from bench.energy import energy, gpu_memory_gb
from bench.evidence import Window
from bench.telemetry.window import GpuFigures, window_figures

NONE = "no telemetry in this run"


@dataclass(frozen=True)
class GpuMeans:
    """A run's GPU figures. `memory_gb` holds one value a boot, the most of its windows; empty where unknown.

    `conditions`: means over windows and GPUs of clocks, sums over GPUs of power, shares of throttle
    reasons; None without a GPU. `reasons` says of each missing figure why.
    """

    memory_gb: list[float] = field(default_factory=list)
    energy_j_per_token: float | None = None
    energy_scope: str | None = None
    conditions: dict | None = None
    reasons: dict[str, str] = field(default_factory=dict)


def gpu_means(pairs: list[tuple[Window, WindowResult]]) -> GpuMeans:
    """Reduce the telemetry of windows, inside each one's steady state; without one there is no figure."""
    if not pairs or any(window.telemetry is None for window, _ in pairs):
        return _without(NONE)
    if any(result.bounds is None for _, result in pairs):
        return _without("no steady window to take it in")
    memory: dict[int, list[float]] = {}
    figures, spent, reasons = [], [], {}
    for window, result in pairs:
        value, why = gpu_memory_gb(window.telemetry, result.bounds)
        memory.setdefault(window.boot, []).append(np.nan if value is None else value)
        found = energy(window.telemetry, result.bounds, result.steady_tokens)
        spent.append(found)
        figures.append(window_figures(window.telemetry, result.bounds))
        reasons |= {"gpu_memory_gb": why} if why else {}
        reasons |= {"energy_j_per_token": found.reason} if found.reason else {}
    scopes = sorted({each.scope for each in spent if each.scope})
    if "energy_j_per_token" not in reasons and len(scopes) > 1:
        told = " and ".join(scopes)
        reasons["energy_j_per_token"] = f"the energy counter is of {told}, not of one of them in every window"
    known = "energy_j_per_token" not in reasons
    no_gpu = next((each.no_gpu or "no GPU" for each in figures if not each.gpus), None)
    if no_gpu:
        reasons["conditions"] = f"no GPU telemetry: {no_gpu}"
    return GpuMeans(
        memory_gb=[] if "gpu_memory_gb" in reasons else [float(max(values)) for values in memory.values()],
        energy_j_per_token=float(np.mean([each.j_per_token for each in spent])) if known else None,
        energy_scope=spent[0].scope if known else None,
        conditions=None if no_gpu else _conditions([each.gpus for each in figures]),
        reasons=reasons,
    )


def _without(why: str) -> GpuMeans:
    return GpuMeans(reasons=dict.fromkeys(("gpu_memory_gb", "energy_j_per_token", "conditions"), why))


def _conditions(windows: list[list[GpuFigures]]) -> dict:
    gpus = [gpu for window in windows for gpu in window]
    reasons = sorted({name for gpu in gpus for name in gpu.throttle or {}})
    told = all(gpu.throttle is not None for gpu in gpus)
    return {
        "sm_clock_mhz": _mean([gpu.sm_clock_mhz for gpu in gpus]),
        "sm_clock_min_mhz": _pick(min, [gpu.sm_clock_min_mhz for gpu in gpus]),
        "power_w": _mean([_pick(sum, [gpu.power_w for gpu in window]) for window in windows]),
        "power_limits_w": sorted({limit for gpu in gpus for limit in gpu.power_limits_w}),
        "temperature_c": _pick(max, [gpu.temperature_c for gpu in gpus]),
        "utilisation_pct": _mean([gpu.utilisation_pct for gpu in gpus]),
        "throttle": {name: _mean([gpu.throttle.get(name, 0.0) for gpu in gpus]) for name in reasons} if told else None,
    }


def _mean(values: list[float | None]) -> float | None:
    return None if None in values else float(np.mean(values))


def _pick(reduce, values: list[float | None]) -> float | None:
    return None if None in values else reduce(values)
