"""Room bench: asks a suite's items at temperature 0 and keeps every prompt, expectation and answer."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import httpx

from bench.quality.suites import STOP, Item
from bench.runfolder import write_text
from images.errors import EngineProblem

TIMEOUT_S = 600
SPARE_TOKENS = 8

Progress = Callable[[int, int], None]


def ask_suite(url: str, model: str, items: list[Item], concurrency: int, progress: Progress) -> list[dict]:
    """Ask every item and return it with what was got: {id, task, prompt, expected, got, exact}.

    Raises EngineProblem when a request fails: a suite with holes is no suite.
    """
    return asyncio.run(_ask(url, model, items, concurrency, progress))


async def _ask(url: str, model: str, items: list[Item], concurrency: int, progress: Progress) -> list[dict]:
    gate = asyncio.Semaphore(concurrency)
    answers: list[dict] = [{} for _ in items]
    done = 0

    async def one(position: int, client: httpx.AsyncClient) -> None:
        nonlocal done
        item = items[position]
        body = {"model": model, "prompt": item.prompt, "temperature": 0, "stop": [STOP]}
        async with gate:
            # An answer longer than the right one is wrong already: a few tokens more show that.
            answer = await client.post(
                "/v1/completions", json={**body, "max_tokens": len(item.expected) + SPARE_TOKENS}
            )
        answer.raise_for_status()
        got = answer.json()["choices"][0]["text"]
        answers[position] = {**asdict(item), "got": got, "exact": got == item.expected}
        done += 1
        progress(done, len(items))

    try:
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
            await asyncio.gather(*(one(position, client) for position in range(len(items))))
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise EngineProblem(f"quality suite: a request failed after {done} of {len(items)} items: {error}") from error
    return answers


def save_answers(file: Path, answers: list[dict]) -> None:
    """Write quality/<suite>.jsonl: one item a line."""
    write_text(file, "".join(json.dumps(answer, sort_keys=True) + "\n" for answer in answers))
