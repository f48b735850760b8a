"""Room bench: guards on the machine under the load, from the window's telemetry."""

from collections.abc import Iterator, Sequence

import numpy as np

from bench.evidence import Evidence, Window
from bench.guards.guard import Guard, held, none, span, worst
from bench.telemetry.window import THROTTLE_WORDS, GpuFigures, WindowFigures, window_figures

CLIENT_LIMIT = 0.8
GAP_LIMIT = 0.05
# NVML's reasons that mean the chip was held back, as bench.telemetry.window names them. A software power cap
# at the default limit is how a chip works at full load; another limit than the default is power_cap's matter.
HELD_BACK = {name: THROTTLE_WORDS[name] for name in ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")}


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
    waits = [each.client_wait_share for each in figures if each and each.client_wait_share is not None]
    waited = f"; the client waited for a core for {max(waits):.1%} of the window" if waits else ""
    ok, most = held(shares, lambda most: most <= CLIENT_LIMIT)
    yield Guard(
        "client_saturation", ok, most, CLIENT_LIMIT, "of a core", f"telemetry{waited}", scope="timing", rule="at most"
    )


def telemetry_gaps(evidence: Evidence) -> Iterator[Guard]:
    """Telemetry was taken all through the window. A window without any is a gap, but in an imported file."""
    watched = evidence.manifest.imported is None

    def share(window: Window) -> float | None:
        if watched and window.telemetry is None:
            return 1.0
        figures = _figures(window)
        return figures.gap_share if figures else None

    ok, most = worst(evidence, share, lambda most: most <= GAP_LIMIT)
    unit = "share of the window without a sample"
    yield Guard("telemetry_gaps", ok, most, GAP_LIMIT, unit, "telemetry", scope="timing", rule="at most")


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
    yield _throttle(found, complete)
    yield _power_cap(evidence, found, complete)
    yield _alone(found, complete)


def _throttle(found: list[GpuFigures], complete: bool) -> Guard:
    seen = [gpu.throttle for gpu in found if gpu.throttle is not None]
    shares = {name: max((throttle.get(name, 0.0) for throttle in seen), default=0.0) for name in HELD_BACK}
    words = [f"{HELD_BACK[name]} in {share:.0%} of the samples" for name, share in shares.items() if share > 0]
    ok = _clean(words, complete and len(seen) == len(found))
    said = ", ".join(words) or ("none" if ok else None)
    return Guard("throttle", ok, said, "none", "", "NVML clocks event reasons", scope="timing")


def _power_cap(evidence: Evidence, found: list[GpuFigures], complete: bool) -> Guard:
    """The limit is the card's default: a claim that states no other was made under it."""
    records = [gpu for window in evidence.windows if window.telemetry for gpu in window.telemetry.meta["gpus"]]
    defaults = {gpu["uuid"]: gpu.get("power_limit_default_w") for gpu in records}
    pairs = [(gpu.power_limits_w, defaults.get(gpu.uuid)) for gpu in found]
    told = [(limit, default) for limits, default in pairs if default is not None for limit in limits]
    changed = sorted({limit for limit, default in told if not np.isclose(limit, default, atol=0.5, rtol=0)})
    ok = _clean(changed, complete and all(limits and default is not None for limits, default in pairs))
    said = None if ok is None else ", ".join(f"{limit:g}" for limit in changed or sorted({limit for limit, _ in told}))
    limit = ", ".join(f"{default:g}" for default in sorted({default for _, default in told}))
    source = "NVML: power limit in force against the card's default"
    return Guard("power_cap", ok, said, limit if ok is not None else "the default limit", "W", source, scope="timing")


def _clean(wrong: Sequence, whole: bool) -> bool | None:
    """False where something is wrong; else True, unless part of it isn't known."""
    return False if wrong else True if whole else None


def _alone(found: list[GpuFigures], complete: bool) -> Guard:
    counts = [gpu.foreign for gpu in found]
    ok, most = held(counts if complete else [*counts, None], none)
    unit = "processes not the engine's on its GPU"
    return Guard("gpu_alone", ok, most, 0, unit, "NVML compute processes", scope="timing")
