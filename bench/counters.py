"""Room bench: the server's own counters, read from /metrics; differences over a window, and their course in it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from images.errors import EngineProblem
from recipes.run.fetch import LIMIT_S, fetch

PREFIX = "vllm:"
FINISHED = "request_success_total"
E2E = "e2e_request_latency_seconds"  # a histogram, of which the sum and the count are kept
# The columns of a series: what they are called in counters.json, and what the engine calls them.
COUNTED = {
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "generation_tokens_total",
    "preemptions": "num_preemptions_total",
    "prefix_queries": "prefix_cache_queries_total",
    "prefix_hits": "prefix_cache_hits_total",
    "drafts": "spec_decode_num_drafts_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "finished": FINISHED,
}
GAUGED = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv_cache_usage": "kv_cache_usage_perc",
}
COLUMNS = (*COUNTED, *GAUGED)

Counters = dict[str, float]
Gauges = dict[str, float]


@dataclass(frozen=True)
class Sample:
    """One look at /metrics at `t_s` (CLOCK_MONOTONIC); counters None: it could not be read."""

    t_s: float
    counters: Counters | None
    gauges: Gauges


@dataclass(frozen=True)
class Series:
    """The course of a window: `t_s` (S,), ascending, and one (S,) column a name of COLUMNS; NaN is not known."""

    t_s: np.ndarray
    columns: Mapping[str, np.ndarray]


def read_sample(url: str, now: float, limit_s: float = LIMIT_S) -> Sample:
    """Look at /metrics; a look that fails within `limit_s` seconds is a sample without counters."""
    try:
        counters, gauges = parse_metrics(fetch(f"{url}/metrics", limit_s).text)
    except (EngineProblem, ValueError):
        return Sample(now, None, {})
    return Sample(now, counters or None, gauges)


def read_counters(url: str) -> Counters:
    """Read every vLLM counter: name, with the labels that matter, to value.

    Raises EngineProblem when the server doesn't answer or answers without vLLM's counters.
    """
    try:
        answer = fetch(f"{url}/metrics")
        counters = parse_counters(answer.text)
    except (EngineProblem, ValueError) as error:
        raise EngineProblem(f"the server's counters could not be read: {error}") from error
    if answer.status_code != 200:
        raise EngineProblem(f"{url}/metrics answered with status {answer.status_code}")
    if not counters:
        raise EngineProblem(f"{url}/metrics has no counter that begins with {PREFIX}: this is no vLLM server")
    return counters


def parse_counters(text: str) -> Counters:
    """Sum each counter over engines and models; other labels stay in the name, as name{label=value}."""
    return parse_metrics(text)[0]


def parse_metrics(text: str) -> tuple[Counters, Gauges]:
    """Counters as in parse_counters, and the gauges named in GAUGED, likewise summed over engines.

    The sum and the count of the histogram E2E are counters as well. A gauge is only ever a picture of its
    moment, and vLLM draws it at a step's end: in a long prefill it shows who ran before, not who waits.
    """
    counters: Counters = {}
    gauges: Gauges = {}
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix(PREFIX)
        if family.name == name or family.type not in {"counter", "gauge", "histogram"}:
            continue
        for sample in family.samples:
            if not math.isfinite(sample.value):
                continue
            kept = sample.name in {f"{PREFIX}{E2E}_sum", f"{PREFIX}{E2E}_count"}
            if kept or (family.type == "counter" and sample.name.endswith("_total")):
                key = _key(sample.name, sample.labels)
                counters[key] = counters.get(key, 0.0) + sample.value
            elif family.type == "gauge" and name in GAUGED.values():
                gauges[name] = gauges.get(name, 0.0) + sample.value
    return counters, gauges


def _key(name: str, labels: Mapping[str, str]) -> str:
    told = {key: value for key, value in labels.items() if key not in {"engine", "model_name"}}
    suffix = ",".join(f"{key}={told[key]}" for key in sorted(told))
    return name.removeprefix(PREFIX) + (f"{{{suffix}}}" if suffix else "")


def series_of(samples: Iterable[Sample]) -> dict[str, list[float | None]]:
    """Samples as the lists that stand in counters.json: `t_s` and COLUMNS, None where not known."""
    rows = sorted(samples, key=lambda sample: sample.t_s)
    lists: dict[str, list[float | None]] = {"t_s": [round(sample.t_s, 3) for sample in rows]}
    for column, name in COUNTED.items():
        lists[column] = [_total(sample.counters, name) for sample in rows]
    for column, name in GAUGED.items():
        lists[column] = [_plain(sample.gauges.get(name)) if sample.counters is not None else None for sample in rows]
    return lists


def _total(counters: Counters | None, name: str) -> float | None:
    """A counter, summed over its labels: requests finish for several reasons."""
    found = [value for key, value in (counters or {}).items() if key.partition("{")[0] == name]
    return _plain(sum(found)) if found else None


def _plain(value: float | None) -> float | None:
    return value if value is None else int(value) if float(value).is_integer() else round(value, 4)


def as_series(lists: Mapping[str, list[float | None]]) -> Series:
    """What series_of made, as arrays.

    Raises ValueError when a list is missing, the lengths differ, or the times don't ascend.
    """
    arrays = {name: np.asarray([np.nan if v is None else v for v in lists[name]], float) for name in lists}
    missing = [name for name in ("t_s", *COLUMNS) if name not in arrays]
    if missing or len({len(array) for array in arrays.values()}) != 1:
        raise ValueError(f"the series' lists don't agree, or lack {', '.join(missing) or 'nothing'}")
    times = arrays.pop("t_s")
    if not np.isfinite(times).all() or (np.diff(times) < 0).any():
        raise ValueError("the series' times don't ascend")
    return Series(times, arrays)


def difference(before: Counters, after: Counters) -> Counters:
    """What was counted in between. Negative where a counter was reset: the server restarted."""
    return {name: after[name] - before.get(name, 0.0) for name in after}


def falls(series: Series) -> int:
    """How many columns of counters fell at some moment: a counter that falls was reset, whatever it reached later."""
    known = [series.columns[name][np.isfinite(series.columns[name])] for name in COUNTED]
    return sum(bool((np.diff(values) < 0).any()) for values in known)


def acceptance_length(delta: Counters) -> float | None:
    """AL = 1 + accepted/drafts over the window; None without speculative decoding."""
    drafts = delta.get("spec_decode_num_drafts_total")
    accepted = delta.get("spec_decode_num_accepted_tokens_total")
    if not drafts or accepted is None:
        return None
    return 1 + accepted / drafts


def prefix_hit_share(delta: Counters) -> float | None:
    """Prefix-cache hits ÷ queries, in tokens; 0 where nothing was asked, None where it isn't counted."""
    hits, queries = (delta.get(f"prefix_cache_{name}_total") for name in ("hits", "queries"))
    return None if hits is None else hits / queries if queries else 0.0


def mean_e2e_s(delta: Counters) -> float | None:
    """The server's own mean E2E latency (s) of the requests that finished in between; None where it isn't told."""
    total, count = (delta.get(f"{E2E}_{part}") for part in ("sum", "count"))
    return total / count if total is not None and count else None
