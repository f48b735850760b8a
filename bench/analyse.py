"""Room bench: from raw arrays to a measurement. Pure functions; the shapes are those of load.compact."""

from dataclasses import dataclass

import numpy as np
from scipy import stats

PERCENTILES = (50, 90, 95, 99)
STEADY_SHARE = 0.98
STEADY_MIN_E2E = 3
DIGITS = 6

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class WindowResult:
    """One window's figures. Rates in tokens/s, times in s; None where they can't be told.

    `whole` is tokens over wall time; `steady` counts tokens between the first and the last moment at which
    at least 98% of the streams were in flight; `little` is C x OSL / mean E2E, which needs no arrays.
    """

    whole: float | None
    steady: float | None
    little: float | None
    n_eff: float | None
    peak_in_flight: int


def succeeded(arrays: Arrays) -> np.ndarray:
    """(R,) bool: requests without an error that gave at least one token."""
    return (arrays["error"] == "") & (arrays["output_tokens"] > 0) & (arrays["e2e_s"] > 0)


def chunk_spans(arrays: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """When the engine worked on each chunk: begin (s), end = arrival (s), weight (tokens), of good requests.

    The first chunk holds one token (it ends the prefill) and spans the TTFT; the others share the rest
    evenly, because with speculative decoding a chunk holds several tokens and the client doesn't say how
    many. A span begins where the one before it ended.
    """
    gap_counts = arrays["chunks"] - (arrays["ttft_s"] > 0)
    first = arrays["start_s"] + arrays["ttft_s"]
    owner = np.repeat(np.arange(len(first)), gap_counts)
    gaps = arrays["gaps_us"].astype(np.float64) * 1e-6
    elapsed = np.cumsum(gaps)
    begins = np.concatenate([[0], np.cumsum(gap_counts)[:-1]]).astype(int)
    before = np.concatenate([[0.0], elapsed])[begins]
    later = first[owner] + elapsed - before[owner]
    share = (arrays["output_tokens"] - 1) / np.maximum(gap_counts, 1)
    alone = np.where(gap_counts == 0, arrays["output_tokens"], 1)
    good = succeeded(arrays)
    kept = good[owner]
    return (
        np.concatenate([arrays["start_s"][good], (later - gaps)[kept]]),
        np.concatenate([first[good], later[kept]]),
        np.concatenate([alone[good].astype(float), share[owner][kept]]),
    )


def in_flight(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """The in-flight curve as (times, level from that time on), both (2R,), sorted."""
    times = np.concatenate([arrays["start_s"], arrays["start_s"] + arrays["e2e_s"]])
    steps = np.concatenate([np.ones(len(arrays["start_s"])), -np.ones(len(arrays["start_s"]))])
    order = np.lexsort((steps, times))  # at equal times ends come first
    return times[order], np.cumsum(steps[order])


def steady_bounds(arrays: Arrays, concurrency: int) -> tuple[float, float] | None:
    """First and last moment with at least 98% of `concurrency` in flight; None if that never happened."""
    times, level = in_flight(arrays)
    full = np.flatnonzero(level >= np.ceil(STEADY_SHARE * concurrency))
    if len(full) == 0 or full[-1] + 1 >= len(times):
        return None
    return float(times[full[0]]), float(times[full[-1] + 1])


def analyse_window(arrays: Arrays, concurrency: int) -> WindowResult:
    """Analyse one window of R requests."""
    good = succeeded(arrays)
    if not good.any():
        return WindowResult(None, None, None, None, 0)
    start, end = arrays["start_s"], arrays["start_s"] + arrays["e2e_s"]
    tokens = arrays["output_tokens"][good]
    mean_e2e = float(arrays["e2e_s"][good].mean())
    levels = in_flight(arrays)[1]
    bounds = steady_bounds(arrays, concurrency)
    steady = n_eff = None
    if bounds and bounds[1] - bounds[0] >= STEADY_MIN_E2E * mean_e2e:
        steady, n_eff = _rate_within(arrays, bounds), _mean_in_flight(arrays, bounds)
    return WindowResult(
        whole=float(tokens.sum() / (end[good].max() - start[good].min())),
        steady=steady,
        little=float(concurrency * tokens.mean() / mean_e2e),
        n_eff=n_eff,
        peak_in_flight=int(levels.max()),
    )


def _rate_within(arrays: Arrays, bounds: tuple[float, float]) -> float:
    """Tokens/s between two moments; a chunk on an edge counts by the share of its span that lies inside."""
    begin, end, weight = chunk_spans(arrays)
    inside = np.clip(end, *bounds) - np.clip(begin, *bounds)
    share = np.where(end > begin, inside / np.maximum(end - begin, 1e-9), (end > bounds[0]) & (end <= bounds[1]))
    return float((weight * share).sum() / (bounds[1] - bounds[0]))


def _mean_in_flight(arrays: Arrays, bounds: tuple[float, float]) -> float:
    start, end = arrays["start_s"], arrays["start_s"] + arrays["e2e_s"]
    overlap = np.minimum(end, bounds[1]) - np.maximum(start, bounds[0])
    return float(np.maximum(overlap, 0).sum() / (bounds[1] - bounds[0]))


def latencies_ms(windows: list[Arrays]) -> dict[str, dict[str, float | None]]:
    """TTFT, TPOT and E2E percentiles over all requests of all windows, in ms, with their count.

    A failed request counts as infinitely slow; a percentile that falls on one is None. Percentiles are
    order statistics (inverse of the empirical distribution), never interpolated.
    """
    good = np.concatenate([succeeded(arrays) for arrays in windows])
    ttft = np.concatenate([arrays["ttft_s"] for arrays in windows])
    e2e = np.concatenate([arrays["e2e_s"] for arrays in windows])
    tokens = np.concatenate([arrays["output_tokens"] for arrays in windows])
    tpot = (e2e - ttft) / np.maximum(tokens - 1, 1)
    return {
        name: _percentiles(np.where(good, values, np.inf))
        for name, values in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e))
    }


def _percentiles(values_s: np.ndarray) -> dict[str, float | None]:
    found: dict[str, float | None] = {"n": len(values_s)}
    for percentile in PERCENTILES:
        value = float(np.percentile(values_s, percentile, method="inverted_cdf")) * 1e3
        found[f"p{percentile}"] = value if np.isfinite(value) else None
    return found


def interval95(boots: list[float]) -> tuple[float, float] | None:
    """The 95% t interval of the mean over boots; None for fewer than two, which have no interval."""
    if len(boots) < 2:
        return None
    half = stats.t.ppf(0.975, len(boots) - 1) * np.std(boots, ddof=1) / np.sqrt(len(boots))
    mean = float(np.mean(boots))
    return mean - float(half), mean + float(half)


def rounded(value: object) -> object:
    """Round every float to six significant digits, so that the last bits of a CPU's sums don't show."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
