"""Prompts are exact, different, and the same on every machine."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.prompts import as_jsonl, digest, load_tokenizer, make_prompts, window_seed
from images.errors import EngineProblem
from recipes.load import LIBRARY, load_recipe
from tests.runs import recipe

MICRO = LIBRARY / "micro" / "model"


def merging_tokenizer() -> Tokenizer:
    """A byte-pair tokenizer that merges, so that random tokens rarely encode back to themselves."""
    letters = [chr(code) for code in range(97, 123)]
    pairs = [(a, b) for a in letters for b in letters if (ord(a) + ord(b)) % 3 == 0]
    vocabulary = {text: index for index, text in enumerate(letters + [a + b for a, b in pairs])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.mark.parametrize("source", ["random-text", "task-stream"])
def test_micro_prompts_encode_to_exactly_the_asked_length(source: str):
    tokenizer = load_tokenizer(MICRO)
    load = recipe(benchmark={"prompt_source": source, "input_len": 200}).benchmark
    prompts = make_prompts(load, tokenizer, 7, 50)
    assert len(set(prompts)) == 50
    assert {len(tokenizer.encode(text).ids) for text in prompts} == {200}
    assert {tokenizer.decode(tokenizer.encode(text).ids) for text in prompts} == set(prompts)
    assert prompts == make_prompts(load, tokenizer, 7, 50), "a seed gives the same prompts"


def test_a_merging_tokenizer_gets_exact_prompts_too():
    tokenizer = merging_tokenizer()
    load = recipe(benchmark={"input_len": 128}).benchmark
    prompts = make_prompts(load, tokenizer, 1, 30)
    assert {len(tokenizer.encode(text).ids) for text in prompts} == {128}


def test_no_window_shares_a_prompt_with_another_or_with_the_warm_up():
    load = load_recipe("micro").recipe.benchmark
    tokenizer = load_tokenizer(MICRO)
    sets = [
        set(make_prompts(load, tokenizer, window_seed(load.seed, boot, window), 40))
        for boot in (1, 2)
        for window in (0, 1)
    ]
    assert len(set.union(*sets)) == 160


def test_a_tokenizer_that_cannot_give_the_length_is_an_error_and_not_an_endless_search(tmp_path):
    lossy = Tokenizer(models.WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(EngineProblem, match="exactly 64 tokens"):
        make_prompts(recipe().benchmark, lossy, 1, 5)
    with pytest.raises(EngineProblem, match="tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_text_that_encodes_to_another_length_is_never_sent():
    load = recipe(benchmark={"prompt_source": "task-stream"}).benchmark
    with pytest.raises(EngineProblem, match="could make only 0 of 5 prompts"):
        make_prompts(load, merging_tokenizer(), 1, 5)


def test_the_jsonl_is_what_its_digest_says():
    text = as_jsonl(['a "quoted"\nline', "b"], 32)
    assert [json.loads(line)["output_tokens"] for line in text.splitlines()] == [32, 32]
    assert json.loads(text.splitlines()[0])["prompt"] == 'a "quoted"\nline'
    assert digest(text) != digest(text + " ")
