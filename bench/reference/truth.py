"""Room bench: what the reference engine really did, step by step, on CLOCK_MONOTONIC."""

import math

STEADY_SHARE = 0.98


class Truth:
    """One entry a step: when it began and ended (s), the tokens it gave, the requests in flight during it."""

    def __init__(self) -> None:
        """Nothing done yet."""
        self.begin_s: list[float] = []
        self.end_s: list[float] = []
        self.tokens: list[int] = []
        self.in_flight: list[int] = []
        self.drafts: list[int] = []
        self.accepted: list[int] = []

    def add(self, begin_s: float, end_s: float, tokens: int, in_flight: int, drafts: int, accepted: int) -> None:
        """Record a step."""
        self.begin_s.append(begin_s)
        self.end_s.append(end_s)
        self.tokens.append(tokens)
        self.in_flight.append(in_flight)
        self.drafts.append(drafts)
        self.accepted.append(accepted)

    def steady_tok_s(self, concurrency: int, since_s: float = 0.0) -> float | None:
        """Tokens/s from the first to the last step with at least 98% of `concurrency` in flight.

        None where no step since `since_s` had as many. Tokens are counted, not estimated: this is the truth
        that an estimate from the client's side is held against.
        """
        wanted = math.ceil(STEADY_SHARE * concurrency)
        full = [i for i, level in enumerate(self.in_flight) if level >= wanted and self.begin_s[i] >= since_s]
        if not full:
            return None
        first, last = full[0], full[-1]
        return sum(self.tokens[first : last + 1]) / (self.end_s[last] - self.begin_s[first])

    def acceptance_length(self, since_s: float = 0.0) -> float | None:
        """1 + accepted/drafts of the steps since `since_s`; None where nothing was drafted."""
        chosen = [i for i, begin in enumerate(self.begin_s) if begin >= since_s]
        drafts = sum(self.drafts[i] for i in chosen)
        return 1 + sum(self.accepted[i] for i in chosen) / drafts if drafts else None

    def as_dict(self, concurrency: int | None = None, since_s: float = 0.0) -> dict:
        """The answer of /truth: totals, rate and the timeline of steps that began at or after `since_s`."""
        chosen = [i for i, begin in enumerate(self.begin_s) if begin >= since_s]
        streams = concurrency or max((self.in_flight[i] for i in chosen), default=1)
        columns = ("begin_s", "end_s", "tokens", "in_flight", "drafts", "accepted")
        return {
            "clock": "CLOCK_MONOTONIC",
            "concurrency": streams,
            "steady_tok_s": self.steady_tok_s(streams, since_s),
            "acceptance_length": self.acceptance_length(since_s),
            "tokens": sum(self.tokens[i] for i in chosen),
            "steps": {name: [getattr(self, name)[i] for i in chosen] for name in columns},
        }
