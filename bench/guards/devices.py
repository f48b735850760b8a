"""Room bench: guards on the machine under the load, from the window's telemetry."""

from collections.abc import Callable, Iterator

import numpy as np

from bench.evidence import Evidence, Window
from bench.guards.guard import Guard, worst

CLIENT_LIMIT = 0.8
GAP_LIMIT = 0.05
# NVML's clocks event reasons that mean the chip was held back: hardware slowdown, software and hardware thermal
# slowdown, power brake (nvml.h: nvmlClocksEventReason…, 0x8, 0x20, 0x40, 0x80).
HELD_BACK = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def _inside(window: Window) -> np.ndarray | None:
    """(S,) bool: the telemetry samples between the first start and the last end of the window's requests."""
    starts = window.arrays["start_s"]
    if window.telemetry is None or not len(starts):
        return None
    ends = starts + window.arrays["e2e_s"]
    return (window.telemetry.t_s >= starts.min()) & (window.telemetry.t_s <= ends.max())


def client_saturation(evidence: Evidence) -> Iterator[Guard]:
    """No load client used more than 80% of a core: else the client is what was measured."""

    def share(window: Window) -> float | None:
        inside = _inside(window)
        if inside is None or window.telemetry.client_cpu.size == 0:
            return None
        cpu = window.telemetry.client_cpu[inside]
        known = np.isfinite(cpu).any(axis=0)
        return float(np.nanmean(cpu[:, known], axis=0).max()) if known.any() else None

    most = worst(evidence, share)
    ok = None if most is None else most <= CLIENT_LIMIT
    yield Guard("client_saturation", ok, most, CLIENT_LIMIT, "of a core", "telemetry", scope="timing")


def telemetry_gaps(evidence: Evidence) -> Iterator[Guard]:
    """Telemetry was taken all through the window."""

    def share(window: Window) -> float | None:
        inside = _inside(window)
        if inside is None:
            return None
        starts = window.arrays["start_s"]
        begin, end = float(starts.min()), float((starts + window.arrays["e2e_s"]).max())
        marks = np.concatenate([[begin], window.telemetry.t_s[inside], [end]])
        missed = np.maximum(np.diff(marks) - 2 * window.telemetry.interval_s, 0).sum()
        return float(missed / max(end - begin, 1e-9))

    most = worst(evidence, share)
    ok = None if most is None else most <= GAP_LIMIT
    unit = "share of the window without a sample"
    yield Guard("telemetry_gaps", ok, most, GAP_LIMIT, unit, "telemetry", scope="timing")


def gpus(evidence: Evidence) -> Iterator[Guard]:
    """Guards on the GPUs; not asked on a machine that has none."""
    recorded = [window.telemetry for window in evidence.windows if window.telemetry is not None]
    if not any(telemetry.gpus for telemetry in recorded) and not evidence.machine.gpus:
        return
    lost = sorted({f"{gpu.uuid}: {gpu.lost}" for telemetry in recorded for gpu in telemetry.gpus if gpu.lost})
    complete = bool(recorded) and len(recorded) == len(evidence.windows) and all(t.gpus for t in recorded)
    said = "; ".join(lost) or ("present" if complete else None)
    yield Guard("gpu_lost", False if lost else True if complete else None, said, "present", "", "NVML")
    yield _throttle(evidence)
    yield _power_cap(evidence)
    yield _alone(evidence)


def _by_gpu(evidence: Evidence, figure: Callable) -> list | None:
    """figure(gpu, inside) for every GPU of every window; None where a window has no GPU telemetry."""
    found = []
    for window in evidence.windows:
        inside = _inside(window)
        if inside is None or not window.telemetry.gpus:
            return None
        found += [figure(gpu, inside) for gpu in window.telemetry.gpus]
    return found or None


def _throttle(evidence: Evidence) -> Guard:
    def reasons(gpu, inside: np.ndarray) -> int | None:
        seen = gpu.throttle_reasons[inside]
        seen = seen[seen >= 0]
        return int(np.bitwise_or.reduce(seen)) if len(seen) else None

    masks = _by_gpu(evidence, reasons)
    if masks is None or any(mask is None for mask in masks):
        return Guard("throttle", None, None, "none", "", "NVML clocks event reasons", scope="timing")
    words = [word for bit, word in HELD_BACK.items() if any(mask & bit for mask in masks)]
    said = ", ".join(words) or "none"
    return Guard("throttle", not words, said, "none", "", "NVML clocks event reasons", scope="timing")


def _power_cap(evidence: Evidence) -> Guard:
    caps = _by_gpu(evidence, lambda gpu, _inside: (gpu.power_limit_w, gpu.power_limit_default_w))
    source = "NVML enforced against default power limit"
    if caps is None or any(value is None for cap in caps for value in cap):
        return Guard("power_cap", None, None, "the default limit", "W", source, scope="timing")
    changed = sorted({cap for cap in caps if abs(cap[0] - cap[1]) > 0.5})
    wanted = ", ".join(f"{cap[1]:g}" for cap in sorted(set(caps)))
    said = ", ".join(f"{cap[0]:g}" for cap in (changed or sorted(set(caps))))
    return Guard("power_cap", not changed, said, wanted, "W", source, scope="timing")


def _alone(evidence: Evidence) -> Guard:
    def most(gpu, inside: np.ndarray) -> int | None:
        seen = gpu.foreign_processes[inside]
        return int(seen.max()) if len(seen) and (seen >= 0).all() else None

    counts = _by_gpu(evidence, most)
    known = counts is not None and all(count is not None for count in counts)
    worst_count = max(counts) if known else None
    ok = None if worst_count is None else worst_count == 0
    unit = "processes not the engine's on its GPU"
    return Guard("gpu_alone", ok, worst_count, 0, unit, "NVML compute processes", scope="timing")
