"""Room bench: guards on what the server counted, and on whether client and server tell the same story."""

from collections.abc import Iterator

import numpy as np

from bench.analyse import analyse_window
from bench.counters import Series, acceptance_length, falls, mean_e2e_s, prefix_hit_share
from bench.evidence import Evidence, Window
from bench.guards.guard import Guard, Scope, none, span, worst
from recipes.graphs import streams_at_once
from recipes.schema import Claim

GENERATION_LIMIT = 0.005
PREFIX_HITS_LIMIT = 0.01
GAP_LIMIT = 0.05
SAMPLE_S = 1.0
PEAK_LIMIT = 0.98
PEAK_COVERAGE = 0.8
LOOKS = 5
LITTLE_LIMIT = 0.05
RATE_METRICS = frozenset({"output_tok_s", "ttft_p95_ms", "tpot_p95_ms"})


def _count(window: Window, name: str) -> float | None:
    return None if window.counted is None else window.counted.get(name)


def _off(value: float | None, wanted: float) -> float | None:
    return None if value is None else abs(value - wanted)


def finish_counters(evidence: Evidence) -> Iterator[Guard]:
    """A stream that ends in an error event counts as success in the client: the server knows better."""
    wanted = evidence.recipe.benchmark.prompts
    name = "request_success_total{finished_reason=length}"
    ok, found = worst(evidence, lambda window: _count(window, name), lambda count: count == wanted, min)
    if evidence.manifest.schema_ >= 2 and ok is not False:  # more than asked is somebody else's traffic
        ok, found = worst(evidence, lambda window: _count(window, name), lambda count: count == wanted, max)
    yield Guard("finish_counters", ok, found, wanted, "requests", f"vllm:{name}")


def generation_tokens(evidence: Evidence) -> Iterator[Guard]:
    """Server and client agree on the tokens generated within 0.5%."""

    def gap(window: Window) -> float | None:
        counted = _count(window, "generation_tokens_total")
        client = float(window.arrays["output_tokens"].sum())
        return None if counted is None else abs(counted - client) / max(client, 1)

    ok, most = worst(evidence, gap, lambda most: most <= GENERATION_LIMIT)
    unit = "share the server's count is off"
    yield Guard("generation_tokens", ok, most, GENERATION_LIMIT, unit, "vllm:generation_tokens_total", rule="at most")


def prompt_tokens(evidence: Evidence) -> Iterator[Guard]:
    """The server counted the prompt tokens that were asked, to the token."""
    load = evidence.recipe.benchmark
    wanted = load.input_len * load.prompts
    ok, off = worst(evidence, lambda window: _off(_count(window, "prompt_tokens_total"), wanted), none)
    yield Guard("prompt_tokens", ok, off, 0, f"tokens off {wanted}", "vllm:prompt_tokens_total")


def prefix_hits(evidence: Evidence) -> Iterator[Guard]:
    """Prompts were computed, not found in the prefix cache."""

    def share(window: Window) -> float | None:
        return None if window.counted is None else prefix_hit_share(window.counted)

    ok, most = worst(evidence, share, lambda most: most <= PREFIX_HITS_LIMIT)
    yield Guard(
        "prefix_hits", ok, most, PREFIX_HITS_LIMIT, "share of queries", "vllm:prefix_cache_hits_total", rule="at most"
    )


def preemptions(evidence: Evidence) -> Iterator[Guard]:
    """No request lost its place and was computed twice."""
    ok, most = worst(evidence, lambda window: _count(window, "num_preemptions_total"), none)
    yield Guard("preemptions", ok, most, 0, "preemptions", "vllm:num_preemptions_total")


def same_server(evidence: Evidence) -> Iterator[Guard]:
    """No counter fell, in the difference or at any moment of the window: the server is the one it began with."""

    def fallen(window: Window) -> float | None:
        if window.counted is None:
            return None
        course = falls(window.series) if window.series is not None else 0
        return float(max(course, sum(value < 0 for value in window.counted.values())))

    ok, most = worst(evidence, fallen, none)
    yield Guard("same_server", ok, most, 0, "counters that fell", "/metrics")


def counter_gaps(evidence: Evidence) -> Iterator[Guard]:
    """The server's counters could be read all through the window, at its end too.

    A last look that is missing voids the run: nothing was counted. Gaps before it void what was timed. A window
    without any look is a gap too; only somebody else's server may have nothing to look at.
    """
    watched = not evidence.manifest.foreign or any(window.series is not None for window in evidence.windows)

    def share(window: Window) -> float | None:
        bounds = span(window)
        if not watched or bounds is None:
            return None
        if window.record is None or window.series is None or window.record.after is None:
            return 1.0
        return _uncovered(window.series, *bounds)

    ok, most = worst(evidence, share, lambda most: most <= GAP_LIMIT)
    counted = all(window.record is not None and window.record.after is not None for window in evidence.windows)
    scope: Scope = "timing" if ok is False and counted else "run"
    unit = "share of the window without a look"
    yield Guard("counter_gaps", ok, most, GAP_LIMIT, unit, "/metrics at 1 Hz", scope=scope, rule="at most")


def _uncovered(series: Series, begin: float, end: float) -> float:
    """Share of a span that lies more than a sampling interval away from the nearest look that succeeded."""
    good = series.t_s[np.isfinite(series.columns["generation_tokens"])]
    marks = np.concatenate([[begin], good[(good > begin) & (good < end)], [end]])
    missed = np.maximum(np.diff(marks) - 2 * SAMPLE_S, 0).sum()
    return float(missed / (end - begin))


def acceptance(evidence: Evidence) -> Iterator[Guard]:
    """Rates are judged at the acceptance their claim states. Asked where a recipe claims both.

    Acceptance above it makes a run faster by other means than the claim's: its rates are void. Acceptance
    below it can only cost speed: it is named, and the verdict attributes the shortfall to it.
    """
    claims = evidence.recipe.claims
    stated = [claim for claim in claims if claim.metric == "acceptance_length"]
    if not stated or not any(claim.metric in RATE_METRICS for claim in claims):
        return
    for claim in stated:
        yield _acceptance_of(claim, evidence)


def _acceptance_of(claim: Claim, evidence: Evidence) -> Guard:
    low, high = claim.published - claim.tolerance, claim.published + claim.tolerance
    lengths = [acceptance_length(window.counted) if window.counted else None for window in evidence.windows]
    known = [length for length in lengths if length is not None]
    mean = float(np.mean(known)) if known and len(known) == len(lengths) else None
    ok = None if mean is None else low <= mean <= high
    limit = f"{low:.4g} to {high:.4g}"
    source = "vllm:spec_decode_num_accepted_tokens_total ÷ drafts"
    below = mean is not None and mean < low
    return Guard("acceptance", ok, mean, limit, "tokens a step", source, scope="timing", explains_shortfall=below)


def peak(evidence: Evidence) -> Iterator[Guard]:
    """The server's fastest second is as fast as the client's mean: else one of their clocks or counts is wrong."""

    def ratio(window: Window) -> float | None:
        bounds = span(window)
        if window.series is None or bounds is None:
            return None
        begin, end = bounds
        known = np.isfinite(window.series.columns["generation_tokens"])
        times, tokens = window.series.t_s[known], window.series.columns["generation_tokens"][known]
        inside = (times >= begin) & (times <= end)
        times, tokens = times[inside], tokens[inside]
        mean = float(window.arrays["output_tokens"].sum()) / (end - begin)
        if len(times) < 3 or times[-1] - times[0] < PEAK_COVERAGE * (end - begin) or not mean > 0:
            return None
        rates = np.diff(tokens) / np.maximum(np.diff(times), 1e-9)
        return float(rates.max() / mean)

    ok, least = worst(evidence, ratio, lambda least: least >= PEAK_LIMIT, min)
    source = "vllm:generation_tokens_total at 1 Hz against the load client"
    yield Guard(
        "peak",
        ok,
        least,
        PEAK_LIMIT,
        "server's peak rate ÷ client's mean rate",
        source,
        scope="timing",
        rule="at least",
    )


def running(evidence: Evidence) -> Iterator[Guard]:
    """The server had all streams at work at once: else they queued for its memory, and fewer were measured than said.

    The most that it ran at any look within a window; `max-num-seqs` below the streams is a choice.
    """
    wanted = streams_at_once(evidence.recipe)

    def share(window: Window) -> float | None:
        bounds = span(window)
        if window.series is None or bounds is None:
            return None
        times, seen = window.series.t_s, window.series.columns["running"]
        seen = seen[(times >= bounds[0]) & (times <= bounds[1]) & np.isfinite(seen)]
        return float(seen.max()) / wanted if len(seen) >= LOOKS else None

    ok, least = worst(evidence, share, lambda least: least >= PEAK_LIMIT, min)
    unit = f"most at once, share of {wanted}"
    yield Guard(
        "running", ok, least, PEAK_LIMIT, unit, "vllm:num_requests_running at 1 Hz", scope="timing", rule="at least"
    )


def little(evidence: Evidence) -> Iterator[Guard]:
    """Little's law: rate × mean E2E is the number in flight, or the numbers are inconsistent.

    Rate and number in flight are the client's, the mean E2E is the server's own where it tells it: requests that
    wait where the server doesn't see them (a proxy, a busy client) count in the one and not in the other.
    """
    concurrency = evidence.recipe.benchmark.concurrency

    def off(window: Window) -> float | None:
        result = analyse_window(window.arrays, concurrency)
        if result.steady is None or result.little_gap is None or not result.little:
            return None
        served = mean_e2e_s(window.counted) if window.counted is not None else None
        if served is None:
            return result.little_gap
        in_flight = result.steady / result.little * concurrency * served / result.mean_e2e_s
        return abs(in_flight - result.n_eff) / result.n_eff

    ok, most = worst(evidence, off, lambda most: most <= LITTLE_LIMIT)
    source = "load client; vllm:e2e_request_latency_seconds"
    yield Guard(
        "little", ok, most, LITTLE_LIMIT, "share of the streams it is off", source, scope="timing", rule="at most"
    )
