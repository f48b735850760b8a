"""Room bench: the reference engine's counters in the words of vLLM's /metrics."""

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from bench.counters import E2E
from bench.reference.engine import Engine

# How a counter with a label of its own is named in Engine.counters, and what vLLM calls the label.
LABELS = {"request_success": "finished_reason", "spec_decode_num_accepted_tokens_per_pos": "position"}


class EngineMetrics:
    """A Prometheus collector over an engine."""

    def __init__(self, engine: Engine, model: str) -> None:
        """Collect from `engine`; every sample carries vLLM's labels engine and model_name."""
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        """Every counter and gauge, as vLLM names them."""
        families: dict[str, CounterMetricFamily] = {}
        for key, value in self._engine.counters.items():
            name, _, label = key.partition(":")
            labels = ["engine", "model_name", *([LABELS[name]] if label else [])]
            if name not in families:
                families[name] = CounterMetricFamily(f"vllm:{name}", name, labels=labels)
            families[name].add_metric(["0", self._model, *([label] if label else [])], value)
        yield from families.values()
        count, total = self._engine.e2e
        e2e = HistogramMetricFamily(f"vllm:{E2E}", E2E, labels=["engine", "model_name"])
        e2e.add_metric(["0", self._model], [("+Inf", count)], total)
        yield e2e
        for name, value in self._engine.gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", name, labels=["engine", "model_name"])
            gauge.add_metric(["0", self._model], value)
            yield gauge


def exposition(engine: Engine, model: str) -> bytes:
    """The text of /metrics."""
    return generate_latest(EngineMetrics(engine, model))
