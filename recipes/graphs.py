"""Room recipes: do an engine's decode steps fit into its CUDA graphs? Pure."""

from dataclasses import dataclass

from recipes.schema import Recipe

GRID = 16  # tokens from one of vLLM's CUDA graphs to the next, of 256 tokens and more


@dataclass(frozen=True)
class GraphFit:
    """The largest CUDA graph that an engine captures, in tokens, and a decode step with every stream in flight.

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
    def room(self) -> int:
        """A --max-cudagraph-capture-size with which vLLM 0.32 has a graph as large as such a step.

        It captures multiples of 16 up to what is asked (of 8 below 256) and truncates what is asked to the last of
        them. Its first model runner rounds each up to a multiple of a stream's tokens too, and drops what then is
        larger (vllm/config/vllm.py: _set_cudagraph_sizes; compilation.py: adjust_cudagraph_sizes_for_spec_decode).
        """
        grid = -(-self.step // GRID) * GRID
        return grid if grid % self.tokens_a_stream == 0 else -(-(grid + self.tokens_a_stream - 1) // GRID) * GRID

    @property
    def said(self) -> str | None:
        """What is wrong, and the way out; None where a step fits."""
        if self.step <= self.largest:
            return None
        return (
            f"a decode step of {self.streams} streams has {self.step:,} tokens, and the largest CUDA graph of the "
            f"engine {self.largest:,}: every kernel of such a step is launched by itself, which the host pays for. "
            f"--max-cudagraph-capture-size {self.room} makes room"
        )


def streams_at_once(recipe: Recipe) -> int:
    """How many streams of its load a recipe lets the engine serve at once."""
    streams, most = recipe.benchmark.concurrency, recipe.engine.flags.get("max-num-seqs")
    return min(streams, most) if isinstance(most, int) and most > 0 else streams


def graph_fit(recipe: Recipe, largest: object) -> GraphFit | None:
    """Whether steps of a recipe's load fit into graphs of up to `largest` tokens.

    None where that isn't known (no whole number), or the engine uses no graphs (0).
    """
    if not isinstance(largest, int) or not largest:
        return None
    config = recipe.engine.flags.get("speculative-config")
    drafts = config.get("num_speculative_tokens") if isinstance(config, dict) else None
    return GraphFit(largest, streams_at_once(recipe), 1 + (drafts if isinstance(drafts, int) else 0))
