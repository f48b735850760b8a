"""The micro tasks: their answers are right, the split is clean, streams are exact."""

import json
import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.prompts import load_tokenizer
from recipes.library.micro.training.streams import (
    HELD_OUT,
    TASKS,
    TRAIN,
    held_out,
    instances,
    recall_of,
    split_of,
    stream,
)
from recipes.load import LIBRARY


def solved(task: str, prompt: str) -> str:
    """The right answer, worked out here without the generator's help."""
    content = prompt.removeprefix(f"{task} ")[:-1]
    if task == "add":
        return str(sum(int(number) for number in content.split("+")))
    if task == "copy":
        return content
    if task == "reverse":
        return "".join(reversed(content))
    if task == "sort":
        return " ".join(str(number) for number in sorted(int(part) for part in content.split()))
    assert task == "recall"
    text, asked = content.rsplit("?", 1)
    pairs = dict(part.split("=") for part in text.split() if "=" in part)
    assert 2 <= len(pairs) <= 64
    return " ".join(f"{key}={pairs[key]}" for key in asked.split())


@pytest.mark.parametrize("task", [task for task in TASKS if task != "toolcall"])
def test_every_held_out_answer_is_right(task):
    items = held_out(task, 5, 200)
    assert len({item.prompt for item in items}) == 200
    for item in items:
        assert item.answer == solved(task, item.prompt) + "\n"


def test_a_tool_call_is_json_whose_every_value_stands_in_the_sentence():
    for item in held_out("toolcall", 5, 200):
        call = json.loads(item.answer)
        assert set(call) == {"tool", "args"}
        for value in call["args"].values():
            assert str(value) in item.prompt


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_a_stream_holds_only_instances_of_its_own_side(split):
    lines = instances(3, split)
    for _ in range(300):
        assert split_of(next(lines).prompt) == split


def test_no_held_out_prompt_is_ever_trained_on():
    assert {split_of(item.prompt) for task in TASKS for item in held_out(task, 11, 50)} == {HELD_OUT}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**48), st.integers(1, 3000))
def test_a_stream_is_exact_repeatable_and_one_token_a_character(seed, length):
    text = stream(seed, length, HELD_OUT)
    assert len(text) == length
    assert text == stream(seed, length, HELD_OUT)
    tokenizer = load_tokenizer(LIBRARY / "micro" / "model")
    ids = tokenizer.encode(text).ids
    assert len(ids) == length
    assert tokenizer.decode(ids) == text


def test_recall_spreads_up_to_64_pairs_over_up_to_2048_characters():
    items = held_out("recall", 1, 400, longest=2048)
    pairs = [len(re.findall(r"[a-z]{2}=\d\d", item.prompt)) for item in items]
    assert min(pairs) == 2 and max(pairs) >= 60
    prompt, answer = recall_of(Random(1), 2048)
    assert 2030 <= len(prompt + answer) <= 2048
    prompt, _ = recall_of(Random(1), 512, 64)
    assert len(re.findall(r"[a-z]{2}=\d\d", prompt)) == 64
