"""Room bench: what a difference from a published rate comes from: concurrency, acceptance or step time. Pure.

tok/s = effective streams × acceptance length ÷ step time. The claim's side of it is the published rate, the
recipe's streams and, where the recipe says it, its acceptance length; its step time follows from them.
"""

from dataclasses import dataclass

from bench.analyse import WindowResult
from bench.counters import Counters, acceptance_length
from bench.telemetry.window import THROTTLE_WORDS
from recipes.schema import Recipe

NOT_WORTH_NAMING = 0.005
THROTTLED_SHARE = 0.05
GPU_IDLE_PCT = 70


@dataclass(frozen=True)
class Factors:
    """What a rate is made of. `acceptance`: tokens a step of a stream, None where it isn't known."""

    streams: float
    acceptance: float | None
    step_s: float | None

    @property
    def rate(self) -> float | None:
        """Streams × acceptance ÷ step time, tokens/s."""
        return None if self.acceptance is None or not self.step_s else self.streams * self.acceptance / self.step_s


def speculates(recipe: Recipe) -> bool:
    """Whether the recipe drafts tokens."""
    return "speculative-config" in recipe.engine.flags


def claimed_factors(recipe: Recipe, published: float) -> Factors:
    """What a published rate implies: C streams, the stated acceptance, and the step time between them.

    Acceptance is 1 without draft tokens; else the recipe's claim of it, else its synthetic rates (the chance
    that position 1, 2, … is accepted, so 1 + their sum), else unknown.
    """
    acceptance: float | None = 1.0
    if speculates(recipe):
        stated = [claim.published for claim in recipe.claims if claim.metric == "acceptance_length"]
        config = recipe.engine.flags["speculative-config"]
        rates = config.get("synthetic_acceptance_rates") if isinstance(config, dict) else None
        numbers = isinstance(rates, list) and all(isinstance(rate, int | float) for rate in rates)
        synthetic = 1 + sum(rates) if rates and numbers else None
        acceptance = stated[0] if stated else synthetic
    streams = recipe.benchmark.concurrency
    return Factors(streams, acceptance, streams * acceptance / published if acceptance else None)


def window_factors(result: WindowResult, counted: Counters | None, drafting: bool) -> Factors:
    """What a window's rate was made of.

    Step time = window ÷ (drafts ÷ mean streams in flight), since a request drafts once a step, over the whole window
    as the counters are; without draft tokens it is streams ÷ rate. The streams are those that the client saw: vLLM's
    own gauges lag behind a long prefill.
    """
    streams = result.n_eff or 0.0
    if not drafting:
        rate = result.steady or result.whole
        return Factors(streams, 1.0, streams / rate if rate else None)
    drafts = (counted or {}).get("spec_decode_num_drafts_total")
    acceptance = acceptance_length(counted) if counted else None
    if not drafts or acceptance is None or not result.in_flight_s or not result.n_eff:
        return Factors(streams, acceptance, None)
    return Factors(streams, acceptance, result.in_flight_s / drafts)


def mean_factors(rows: list[Factors]) -> Factors | None:
    """The mean over windows; a factor unknown in one is unknown."""
    if not rows:
        return None

    def mean(values: list[float | None]) -> float | None:
        return None if any(value is None for value in values) else sum(values) / len(values)

    streams = mean([row.streams for row in rows])
    return Factors(streams, mean([row.acceptance for row in rows]), mean([row.step_s for row in rows]))


@dataclass(frozen=True)
class Wording:
    """How a sentence names the side that a rate is held against: a claim, or another run."""

    alike: str = "as claimed"
    states_no: str = "the claim states no"


OF_A_CLAIM = Wording()


def attribute(
    claimed: Factors,
    observed: Factors,
    published: float,
    rate: float,
    conditions: dict | None,
    wording: Wording = OF_A_CLAIM,
) -> dict:
    """Split rate ÷ published into factors: a list of changes whose product it is, and one sentence.

    `conditions`: means of the GPU's telemetry in the steady window, as verdict.json shows them. Each row is
    {factor, claimed, observed, change}; `change` is the rate's relative change by this factor alone. What
    the factors leave over (first tokens, prefill) is `unexplained`.
    """
    rows = [_row("concurrency", claimed.streams, observed.streams, observed.streams / claimed.streams)]
    if claimed.acceptance and observed.acceptance:
        rows.append(
            _row("acceptance", claimed.acceptance, observed.acceptance, observed.acceptance / claimed.acceptance)
        )
    if claimed.step_s and observed.step_s:
        ours, theirs = observed.step_s * 1e3, claimed.step_s * 1e3
        rows.append(_row("step_time_ms", theirs, ours, theirs / ours))
    if not claimed.acceptance and observed.streams:
        theirs, ours = published / claimed.streams, rate / observed.streams
        rows.append(_row("tok_s_per_stream", theirs, ours, ours / theirs))
    product = 1.0
    for row in rows:
        product *= 1 + row["change"]
    total = rate / published
    return {
        "difference": total - 1,
        "factors": rows,
        "unexplained": total / product - 1 if product else None,
        "text": _sentence(rows, total - 1, observed, claimed, conditions, wording),
    }


def _row(factor: str, claimed: float, observed: float, ratio: float) -> dict:
    return {"factor": factor, "claimed": claimed, "observed": observed, "change": ratio - 1}


def _sentence(
    rows: list[dict], total: float, observed: Factors, claimed: Factors, conditions: dict | None, wording: Wording
) -> str:
    """Name the factors that pull the way the rate went, the strongest first; a word on those that don't."""
    named = sorted((row for row in rows if abs(row["change"]) >= NOT_WORTH_NAMING), key=lambda row: row["change"])
    named = named if total < 0 else named[::-1]
    words = [f"{_words(row, conditions)} ({row['change']:+.1%})" for row in named]
    alike = [row["factor"].removesuffix("_ms").replace("_", " ") for row in rows if row not in named]
    if alike:
        words.append(f"{' and '.join(alike)} {wording.alike}")
    if not claimed.acceptance:
        here = f" (here {observed.acceptance:.2f})" if observed.acceptance else ""
        words.append(f"{wording.states_no} acceptance length{here}, so acceptance and step time can't be told apart")
    elif any(value is None for value in (observed.acceptance, observed.step_s)):
        words.append("the server's draft counters are missing, so acceptance and step time can't be told apart")
    side = "below" if total < 0 else "above"
    return f"{abs(total):.1%} {side}: {'; '.join(words)}"


def _words(row: dict, conditions: dict | None) -> str:
    claimed, observed = row["claimed"], row["observed"]
    if row["factor"] == "concurrency":
        return f"concurrency {observed:.0f} of {claimed:.0f}"
    if row["factor"] == "acceptance":
        return f"acceptance {observed:.2f} against {claimed:.2f}"
    if row["factor"] == "tok_s_per_stream":
        return f"{observed:.1f} tok/s a stream against {claimed:.1f}{_clocks(conditions)}"
    digits = 0 if min(claimed, observed) >= 20 else 2
    return f"step {claimed:.{digits}f} → {observed:.{digits}f} ms{_clocks(conditions)}"


def _clocks(conditions: dict | None) -> str:
    """Clocks, power and throttling beside a step time, where there is telemetry of a GPU."""
    if not conditions:
        return ""
    said = []
    if conditions.get("sm_clock_mhz") is not None:
        said.append(f"at {conditions['sm_clock_mhz']:,.0f} MHz")
    if conditions.get("power_w") is not None:
        said.append(f"{conditions['power_w']:,.0f} W")
    busy = conditions.get("utilisation_pct")
    idle = busy is not None and busy < GPU_IDLE_PCT
    if idle:
        said.append(f"busy {busy:.0f}% of the time")
    throttle = {} if idle else conditions.get("throttle") or {}  # what caps a GPU now and then isn't why it is idle
    said += [word for name, word in THROTTLE_WORDS.items() if throttle.get(name, 0) >= THROTTLED_SHARE]
    return f" {', '.join(said)}" if said else ""
