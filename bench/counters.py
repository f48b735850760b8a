"""Room bench: the server's own counters, read from /metrics; differences over a window, never gauges."""

import math

from prometheus_client.parser import text_string_to_metric_families

from images.errors import EngineProblem
from recipes.run.fetch import fetch

PREFIX = "vllm:"

Counters = dict[str, float]


def read_counters(url: str) -> Counters:
    """Read every vLLM counter: name, with the labels that matter, to value.

    Raises EngineProblem when the server doesn't answer or answers without vLLM's counters.
    """
    try:
        counters = parse_counters(fetch(f"{url}/metrics").text)
    except (EngineProblem, ValueError) as error:
        raise EngineProblem(f"the server's counters could not be read: {error}") from error
    if not counters:
        raise EngineProblem(f"{url}/metrics has no counter that begins with {PREFIX}: this is no vLLM server")
    return counters


def parse_counters(text: str) -> Counters:
    """Sum each counter over engines and models; other labels stay in the name, as name{label=value}."""
    counters: Counters = {}
    for family in text_string_to_metric_families(text):
        if family.type != "counter" or not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            if not sample.name.endswith("_total") or not math.isfinite(sample.value):
                continue
            labels = {key: value for key, value in sample.labels.items() if key not in {"engine", "model_name"}}
            suffix = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
            name = sample.name.removeprefix(PREFIX) + (f"{{{suffix}}}" if suffix else "")
            counters[name] = counters.get(name, 0.0) + sample.value
    return counters


def difference(before: Counters, after: Counters) -> Counters:
    """What was counted in between. Negative where a counter was reset: the server restarted."""
    return {name: after[name] - before.get(name, 0.0) for name in after}


def acceptance_length(delta: Counters) -> float | None:
    """AL = 1 + accepted/drafts over the window; None without speculative decoding."""
    drafts = delta.get("spec_decode_num_drafts_total")
    accepted = delta.get("spec_decode_num_accepted_tokens_total")
    if not drafts or accepted is None:
        return None
    return 1 + accepted / drafts


def acceptance_per_position(delta: Counters) -> list[float] | None:
    """Share of drafts whose token at position 1, 2, … was accepted; None without speculative decoding."""
    drafts = delta.get("spec_decode_num_drafts_total")
    if not drafts:
        return None
    name = "spec_decode_num_accepted_tokens_per_pos_total{position="
    positions = sorted((int(key[len(name) : -1]), value) for key, value in delta.items() if key.startswith(name))
    return [value / drafts for _, value in positions]
