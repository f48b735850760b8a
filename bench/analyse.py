"""Room bench: from raw arrays to a measurement. Pure functions; the shapes are those of load.compact."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 95, 99)
STEADY_PERCENT = 98
STEADY_MIN_E2E = 3
# Between one request and the next a client takes a moment; a dip this short (of a mean E2E) ends no plateau.
DIP_SHARE = 0.05
BLOCK_CHUNKS = 2_000_000  # how many chunks are in work at once: bounds the memory of a long window
DIGITS = 6

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Steady:
    """Where a window was in its steady state: bounds in s on the client's clock, or the reason there is none.

    `n_eff`: mean streams in flight, inside the bounds; without bounds, from the first request sent to the
    last, which leaves out only the end of the run.
    """

    bounds: tuple[float, float] | None
    n_eff: float | None
    reason: str | None


@dataclass(frozen=True)
class WindowResult:
    """One window's figures. Rates in tokens/s, times in s; None where they can't be told.

    `whole` is tokens over wall time, from the first request sent to the last answer's end. `steady` counts
    tokens inside `bounds`: without the end, where streams fall idle, but with the first wave's prefill. `little`
    is C × OSL ÷ mean E2E, which needs no time series. `per_user` is OSL ÷ mean E2E, one stream's rate.
    `little_gap` is |steady ÷ OSL × mean E2E − N_eff| ÷ N_eff: by Little's law (L = λW) nothing but edges may be
    left of it. `in_flight_s` is ∫ streams dt over the whole window.
    """

    whole: float | None
    steady: float | None
    little: float | None
    n_eff: float | None
    peak_in_flight: int
    per_user: float | None = None
    mean_e2e_s: float | None = None
    wall_s: float | None = None
    in_flight_s: float | None = None
    bounds: tuple[float, float] | None = None
    steady_tokens: float | None = None
    little_gap: float | None = None
    no_steady: str | None = "no request succeeded"


def succeeded(arrays: Arrays) -> np.ndarray:
    """(R,) bool: requests without an error that gave at least one token."""
    return (arrays["error"] == "") & (arrays["output_tokens"] > 0) & (arrays["e2e_s"] > 0)


def chunk_spans(arrays: Arrays, chosen: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """When the engine worked on each chunk: begin (s), end = arrival (s), weight (tokens).

    `chosen`: indexes of requests, default all good ones. A request's first chunk holds one token, since the
    prefill samples exactly one, and spans the TTFT. The others share the rest: under speculative decoding a
    chunk holds one to N + 1 tokens, the client doesn't say how many, and how many doesn't depend on how long
    its step took, so they share it evenly. Only a last chunk that came sooner than the mean of those before
    it holds fewer, in proportion: a server that sends every n-th token sends the remainder early. Each
    request's sum is exact; only requests across an edge of the steady window feel the sharing. A span begins
    where the one before it ended.
    """
    if chosen is None:
        chosen = np.flatnonzero(succeeded(arrays))
    first_chunk = arrays["ttft_s"] > 0
    counts = arrays["chunks"].astype(np.int64) - first_chunk
    begins = (np.cumsum(counts) - counts)[chosen]
    count = counts[chosen]
    first = (arrays["start_s"] + arrays["ttft_s"])[chosen]
    owner = np.repeat(np.arange(len(chosen)), count)
    inner = np.cumsum(count) - count  # where each chosen request's gaps begin in the compact list
    gaps = arrays["gaps_us"][np.arange(len(owner)) - inner[owner] + begins[owner]].astype(np.float64) * 1e-6
    elapsed = np.concatenate([[0.0], np.cumsum(gaps)])
    later = first[owner] + elapsed[1:] - elapsed[inner][owner]
    tokens = arrays["output_tokens"][chosen].astype(float)
    several = count > 1
    last = (inner + count - 1)[several]
    before = (elapsed[last] - elapsed[inner[several]]) / (count[several] - 1)
    early = np.minimum(gaps[last] / np.maximum(before, 1e-9), 1.0)
    shares = count.astype(float)
    shares[several] += early - 1
    weights = ((tokens - 1) / np.maximum(shares, 1))[owner]
    weights[last] *= early
    return (
        np.concatenate([arrays["start_s"][chosen], later - gaps]),
        np.concatenate([first, later]),
        np.concatenate([np.where(count == 0, tokens, 1.0), weights]),
    )


def _blocks(arrays: Arrays, chosen: np.ndarray) -> Iterator[np.ndarray]:
    """Cut a list of requests so that each part has about BLOCK_CHUNKS chunks."""
    number = np.cumsum(arrays["chunks"][chosen].astype(np.int64)) // BLOCK_CHUNKS
    yield from np.split(chosen, np.flatnonzero(np.diff(number)) + 1)


def in_flight(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """The in-flight curve as (times, level from that time on), both (2R,), sorted."""
    times = np.concatenate([arrays["start_s"], arrays["start_s"] + arrays["e2e_s"]])
    steps = np.concatenate([np.ones(len(arrays["start_s"])), -np.ones(len(arrays["start_s"]))])
    order = np.lexsort((steps, times))  # at equal times ends come first
    return times[order], np.cumsum(steps[order])


def full_level(concurrency: int) -> int:
    """How many streams in flight count as full: 98% of C, rounded up."""
    return -(-STEADY_PERCENT * concurrency // 100)


def steady_state(arrays: Arrays, concurrency: int) -> Steady:
    """Find the steady window: 98% of C in flight, for at least three mean E2E.

    What it leaves out is the end, where streams fall idle. All streams are in flight as soon as they are sent, so the
    first wave's prefill, which they do together, is inside: beginning a mean E2E later would change rates by a few
    percent, either way.
    It reaches from the first to the last moment with 98% of C in flight if the mean between them is 98% too;
    else it is the longest stretch without a dip longer than 5% of a mean E2E.
    """
    good = succeeded(arrays)
    if not good.any():
        return Steady(None, None, "no request succeeded")
    mean_e2e = _mean(arrays["e2e_s"][good])
    times, level = in_flight(arrays)
    need, wanted = full_level(concurrency), STEADY_PERCENT / 100 * concurrency
    sent = (float(arrays["start_s"].min()), float(arrays["start_s"].max()))
    sending = _mean_level(times, level, sent) if sent[1] > sent[0] else None
    full = level >= need
    if not full.any():
        said = f"never {need} of {concurrency} streams in flight at once, {int(level.max())} at most"
        return Steady(None, sending, said)
    begins = np.flatnonzero(full & ~np.concatenate([[False], full[:-1]]))
    ends = np.flatnonzero(full & ~np.concatenate([full[1:], [False]])) + 1  # the level is 0 after the last time
    begin_s, end_s = times[begins], times[ends]
    bounds = (float(begin_s[0]), float(end_s[-1]))
    if _mean_level(times, level, bounds) < wanted:
        cut = np.flatnonzero(begin_s[1:] - end_s[:-1] > DIP_SHARE * mean_e2e)
        pieces = list(zip(begin_s[np.r_[0, cut + 1]], end_s[np.r_[cut, len(end_s) - 1]], strict=True))
        longest = max(pieces, key=lambda piece: piece[1] - piece[0])
        bounds = (float(longest[0]), float(longest[1]))
    length, mean = bounds[1] - bounds[0], _mean_level(times, level, bounds)
    if length < STEADY_MIN_E2E * mean_e2e:
        said = (
            f"{need} of {concurrency} streams were in flight for {length / mean_e2e:.1f} mean request times "
            f"at a stretch, {STEADY_MIN_E2E} are needed"
        )
        return Steady(None, sending, said)
    if mean < wanted:
        said = f"{mean:.0f} of {concurrency} streams in flight on average, between waves that reach {need}"
        return Steady(None, mean, said)
    return Steady(bounds, mean, None)


def steady_bounds(arrays: Arrays, concurrency: int) -> tuple[float, float] | None:
    """Begin and end of the steady window in s; None if there is none (steady_state says why)."""
    return steady_state(arrays, concurrency).bounds


def _mean_level(times: np.ndarray, level: np.ndarray, bounds: tuple[float, float]) -> float:
    """The mean of a step curve between two moments."""
    if bounds[1] <= bounds[0]:
        return 0.0
    edges = np.clip(np.concatenate([times, [times[-1]]]), *bounds)
    return float((np.diff(edges) * level).sum() / (bounds[1] - bounds[0]))


def analyse_window(arrays: Arrays, concurrency: int) -> WindowResult:
    """Analyse one window of R requests; the order of the requests doesn't matter, to the last bit."""
    good = succeeded(arrays)
    steady = steady_state(arrays, concurrency)
    peak = int(in_flight(arrays)[1].max()) if len(good) else 0
    if not good.any():
        return WindowResult(None, None, None, None, peak)
    start, end = arrays["start_s"], arrays["start_s"] + arrays["e2e_s"]
    tokens = arrays["output_tokens"][good].astype(np.int64)
    mean_tokens, mean_e2e = float(tokens.sum() / len(tokens)), _mean(arrays["e2e_s"][good])
    wall = float(end[good].max() - start[good].min())
    rate = inside = gap = None
    if steady.bounds:
        inside = _tokens_within(arrays, steady.bounds)
        rate = inside / (steady.bounds[1] - steady.bounds[0])
        gap = abs(rate / mean_tokens * mean_e2e - steady.n_eff) / steady.n_eff
    return WindowResult(
        whole=float(tokens.sum() / wall),
        steady=rate,
        little=concurrency * mean_tokens / mean_e2e,
        n_eff=steady.n_eff,
        peak_in_flight=peak,
        per_user=mean_tokens / mean_e2e,
        mean_e2e_s=mean_e2e,
        wall_s=wall,
        in_flight_s=float(np.sort(arrays["e2e_s"]).sum()),
        bounds=steady.bounds,
        steady_tokens=inside,
        little_gap=gap,
        no_steady=steady.reason,
    )


def _mean(values: np.ndarray) -> float:
    """The mean, the same for any order of the values."""
    return float(np.sort(values).mean())


def _tokens_within(arrays: Arrays, bounds: tuple[float, float]) -> float:
    """Tokens between two moments; a chunk on an edge counts by the share of its span that lies inside.

    Only requests across an edge are looked at chunk by chunk. Letting a request's tokens flow evenly over
    its time instead would misjudge the end: when the first streams fall idle, the others' steps get faster.
    """
    start, end, good = arrays["start_s"], arrays["start_s"] + arrays["e2e_s"], succeeded(arrays)
    inside = good & (start >= bounds[0]) & (end <= bounds[1])
    across = np.flatnonzero(good & ~inside & (end > bounds[0]) & (start < bounds[1]))
    keys = [arrays[name][across] for name in ("output_tokens", "ttft_s", "e2e_s", "start_s")]
    total = float(arrays["output_tokens"][inside].astype(np.int64).sum())
    parts = []
    for block in _blocks(arrays, across[np.lexsort(keys)]):
        begin, arrival, weight = chunk_spans(arrays, block)
        length = np.clip(arrival, *bounds) - np.clip(begin, *bounds)
        share = np.where(
            arrival > begin,
            length / np.maximum(arrival - begin, 1e-9),
            (arrival > bounds[0]) & (arrival <= bounds[1]),
        )
        parts.append(np.sort(weight * share).sum())
    return total + float(sum(parts))


def latencies_ms(windows: list[Arrays]) -> dict[str, dict[str, float | None]]:
    """TTFT, TPOT and E2E percentiles over all requests of all windows, in ms, with their count.

    A failed request counts as infinitely slow; a percentile that falls on one is None. Percentiles are
    order statistics (inverse of the empirical distribution), never interpolated. TPOT is (E2E - TTFT) ÷
    (tokens - 1), over requests of at least two tokens, failed ones included.
    """
    good = np.concatenate([succeeded(arrays) for arrays in windows])
    ttft = np.concatenate([arrays["ttft_s"] for arrays in windows])
    e2e = np.concatenate([arrays["e2e_s"] for arrays in windows])
    tokens = np.concatenate([arrays["output_tokens"] for arrays in windows])
    several = ~good | (tokens > 1)
    tpot = (e2e - ttft) / np.maximum(tokens - 1, 1)
    return {
        "ttft": _percentiles(np.where(good, ttft, np.inf)),
        "tpot": _percentiles(np.where(good, tpot, np.inf)[several]),
        "e2e": _percentiles(np.where(good, e2e, np.inf)),
    }


def _percentiles(values_s: np.ndarray) -> dict[str, float | None]:
    found: dict[str, float | None] = {"n": len(values_s)}
    for percentile in PERCENTILES:
        value = float(np.percentile(values_s, percentile, method="inverted_cdf")) * 1e3 if len(values_s) else np.inf
        found[f"p{percentile}"] = value if np.isfinite(value) else None
    return found


def rounded(value: object) -> object:
    """Round every float to six significant digits, so that the last bits of a CPU's sums don't show."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
