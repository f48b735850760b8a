"""Room bench: prompts of exact length, made by us from a seed and verified with the model's tokenizer."""

import hashlib
import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from images.errors import EngineProblem
from recipes.library.micro.training.streams import HELD_OUT, stream
from recipes.schema import Benchmark

ATTEMPTS = 50


def window_seed(seed: int, boot: int, window: int) -> int:
    """The seed of a window (boot, window from 1), or of a boot's warm-up (window 0): never the same twice."""
    digest = hashlib.sha256(f"{seed}/{boot}/{window}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


def load_tokenizer(model: Path) -> Tokenizer:
    """Load the model's tokenizer.

    Raises EngineProblem when the file is missing or isn't a tokenizer.
    """
    file = model / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every cause
        raise EngineProblem(f"{file}: can't be used as a tokenizer: {error}") from error


def make_prompts(load: Benchmark, tokenizer: Tokenizer, seed: int, count: int) -> list[str]:
    """Return `count` different prompts, each exactly `load.input_len` tokens long when encoded again.

    Raises EngineProblem when the tokenizer can't give such prompts.
    """
    choices = _plain_tokens(tokenizer) if load.prompt_source == "random-text" else []
    prompts: dict[str, None] = {}
    index = misses = 0
    while len(prompts) < count and misses < ATTEMPTS:
        rng = random.Random(f"{seed}/{index}")  # noqa: S311 (reproducible, not secret)
        text = _random_text(load.input_len, tokenizer, choices, rng) if choices else _task_stream(load.input_len, rng)
        exact = text is not None and text not in prompts and len(tokenizer.encode(text).ids) == load.input_len
        if exact:
            prompts[text] = None
        misses = 0 if exact else misses + 1
        index += 1
    if len(prompts) < count:
        raise EngineProblem(
            f"could make only {len(prompts)} of {count} prompts that encode to exactly {load.input_len} tokens "
            f"({load.prompt_source}): does the model folder hold the recipe's tokenizer?"
        )
    return list(prompts)


def _task_stream(length: int, rng: random.Random) -> str:
    return stream(rng.getrandbits(48), length, HELD_OUT)


def _plain_tokens(tokenizer: Tokenizer) -> list[int]:
    """Every token of a text: none that was added to the vocabulary."""
    special = set(tokenizer.get_added_tokens_decoder())
    return [token for token in range(tokenizer.get_vocab_size()) if token not in special]


def _random_text(length: int, tokenizer: Tokenizer, choices: list[int], rng: random.Random) -> str | None:
    """Random tokens as text; merging tokenizers need a few rounds until the text encodes to the length."""
    ids = rng.choices(choices, k=length)
    for _ in range(ATTEMPTS):
        text = tokenizer.decode(ids, skip_special_tokens=False)
        again = tokenizer.encode(text).ids
        if len(again) == length:
            return text
        ids = (again + rng.choices(choices, k=length))[:length]
    return None


def as_jsonl(prompts: list[str], output_len: int) -> str:
    """The prompts as the load engine's custom data set reads them."""
    return "".join(json.dumps({"prompt": text, "output_tokens": output_len}) + "\n" for text in prompts)


def digest(jsonl: str) -> str:
    """The sha256 that goes into the run's prompts.sha256."""
    return hashlib.sha256(jsonl.encode()).hexdigest()
