"""Room bench: the guard on the course of a window: was the engine warm, or did it compile and speed up in it."""

import re
from collections.abc import Iterator

import numpy as np

from bench.analyse import chunk_spans, succeeded
from bench.evidence import Evidence, Window
from bench.guards.guard import Guard

# What vLLM's JIT monitor, Triton's autotuner and FlashInfer's autotuner write.
COMPILES = re.compile(
    r"(?:compilation|autotun\w+) during inference|Triton autotuning for function|\[Autotuner\]|Building JIT",
    re.IGNORECASE,
)
SILENCE_SHARE = 0.01  # a pause that costs less than 1% of the window isn't worth a run
SILENCE_FACTOR = 5  # pauses that recur (prefills) are how the engine works
RECURS = 10
HEAD_SHARE = 0.2
HEAD_FACTOR = 1.25


def cold_engine(evidence: Evidence) -> Iterator[Guard]:
    """Nothing was compiled or tuned inside a window.

    Three signs: the server's log says so between the window's begin and end; no stream got anything for a
    time that is over 1% of the window and five times the tenth longest pause (while all of them wait for their
    first token: five times the median TTFT); the median gap between chunks in the first fifth of the window is
    a quarter longer than in the rest.
    """
    found, logged = [], {boot.number for boot in evidence.boots if boot.log is not None}
    for window in evidence.windows:
        name = f"boot {window.boot} window {window.number}"
        found += [f"{name}: {sign}" for sign in (*_logged(evidence, window), *_paused(window), *_slow_head(window))]
    unlogged = not evidence.manifest.foreign and {window.boot for window in evidence.windows} - logged
    ok = False if found else None if unlogged or not evidence.windows else True
    said = "; ".join(found[:3]) or ("warm" if ok else None)
    yield Guard("cold_engine", ok, said, "warm", "", "server log, load client", scope="timing")


def _logged(evidence: Evidence, window: Window) -> Iterator[str]:
    lines = window.record.log_lines if window.record else None
    log = next((boot.log for boot in evidence.boots if boot.number == window.boot), None)
    if not lines or log is None:
        return
    during = log.split("\n")[lines.before : lines.after]
    hits = [line for line in during if COMPILES.search(line)]
    if hits:
        yield f"{len(hits)} lines of the log tell of compiling, the first: {hits[0].strip()[:120]}"


def _paused(window: Window) -> Iterator[str]:
    good = succeeded(window.arrays)
    if good.sum() < 2:
        return
    begin, end, _ = chunk_spans(window.arrays)
    arrivals = np.sort(end)
    pauses = np.diff(arrivals)
    least = SILENCE_SHARE * float(arrivals[-1] - window.arrays["start_s"][good].min())
    usual = float(np.median(window.arrays["ttft_s"][good]))
    recurring = float(np.sort(pauses)[-min(RECURS, len(pauses))]) if len(pauses) else 0.0
    # Before the first token, and where every stream waits for its first, a pause is a prefill: held against the TTFT.
    first = float(arrivals[0] - begin.min())
    if first > max(least, SILENCE_FACTOR * usual):
        yield f"the first token came after {first:.3g} s, where the median TTFT is {usual:.3g} s"
    decoding = np.arange(len(begin)) >= good.sum()  # chunk_spans gives every request's first chunk first
    for place in np.argsort(pauses)[::-1][:RECURS]:
        since, until = arrivals[place], arrivals[place + 1]
        midway = bool((decoding & (begin <= since) & (end >= until)).any())
        usual_pause = recurring if midway else max(recurring, usual)
        if until - since > max(least, SILENCE_FACTOR * usual_pause):
            yield f"no stream got a token for {until - since:.3g} s, where {usual_pause:.3g} s is usual"
            return


def _slow_head(window: Window) -> Iterator[str]:
    begin, end, _ = chunk_spans(window.arrays)
    gaps = end - begin
    later = np.ones(len(gaps), bool)
    later[: int(succeeded(window.arrays).sum())] = False  # first chunks end a prefill
    gaps, end = gaps[later], end[later]
    if len(gaps) < 100:
        return
    edge = end.min() + HEAD_SHARE * (end.max() - end.min())
    head, rest = float(np.median(gaps[end <= edge])), float(np.median(gaps[end > edge]))
    if head > HEAD_FACTOR * rest:
        yield f"the median chunk gap is {head * 1e3:.3g} ms in the first fifth and {rest * 1e3:.3g} ms after it"
