"""Room bench: guards on the machine under the load, from the window's telemetry."""

from collections.abc import Callable, Iterator

import numpy as np

from bench.evidence import Evidence, Window
from bench.guards.guard import Guard, span, worst
from bench.telemetry.window import GpuFigures, WindowFigures, window_figures

CLIENT_LIMIT = 0.8
GAP_LIMIT = 0.05
# NVML's reasons that mean the chip was held back, as bench.telemetry.window names them. A software power cap
# at the default limit is how a chip works at full load; another limit than the default is power_cap's matter.
HELD_BACK = {
    "hw_slowdown": "hardware slowdown",
    "sw_thermal": "software thermal slowdown",
    "hw_thermal": "hardware thermal slowdown",
    "hw_power_brake": "power brake",
}


def _figures(window: Window) -> WindowFigures | None:
    """The telemetry between the first start and the last end of the window's requests."""
    bounds = span(window)
    return None if window.telemetry is None or bounds is None else window_figures(window.telemetry, bounds)


def client_saturation(evidence: Evidence) -> Iterator[Guard]:
    """No load client used more than 80% of a core: else the client is what was measured.

    A client that waits for a core uses little of it and is late all the same: dispatch_delay is about that.
    """
    figures = [_figures(window) for window in evidence.windows]
    shares = [each.client_share if each else None for each in figures]
    most = None if not shares or None in shares else max(shares)
    waits = [each.client_wait_share for each in figures if each and each.client_wait_share is not None]
    waited = f"; the client waited for a core for {max(waits):.1%} of the window" if waits else ""
    ok = None if most is None else most <= CLIENT_LIMIT
    yield Guard("client_saturation", ok, most, CLIENT_LIMIT, "of a core", f"telemetry{waited}", scope="timing")


def telemetry_gaps(evidence: Evidence) -> Iterator[Guard]:
    """Telemetry was taken all through the window."""

    def share(window: Window) -> float | None:
        figures = _figures(window)
        return figures.gap_share if figures else None

    most = worst(evidence, share)
    ok = None if most is None else most <= GAP_LIMIT
    unit = "share of the window without a sample"
    yield Guard("telemetry_gaps", ok, most, GAP_LIMIT, unit, "telemetry", scope="timing")


def gpus(evidence: Evidence) -> Iterator[Guard]:
    """Guards on the GPUs; not asked on a machine that has none."""
    seen = [figures for window in evidence.windows if (figures := _figures(window))]
    if not evidence.machine.gpus and not any(figures.gpus for figures in seen):
        return
    complete = len(seen) == len(evidence.windows) > 0 and all(figures.gpus for figures in seen)
    found = [gpu for figures in seen for gpu in figures.gpus]
    lost = sorted({f"{gpu.uuid} at {gpu.lost_s:.1f} s" for gpu in found if gpu.lost_s is not None})
    ok = False if lost else True if complete else None
    said = "; ".join(lost) or ("present" if complete else None)
    yield Guard("gpu_lost", ok, said, "present", "", "NVML")
    yield _throttle(found if complete else [])
    yield _power_cap(evidence, found if complete else [])
    yield _alone(found if complete else [])


def _told(found: list[GpuFigures], pick: Callable[[GpuFigures], object]) -> list | None:
    """A figure of every GPU in every window; None where one of them doesn't tell it."""
    values = [pick(gpu) for gpu in found]
    return None if not values or any(value is None for value in values) else values


def _throttle(found: list[GpuFigures]) -> Guard:
    seen = _told(found, lambda gpu: gpu.throttle)
    words = None
    if seen is not None:
        shares = {name: max(throttle.get(name, 0.0) for throttle in seen) for name in HELD_BACK}
        words = [f"{HELD_BACK[name]} in {share:.0%} of the samples" for name, share in shares.items() if share > 0]
    said = None if words is None else ", ".join(words) or "none"
    ok = None if words is None else not words
    return Guard("throttle", ok, said, "none", "", "NVML clocks event reasons", scope="timing")


def _power_cap(evidence: Evidence, found: list[GpuFigures]) -> Guard:
    """The limit is the card's default: a claim that states no other was made under it."""
    limits = _told(found, lambda gpu: gpu.power_limits_w or None)
    records = [gpu for window in evidence.windows if window.telemetry for gpu in window.telemetry.meta["gpus"]]
    defaults = {gpu["uuid"]: gpu.get("power_limit_default_w") for gpu in records}
    wanted = _told(found, lambda gpu: defaults.get(gpu.uuid))
    source = "NVML: power limit in force against the card's default"
    if limits is None or wanted is None:
        return Guard("power_cap", None, None, "the default limit", "W", source, scope="timing")
    pairs = [(limit, default) for each, default in zip(limits, wanted, strict=True) for limit in each]
    changed = sorted({limit for limit, default in pairs if not np.isclose(limit, default, atol=0.5, rtol=0)})
    said = ", ".join(f"{limit:g}" for limit in changed or sorted({limit for limit, _ in pairs}))
    limit = ", ".join(f"{default:g}" for default in sorted(set(wanted)))
    return Guard("power_cap", not changed, said, limit, "W", source, scope="timing")


def _alone(found: list[GpuFigures]) -> Guard:
    counts = _told(found, lambda gpu: gpu.foreign)
    most = None if counts is None else max(counts)
    ok = None if most is None else most == 0
    unit = "processes not the engine's on its GPU"
    return Guard("gpu_alone", ok, most, 0, unit, "NVML compute processes", scope="timing")
