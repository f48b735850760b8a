"""Room bench: do the engine's decode steps fit into its CUDA graphs? From the recipe and the engine's log. Pure."""

import re
from dataclasses import dataclass

from bench.evidence import Evidence

LARGEST = re.compile(r"'max_cudagraph_capture_size': (\d+)")  # of the configuration that vLLM logs as it starts


@dataclass(frozen=True)
class GraphFit:
    """The largest CUDA graph that an engine captures, and a decode step with every stream in flight, both in tokens.

    vLLM 0.32 captures graphs of up to 512 tokens where nothing else is asked, of 1,024 on Blackwell (compute
    capability 10.x). A larger step runs without one: Python launches every kernel of the model by itself.
    """

    largest: int
    streams: int
    tokens_a_stream: int

    @property
    def step(self) -> int:
        """Tokens of a decode step: each stream's next one and its drafts."""
        return self.streams * self.tokens_a_stream

    @property
    def said(self) -> str | None:
        """What is wrong, and the way out; None where a step fits."""
        if self.step <= self.largest:
            return None
        return (
            f"a decode step of {self.streams} streams has {self.step:,} tokens, and the largest CUDA graph of the "
            f"engine {self.largest:,}: every kernel of such a step is launched by itself, which the host pays for. "
            f"--max-cudagraph-capture-size {self.step} makes room"
        )


def graph_fit(evidence: Evidence) -> GraphFit | None:
    """Whether steps fit; None where the log doesn't tell, or the engine uses no graphs."""
    told = {int(size) for boot in evidence.boots for size in LARGEST.findall(boot.log or "")}
    if len(told) != 1 or told == {0}:
        return None
    flags, streams = evidence.recipe.engine.flags, evidence.recipe.benchmark.concurrency
    drafts = flags.get("speculative-config")
    tokens = 1 + (drafts.get("num_speculative_tokens") or 0) if isinstance(drafts, dict) else 1
    return GraphFit(told.pop(), min(streams, flags.get("max-num-seqs") or streams), tokens)
