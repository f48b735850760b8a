"""Room bench: what a guard says, what it voids, and which failure explains which."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np

from bench.evidence import Evidence, Window

Scope = Literal["run", "timing"]
Rule = Literal["at most", "at least", "exactly"]
# Figures that are true however slowly or unevenly the machine ran.
TIMELESS = frozenset({"acceptance_length", "exact_match", "gpu_memory_gb", "quality"})
# What a guard on timing voids besides: memory on a card with others on it is not the engine's alone.
BESIDES = {"gpu_alone": frozenset({"gpu_memory_gb"})}
# Cause → what follows from it by necessity. A verdict names causes; the rest stands beside them.
EXPLAINS: dict[str, frozenset[str]] = {
    "same_server": frozenset(
        {"finish_counters", "generation_tokens", "prompt_tokens", "prefix_hits", "preemptions", "peak", "little"}
    ),
    "completed": frozenset(
        {"client_errors", "finish_counters", "generation_tokens", "prompt_tokens", "output_lengths", "peak", "little"}
    ),
    "finish_counters": frozenset({"output_lengths"}),
    "finished": frozenset({"live_argv", "live_env", "log_proof", "quality_complete"}),
    "peak": frozenset({"little"}),
    "preemptions": frozenset({"straggler"}),
    "cold_engine": frozenset({"straggler"}),
    "gpu_lost": frozenset({"telemetry_gaps"}),
}


@dataclass(frozen=True)
class Guard:
    """One guard's finding. `ok` is None where the evidence it needs isn't there: it can't check.

    `scope` says what a failure voids: the run, or only what was timed in it (a straggler takes nothing from an
    acceptance length). `because` is the guard whose failure explains this one. `rule` says how `observed` is to lie to
    `limit`; verdict.json names one that isn't "exactly".
    """

    id: str
    ok: bool | None
    observed: str | float | None
    limit: str | float
    unit: str
    source: str
    waived: str | None = None
    scope: Scope = "run"
    because: str | None = None
    explains_shortfall: bool = False
    rule: Rule = "exactly"

    @property
    def wanted(self) -> str:
        """The limit with its rule, in words."""
        return _figure(self.limit) if self.rule == "exactly" else f"{self.rule} {_figure(self.limit)}"

    @property
    def failed(self) -> bool:
        """Whether it failed and the recipe doesn't waive it."""
        return self.ok is False and self.waived is None

    @property
    def voids(self) -> bool:
        """Whether this finding voids anything. One that only explains why a figure is low voids nothing."""
        return self.failed and not self.explains_shortfall

    def voids_metric(self, metric: str) -> bool:
        """Whether this finding voids a claim on, or a figure of, `metric`."""
        besides = metric in BESIDES.get(self.id, ())
        return self.voids and (self.scope == "run" or metric not in TIMELESS or besides)

    def as_dict(self, schema: int) -> dict:
        """The entry in verdict.json, for runs of a schema: the first one knew neither scope nor cause."""
        entry = asdict(self)
        del entry["explains_shortfall"]
        if schema < 2:
            del entry["scope"], entry["because"]
        if schema < 2 or self.rule == "exactly":
            del entry["rule"]
        return entry


def roots(guards: list[Guard]) -> list[Guard]:
    """The failed guards that no other failure explains: what a verdict names."""
    return [guard for guard in guards if guard.failed and guard.because is None]


def in_words(guards: list[Guard]) -> list[str]:
    """The failed guards as sentences: causes, each with what follows from it."""
    said = []
    for root in roots(guards):
        follows = sorted({guard.id for guard in guards if guard.failed and guard.because == root.id})
        words = f"{root.id}: {_figure(root.observed)}, wanted {root.wanted} {root.unit}".rstrip()
        said.append(words + (f" (with it: {', '.join(follows)})" if follows else ""))
    return said


def _figure(value: str | float | None) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)


def with_causes(guards: list[Guard]) -> list[Guard]:
    """The same findings, the failed ones that another failure explains marked with it."""
    failed = [guard.id for guard in guards if guard.failed]
    causes = {
        follower: next((cause for cause in EXPLAINS if cause in failed and follower in EXPLAINS[cause]), None)
        for follower in failed
    }
    return [replace(guard, because=causes[guard.id]) if guard.failed else guard for guard in guards]


def span(window: Window) -> tuple[float, float] | None:
    """The first start and the last end (s) of a window's requests; None for one that lasted no time."""
    starts = window.arrays["start_s"]
    if not len(starts):
        return None
    begin, end = float(starts.min()), float((starts + window.arrays["e2e_s"]).max())
    return (begin, end) if end > begin else None


def held(
    values: Sequence[float | None], fits: Callable[[float], bool], pick: Callable[[list[float]], float] = max
) -> tuple[bool | None, float | None]:
    """Whether the worst of what is known fits, and that worst: (ok, observed) of a guard.

    What doesn't fit is a violation, whatever isn't known beside it: then ok is False. Where what is known fits and
    some is not known, or nothing is known, neither can be told: (None, None).
    """
    known = [value for value in values if value is not None and np.isfinite(value)]
    if not known:
        return None, None
    most = pick(known)
    if not fits(most):
        return False, most
    return (True, most) if len(known) == len(values) else (None, None)


def none(count: float) -> bool:
    """Fits where nothing at all may be counted."""
    return count == 0


def worst(
    evidence: Evidence,
    figure: Callable[[Window], float | None],
    fits: Callable[[float], bool],
    pick: Callable[[list[float]], float] = max,
) -> tuple[bool | None, float | None]:
    """Whether the worst of a figure over the windows fits, and that worst, as `held` says it."""
    return held([figure(window) for window in evidence.windows], fits, pick)
