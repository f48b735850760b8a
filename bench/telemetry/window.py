"""Room bench: what telemetry says of one stretch of time: figures for guards, attribution and report. Pure."""

from dataclasses import dataclass

import numpy as np

from bench.telemetry.store import Telemetry

# NVML's bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h).
THROTTLE_BITS = {
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
}
# How they are said; idle and application clocks hold nothing back.
THROTTLE_WORDS = {
    "sw_power_cap": "power cap",
    "hw_power_brake": "power brake",
    "hw_slowdown": "hardware slowdown",
    "sw_thermal": "software thermal slowdown",
    "hw_thermal": "hardware thermal slowdown",
    "sync_boost": "sync boost",
    "display_clocks": "display clocks",
}

IDLE_BELOW, IDLE_STEP_S = 0.15, 0.5
LONGEST_S = 7 * 86_400

Bounds = tuple[float, float]


@dataclass(frozen=True)
class GpuFigures:
    """One GPU in the window; None where it doesn't tell (`lacks` has NVML's reason by array).

    `throttle` is the share of samples by reason (empty: none seen; None: not told), `power_limits_w` every
    limit seen, `foreign` the most other processes seen at once, `lost_s` when the GPU was lost.
    """

    uuid: str
    memory_gb: float | None
    utilisation_pct: float | None
    power_w: float | None
    power_max_w: float | None
    power_limits_w: list[float]
    sm_clock_mhz: float | None
    sm_clock_min_mhz: float | None
    memory_clock_mhz: float | None
    temperature_c: float | None
    throttle: dict[str, float] | None
    foreign: int | None
    lost_s: float | None
    lacks: dict[str, str]


@dataclass(frozen=True)
class WindowFigures:
    """Host and GPUs in the window. Shares are of one core, cores are sums over processes; None: not seen.

    `gap_share` is the share of the window without samples, `client_share` that of the busiest client
    process, `client_wait_share` the longest share of the window that one of them waited for a free core,
    `no_gpu` why there is no GPU telemetry.
    """

    gap_share: float
    client_share: float | None
    client_shares: list[float]
    client_wait_share: float | None
    server_cores: float | None
    server_share: float | None
    host_busy_cores: float | None
    host_load1: float | None
    host_memory_gb: float | None
    no_gpu: str | None
    gpus: list[GpuFigures]


def window_figures(telemetry: Telemetry, bounds: Bounds) -> WindowFigures:
    """Figures of the stretch `bounds` = (start, end), s on CLOCK_MONOTONIC."""
    arrays, meta = telemetry.arrays, telemetry.meta
    inside = _inside(arrays["time_s"], bounds)
    clients = _of_role(telemetry, "client", process_shares(telemetry, bounds))
    servers = _of_role(telemetry, "server", process_shares(telemetry, bounds))
    waits = _of_role(telemetry, "client", process_shares(telemetry, bounds, "process_wait_s"))
    return WindowFigures(
        gap_share=gap_share(telemetry, bounds),
        client_share=max(clients, default=None),
        client_shares=clients,
        client_wait_share=max(waits, default=None),
        server_cores=sum(servers) if servers else None,
        server_share=max(servers, default=None),
        host_busy_cores=rate_within(arrays["time_s"], arrays["host_cpu_s"], bounds),
        host_load1=_reduce(np.mean, arrays["host_load1"][inside]),
        host_memory_gb=_scaled(_reduce(np.max, arrays["host_memory_used_b"][inside]), 1e-9),
        no_gpu=meta["no_gpu"],
        gpus=[_gpu(telemetry, index, inside) for index in range(len(meta["gpus"]))],
    )


def _gpu(telemetry: Telemetry, index: int, inside: np.ndarray) -> GpuFigures:
    record = telemetry.meta["gpus"][index]

    def reduced(name: str, reduce) -> float | None:
        return _reduce(reduce, telemetry.arrays[name][inside, index])

    limits = telemetry.arrays["gpu_power_limit_w"][inside, index]
    foreign = reduced("gpu_foreign_count", np.max)
    return GpuFigures(
        uuid=record["uuid"],
        memory_gb=_scaled(reduced("gpu_memory_used_b", np.max), 1e-9),
        utilisation_pct=reduced("gpu_utilisation_pct", np.mean),
        power_w=reduced("gpu_power_w", np.mean),
        power_max_w=reduced("gpu_power_w", np.max),
        power_limits_w=sorted({float(limit) for limit in limits[np.isfinite(limits)]}),
        sm_clock_mhz=reduced("gpu_sm_clock_mhz", np.mean),
        sm_clock_min_mhz=reduced("gpu_sm_clock_mhz", np.min),
        memory_clock_mhz=reduced("gpu_memory_clock_mhz", np.mean),
        temperature_c=reduced("gpu_temperature_c", np.max),
        throttle=_throttle(telemetry.arrays["gpu_throttle_bits"][inside, index]),
        foreign=None if foreign is None else int(foreign),
        lost_s=record["lost_s"],
        lacks=record["lacks"],
    )


def _throttle(values: np.ndarray) -> dict[str, float] | None:
    told = values[np.isfinite(values)].astype(np.int64)
    if len(told) == 0:
        return None
    shares = {name: float(np.mean((told & bit) != 0)) for name, bit in THROTTLE_BITS.items()}
    return {name: share for name, share in shares.items() if share > 0}


def gap_share(telemetry: Telemetry, bounds: Bounds) -> float:
    """The share of the window that no sample covers: gaps, and what lies before the first and after the last."""
    start, end = bounds
    meta = telemetry.meta
    holes = [*meta["gaps"], [-np.inf, meta["started_s"]], [meta["ended_s"], np.inf]]
    missed = sum(max(0.0, min(end, to) - max(start, since)) for since, to in holes)
    return min(1.0, missed / (end - start))


def process_shares(telemetry: Telemetry, bounds: Bounds, name: str = "process_cpu_s") -> list[float | None]:
    """Each process's mean share of one core over the window; None for one that wasn't alive in it."""
    times, table = telemetry.arrays["time_s"], telemetry.arrays[name]
    return [rate_within(times, table[:, column], bounds) for column in range(table.shape[1])]


def _of_role(telemetry: Telemetry, role: str, shares: list[float | None]) -> list[float]:
    named = zip(telemetry.meta["processes"], shares, strict=True)
    return [share for process, share in named if process["role"] == role and share is not None]


def idle_share(telemetry: Telemetry, bounds: Bounds, column: int) -> float | None:
    """The share of the window in which a process used less than IDLE_BELOW of a core, in steps of IDLE_STEP_S.

    None where it isn't known, and for a window that is longer than any real one (a week).
    """
    if bounds[1] - bounds[0] > LONGEST_S:
        return None
    times, counter = telemetry.arrays["time_s"], telemetry.arrays["process_cpu_s"][:, column]
    told, edges = np.isfinite(counter), np.arange(*bounds, IDLE_STEP_S)
    if told.sum() < 2 or len(edges) < 2:
        return None
    used = np.diff(np.interp(edges, times[told], counter[told])) / IDLE_STEP_S
    return float(np.mean(used < IDLE_BELOW))


def rate_within(times: np.ndarray, counter: np.ndarray, bounds: Bounds) -> float | None:
    """How fast a counter rose over the whole window, per second; between samples it rises evenly.

    Outside the stretch in which it was told it stands still. None without two values, or where none of that
    stretch lies in the window.
    """
    told = np.isfinite(counter)
    times, counter = times[told], counter[told]
    if len(times) < 2 or times[0] >= bounds[1] or times[-1] <= bounds[0]:
        return None
    first, last = np.interp(bounds, times, counter)
    return float((last - first) / (bounds[1] - bounds[0]))


def _inside(times: np.ndarray, bounds: Bounds) -> np.ndarray:
    return (times >= bounds[0]) & (times <= bounds[1])


def _reduce(reduce, values: np.ndarray) -> float | None:
    told = values[np.isfinite(values)]
    return float(reduce(told)) if len(told) else None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
