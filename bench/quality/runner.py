"""Room bench: asks a suite's items at temperature 0, and returns every prompt, expectation and answer."""

from collections.abc import Callable
from dataclasses import asdict

import httpx

from bench.quality.suites import STOP, Item
from bench.watch import Watch, ask_all, post
from images.errors import EngineProblem

SPARE_TOKENS = 8

Progress = Callable[[int, int], None]


def ask_suite(
    url: str, model: str, items: list[Item], concurrency: int, watch: Watch, progress: Progress
) -> list[dict]:
    """Ask every item and return it with what was got: {id, task, prompt, expected, got, exact}.

    A request whose connection broke before its answer began is sent once more. Raises EngineProblem when a request
    fails or isn't answered with text: a suite with holes is no suite.
    """

    async def ask(client: httpx.AsyncClient, item: Item) -> dict:
        # An answer longer than the right one is wrong already: a few tokens more show that.
        limit = len(item.expected) + SPARE_TOKENS
        body = {"model": model, "prompt": item.prompt, "temperature": 0, "stop": [STOP], "max_tokens": limit}
        try:
            answer = await post(client, "/v1/completions", body)
            answer.raise_for_status()
            got = answer.json()["choices"][0]["text"]
            got.encode()  # text that can't be written down is no answer
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise EngineProblem(f"quality suite: item {item.id} was not answered: {error!r}"[:300]) from error
        return {**asdict(item), "got": got, "exact": got == item.expected}

    return ask_all(url, items, concurrency, ask, watch, progress)
