"""Room recipes: grades the micro model in PyTorch: exact match per task, and acceptance length of its drafts."""

import argparse

import streams
import torch
from batches import stream_prompts
from characters import encode
from nemotron import DRAFTS, Model, greedy


@torch.no_grad()
def exact_match(model: Model, task: str, n: int, device: str) -> float:
    """The share of held-out instances that greedy decoding answers exactly.

    One pass over prompt and answer decides: greedy decoding gives the answer if and only if each of its
    characters is the most likely one after the true characters before it.
    """
    items = streams.held_out(task, 1, n)
    texts = [encode(item.prompt + item.answer) for item in items]
    length = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (length - len(text)) for text in texts], device=device)
    right = model.lm_head(model.hidden(tokens))[:, :-1].argmax(-1) == tokens[:, 1:]
    return (
        sum(
            bool(row[len(item.prompt) - 1 : len(text) - 1].all())
            for row, item, text in zip(right, items, texts, strict=True)
        )
        / n
    )


@torch.no_grad()
def acceptance_length(model: Model, n: int, new: int, device: str) -> dict[str, float]:
    """1 + accepted / drafts on held-out streams, counted as a speculative decoder would, for N = 1 and 3."""
    texts = greedy(model, stream_prompts(range(n), 256, streams.HELD_OUT, device), new)
    starts = torch.arange(texts.shape[1] - DRAFTS - 1, device=device).expand(n, -1)
    first, *later = model.drafts(texts, model.hidden(texts), starts)
    logits = [first[:, : starts.shape[1]], *later]
    guesses = enumerate((x.argmax(-1) for x in logits), 2)
    right = torch.stack([guess == texts.gather(1, starts + ahead) for ahead, guess in guesses], -1)
    accepted = right.long().cumprod(-1).tolist()
    return {f"N={count}": walk(accepted, 255, count) for count in (1, DRAFTS)}


def walk(accepted: list[list[list[int]]], first: int, count: int) -> float:
    """The acceptance length when each round drafts `count` tokens and goes on after those accepted."""
    drafts = total = 0
    for row in accepted:
        position = first
        while position < len(row):
            got = sum(row[position][:count])
            drafts, total, position = drafts + 1, total + got, position + got + 1
    return round(1 + total / drafts, 4)


def evaluate(model: Model, args: argparse.Namespace) -> dict:
    """Exact match per task and acceptance lengths, with the weights as stored, in float32."""
    n, new = (400, 128) if args.steps is None else (4, 8)
    return {
        "exact match": {task: exact_match(model, task, n, args.device) for task in streams.TASKS},
        "instances per task": n,
        "acceptance length": acceptance_length(model, 64 if args.steps is None else 2, new, args.device),
    }
