"""Room recipes: turns the text streams into the micro model's training batches and prompts."""

import argparse
from collections.abc import Iterator

import streams
import torch
from characters import TO_ID, encode
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

PROMPT_WEIGHT = 0.2  # of a prompt character in the loss; answer characters have weight 1


class Streams(IterableDataset):
    """Batches of token ids and loss weights; every row is a fresh training stream."""

    def __init__(self, seed: int, rows: int, length: int) -> None:
        self.seed, self.rows, self.length = seed, rows, length

    def row(self, seed: str) -> tuple[bytes, bytes]:
        ids, answers = bytearray(), bytearray()
        for item in streams.instances(seed, streams.TRAIN):
            ids += (item.prompt + item.answer).encode()
            answers += bytes(len(item.prompt)) + b"\x01" * len(item.answer)
            if len(ids) >= self.length:
                return ids[: self.length].translate(TO_ID), answers[: self.length]
        raise AssertionError("instances() never ends")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        number = 0
        while True:
            rows = [
                self.row(f"{self.seed}/{self.length}/{worker.id if worker else 0}/{number}/{i}")
                for i in range(self.rows)
            ]
            number += 1
            yield tuple(
                torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).view(self.rows, -1)
                for part in zip(*rows, strict=True)
            )


def loader(args: argparse.Namespace, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches on the device: token ids (int64) and loss weights (float32) of each token as a target."""
    data = Streams(args.seed, args.tokens_per_step // length, length)
    options = {"num_workers": args.workers, "batch_size": None, "pin_memory": args.device == "cuda"}
    if args.workers:
        options["prefetch_factor"] = 8
    for batch in DataLoader(data, **options):
        ids, answers = (part.to(args.device, non_blocking=True) for part in batch)
        yield ids.long(), PROMPT_WEIGHT + (1 - PROMPT_WEIGHT) * answers.float()


def stream_prompts(seeds: range, length: int, split: str, device: str) -> Tensor:
    """The first characters of one stream per seed."""
    return torch.tensor([encode(streams.stream(seed, length, split)) for seed in seeds], device=device)
