"""Room bench: the faults that the reference server can be told to have. Each belongs to one guard."""

import re
from dataclasses import dataclass

from images.errors import UsageProblem

# Every fault, what it does, and how many requests (or steps) it takes where nothing is said; None: all of them.
FAULTS: dict[str, tuple[str, int | None]] = {
    "error-event": ("a stream ends half-way in an error event, with status 200", 1),
    "short-output": ("a request ends after three quarters of its tokens, for its length", 1),
    "extra-tokens": ("a request gets one token more than it asked for", 1),
    "uncounted-tokens": ("the engine generates 2% more tokens than it reports to the client", None),
    "straggler": ("a request gets a token in every third step only", 1),
    "prefix-hits": ("a tenth of the prompt tokens come from the prefix cache", None),
    "chat-template": ("every prompt is counted with 9 tokens of a template around it", None),
    "refuse": ("requests are refused with status 503", None),
    "reset": ("the connection is reset before a byte of the answer", 1),
    "die": ("the server ends, at once", None),
    "slow-start": ("steps take three times as long, for 100 steps", 100),
    "cold-jit": ("one step takes the stall time longer, as a kernel is compiled", 1),
    "preempt": ("a running request loses its place for 20 steps", 2),
    "counter-reset": ("all counters begin at zero again, once", 1),
    "metrics-outage": ("/metrics answers 503", None),
    "repetition": ("the text is a loop, and every draft is accepted", None),
    "hidden-queue": ("requests wait half a second before the engine counts them as waiting", None),
}
PATTERN = re.compile(r"(?P<kind>[a-z-]+)(@(?P<after>\d+)(\+(?P<count>\d+))?)?")


@dataclass(frozen=True)
class Fault:
    """A fault from the request number `after` (from 0) on, for `count` requests or steps (None: to the end)."""

    kind: str
    after: int = 0
    count: int | None = None

    def takes(self, index: int) -> bool:
        """Whether the request of this index is taken."""
        return index >= self.after and (self.count is None or index < self.after + self.count)


def parse_fault(text: str) -> Fault:
    """Read NAME[@AFTER[+COUNT]], such as straggler@40+1.

    Raises UsageProblem naming the known faults.
    """
    match = PATTERN.fullmatch(text)
    if not match or match["kind"] not in FAULTS:
        raise UsageProblem(f"--fault {text!r}: wanted NAME[@AFTER[+COUNT]] with one of {', '.join(FAULTS)}")
    count = int(match["count"]) if match["count"] else FAULTS[match["kind"]][1]
    return Fault(match["kind"], int(match["after"] or 0), count)
