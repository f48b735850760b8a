"""Room bench: what voids a number. One guard a cause, each with observed value, limit, unit and source."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from bench.analyse import succeeded
from bench.evidence import Evidence, Window
from bench.quality.suites import suite_items

PREFIX_HITS_LIMIT = 0.01


@dataclass(frozen=True)
class Guard:
    """One guard's finding. `ok` is None where the evidence it needs isn't there: it can't check."""

    id: str
    ok: bool | None
    observed: str | float | None
    limit: str | float
    unit: str
    source: str
    waived: str | None = None

    @property
    def voids(self) -> bool:
        """Whether this finding voids the run."""
        return self.ok is False and self.waived is None


def run_guards(evidence: Evidence) -> list[Guard]:
    """Every guard's finding for a run, waivers of the recipe applied."""
    waivers = {waiver.guard: waiver.reason for waiver in evidence.recipe.proof.waive}
    findings = [guard for check in CHECKS for guard in check(evidence)]
    return [Guard(**{**asdict(guard), "waived": waivers.get(guard.id)}) for guard in findings]


def _seal(evidence: Evidence) -> Iterator[Guard]:
    faults = evidence.seal_faults
    yield Guard("seal", not faults, "; ".join(faults[:5]) or "intact", "intact", "", "SHA256SUMS of the run")


def _finished(evidence: Evidence) -> Iterator[Guard]:
    wanted = evidence.manifest.planned_windows
    failure = evidence.manifest.failure
    got = len(evidence.windows)
    said = f"{failure.stage}: {failure.cause}" if failure else f"{got} of {wanted} windows"
    ok = failure is None and got == wanted
    yield Guard("finished", ok, said, f"{wanted} of {wanted} windows", "", "manifest.json")


def _completed(evidence: Evidence) -> Iterator[Guard]:
    wanted = evidence.recipe.benchmark.prompts
    worst = _worst(evidence, lambda window: float(succeeded(window.arrays).sum()), min)
    yield Guard("completed", None if worst is None else worst == wanted, worst, wanted, "requests", "load client")


def _no_errors(evidence: Evidence) -> Iterator[Guard]:
    errors = [error for window in evidence.windows for error in window.arrays["error"] if error]
    said = f"{len(errors)}: {errors[0]}" if errors else "0"
    ok = not errors if evidence.windows else None
    yield Guard("client_errors", ok, said, "0", "errors", "load client")


def _finish_counters(evidence: Evidence) -> Iterator[Guard]:
    """A stream that ends in an error event counts as success in the client: the server knows better."""
    wanted = evidence.recipe.benchmark.prompts
    worst = _worst(evidence, lambda window: _count(window, "request_success_total{finished_reason=length}"), min)
    ok = None if worst is None else worst == wanted
    yield Guard("finish_counters", ok, worst, wanted, "requests", "vllm:request_success_total{finished_reason=length}")


def _output_lengths(evidence: Evidence) -> Iterator[Guard]:
    wanted = evidence.recipe.benchmark.output_len
    wrong = _worst(evidence, lambda window: float((window.arrays["output_tokens"] != wanted).sum()), max)
    ok = None if wrong is None else wrong == 0
    yield Guard("output_lengths", ok, wrong, 0, f"requests not of {wanted} tokens", "usage.completion_tokens")


def _generation_tokens(evidence: Evidence) -> Iterator[Guard]:
    def gap(window: Window) -> float | None:
        counted = _count(window, "generation_tokens_total")
        client = float(window.arrays["output_tokens"].sum())
        return None if counted is None else abs(counted - client) / max(client, 1)

    worst = _worst(evidence, gap, max)
    ok = None if worst is None else worst <= 0.005
    yield Guard(
        "generation_tokens",
        ok,
        worst,
        0.005,
        "share the server's count is off",
        "vllm:generation_tokens_total",
    )


def _prompt_tokens(evidence: Evidence) -> Iterator[Guard]:
    load = evidence.recipe.benchmark
    wanted = load.input_len * load.prompts
    off = _worst(evidence, lambda window: _off(_count(window, "prompt_tokens_total"), wanted), max)
    ok = None if off is None else off == 0
    yield Guard("prompt_tokens", ok, off, 0, f"tokens off {wanted}", "vllm:prompt_tokens_total")


def _prefix_hits(evidence: Evidence) -> Iterator[Guard]:
    def share(window: Window) -> float | None:
        hits, queries = (_count(window, f"prefix_cache_{name}_total") for name in ("hits", "queries"))
        return None if hits is None else hits / queries if queries else 0.0

    worst = _worst(evidence, share, max)
    ok = None if worst is None else worst <= PREFIX_HITS_LIMIT
    yield Guard("prefix_hits", ok, worst, PREFIX_HITS_LIMIT, "share of queries", "vllm:prefix_cache_hits_total")


def _preemptions(evidence: Evidence) -> Iterator[Guard]:
    worst = _worst(evidence, lambda window: _count(window, "num_preemptions_total"), max)
    yield Guard(
        "preemptions",
        None if worst is None else worst == 0,
        worst,
        0,
        "preemptions",
        "vllm:num_preemptions_total",
    )


def _counters_grow(evidence: Evidence) -> Iterator[Guard]:
    def fallen(window: Window) -> float | None:
        return None if window.counted is None else float(sum(value < 0 for value in window.counted.values()))

    worst = _worst(evidence, fallen, max)
    yield Guard("same_server", None if worst is None else worst == 0, worst, 0, "counters that fell", "/metrics")


def _engine_version(evidence: Evidence) -> Iterator[Guard]:
    engine = evidence.recipe.engine
    allowed = [engine.version, *engine.substitutes]
    seen = sorted(set(evidence.manifest.engine.answered))
    ok = None if not seen else len(seen) == 1 and seen[0] in allowed
    yield Guard("engine_version", ok, ", ".join(seen) or None, " or ".join(allowed), "", "/version")


def _live_settings(evidence: Evidence) -> Iterator[Guard]:
    for name, pick in (("live_argv", lambda boot: boot.argv), ("live_env", lambda boot: boot.env)):
        states = [(boot.number, pick(boot)) for boot in evidence.boots if pick(boot) and pick(boot).live]
        measured = {window.boot for window in evidence.windows} if not evidence.manifest.foreign else set()
        unrecorded = sorted(measured - {number for number, _ in states})
        if unrecorded:
            yield Guard(name, False, f"not recorded on boot {unrecorded}", "equal", "", "boots/<n> of the run")
            continue
        differing = [number for number, state in states if state.live != state.rendered]
        ok = not differing if states else None
        said = f"differs on boot {differing}" if differing else "equal" if states else None
        yield Guard(name, ok, said, "equal", "", "/proc of the engine's process against the rendered spec")


def _log_proof(evidence: Evidence) -> Iterator[Guard]:
    proof = evidence.recipe.proof
    if not proof.must_log and not proof.must_not_log:
        return
    wrong = []
    logs = [boot for boot in evidence.boots if boot.log is not None]
    for boot in logs:
        wrong += [f"boot {boot.number} lacks {text!r}" for text in proof.must_log if text not in boot.log]
        wrong += [f"boot {boot.number} says {text!r}" for text in proof.must_not_log if text in boot.log]
    ok = not wrong if logs else None
    yield Guard(
        "log_proof",
        ok,
        "; ".join(wrong) or ("as declared" if logs else None),
        "as declared",
        "",
        "server log, recipe's proof",
    )


def _quality_complete(evidence: Evidence) -> Iterator[Guard]:
    quality = evidence.recipe.quality
    if quality is None:
        return
    for suite in quality.suites:
        wanted = [item.id for item in suite_items(suite, quality.seed, quality.items)]
        got = [answer["id"] for answer in evidence.quality.get(suite, [])]
        ok = None if evidence.manifest.imported else got == wanted
        yield Guard("quality_complete", ok, len(got), len(wanted), "items", f"quality/{suite}.jsonl")


def _worst(
    evidence: Evidence, figure: Callable[[Window], float | None], pick: Callable[[list[float]], float]
) -> float | None:
    found = [figure(window) for window in evidence.windows]
    if not found or any(value is None or not np.isfinite(value) for value in found):
        return None
    return pick([value for value in found if value is not None])


def _count(window: Window, name: str) -> float | None:
    return None if window.counted is None else window.counted.get(name)


def _off(value: float | None, wanted: float) -> float | None:
    return None if value is None else abs(value - wanted)


CHECKS = (
    _seal,
    _finished,
    _completed,
    _no_errors,
    _finish_counters,
    _output_lengths,
    _generation_tokens,
    _prompt_tokens,
    _prefix_hits,
    _preemptions,
    _counters_grow,
    _engine_version,
    _live_settings,
    _log_proof,
    _quality_complete,
)
