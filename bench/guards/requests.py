"""Room bench: guards on the requests, as the load client saw them."""

from collections.abc import Iterator

import numpy as np

from bench.analyse import succeeded
from bench.evidence import Evidence, Window
from bench.guards.guard import Guard, none, worst
from bench.saturation import dispatch_share

STRAGGLER_LIMIT = 2.0
LOOP_LIMIT = 0.05
DISPATCH_LIMIT = 0.05


def completed(evidence: Evidence) -> Iterator[Guard]:
    """Every request succeeded: the client exits with 0 when all of them failed."""
    wanted = evidence.recipe.benchmark.prompts
    ok, least = worst(evidence, lambda window: float(succeeded(window.arrays).sum()), lambda got: got == wanted, min)
    yield Guard("completed", ok, least, wanted, "requests", "load client")


def no_errors(evidence: Evidence) -> Iterator[Guard]:
    """The client noted no error."""
    errors = [error for window in evidence.windows for error in window.arrays["error"] if error]
    said = f"{len(errors)}: {errors[0]}" if errors else "0"
    ok = not errors if evidence.windows else None
    yield Guard("client_errors", ok, said, "0", "errors", "load client")


def output_lengths(evidence: Evidence) -> Iterator[Guard]:
    """Every output has the length that was asked for."""
    wanted = evidence.recipe.benchmark.output_len
    ok, wrong = worst(evidence, lambda window: float((window.arrays["output_tokens"] != wanted).sum()), none)
    yield Guard("output_lengths", ok, wrong, 0, f"requests not of {wanted} tokens", "usage.completion_tokens")


def straggler(evidence: Evidence) -> Iterator[Guard]:
    """No request took more than twice the median: one alone can lower a whole-run rate by a sixth."""

    def ratio(window: Window) -> float | None:
        e2e = window.arrays["e2e_s"][succeeded(window.arrays)]
        return float(e2e.max() / np.median(e2e)) if len(e2e) else None

    ok, most = worst(evidence, ratio, lambda most: most <= STRAGGLER_LIMIT)
    yield Guard(
        "straggler", ok, most, STRAGGLER_LIMIT, "longest E2E ÷ median", "load client", scope="timing", rule="at most"
    )


def degenerate_text(evidence: Evidence) -> Iterator[Guard]:
    """The outputs are no repetition loops, which are drafted far better than real text."""

    def share(window: Window) -> float | None:
        looping = window.arrays.get("looping")
        return float(looping.mean()) if looping is not None and len(looping) else None

    ok, most = worst(evidence, share, lambda most: most <= LOOP_LIMIT)
    yield Guard(
        "degenerate_text", ok, most, LOOP_LIMIT, "share of outputs that loop", "load client's texts", rule="at most"
    )


def dispatch_delay(evidence: Evidence) -> Iterator[Guard]:
    """A stream's next request leaves soon after the one before it ended: else the client is the limit."""

    def share(window: Window) -> float | None:
        return dispatch_share(window.arrays) if len(window.arrays["start_s"]) else None

    ok, most = worst(evidence, share, lambda most: most <= DISPATCH_LIMIT)
    source = "load client: mean from a stream's end to its next start"
    yield Guard(
        "dispatch_delay", ok, most, DISPATCH_LIMIT, "share of the median TTFT", source, scope="timing", rule="at most"
    )
