"""Room bench: asks an engine about many items, and notices one that has ended, or lives and gives no token any more."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx

from bench.counters import FINISHED, Sample, read_sample
from images.errors import EngineProblem
from recipes.run.fetch import fetch

STALL_S = 120
BLIND_FACTOR = 8  # a server that is well but shows no counters gets so many times longer
POLL_S = 1
TOKENS = "generation_tokens_total"
KEPT_S = 2  # an idle connection; vLLM's server closes one after 5 s, perhaps just as it is used again
BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError)  # the connection did, no status and no timeout


Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Watch:
    """Watches a server while a load runs. `finished` is how many requests it has completed since.

    `look` gives the newest look at /metrics, where somebody else looks already; else this looks itself.
    """

    def __init__(
        self,
        url: str,
        alive: Callable[[], bool],
        stall_s: float = STALL_S,
        look: Callable[[], Sample] | None = None,
    ) -> None:
        """Begin to watch; a server whose counters can't be read counts as giving no token."""
        self.finished = 0
        self._url, self._alive, self._stall_s = url, alive, stall_s
        self._look_at = look or (lambda: read_sample(url, time.monotonic()))
        self._tokens, self._at_start = self._look()
        self._progress = self._looked = time.monotonic()

    def check(self) -> None:
        """Look again, at most once a second.

        Raises EngineProblem when the engine has ended, or gave no token for `stall_s` seconds. Where /metrics
        can't be read but /health is well, nothing is known of tokens: that alone ends nothing for 8 times as long.
        """
        if not self._alive():
            raise EngineProblem("the engine ended")
        now = time.monotonic()
        if now - self._looked < POLL_S:
            return
        tokens, finished = self._look()
        now = self._looked = time.monotonic()
        if tokens is not None and tokens != self._tokens:
            self._tokens, self._progress = tokens, now
            self.finished = max(0, finished - self._at_start)
        silent_s = now - self._progress
        if silent_s > self._stall_s and (
            tokens is not None or silent_s > BLIND_FACTOR * self._stall_s or not self._healthy()
        ):
            raise EngineProblem(f"the engine is stuck: no token for {self._stall_s:g} s")

    def _healthy(self) -> bool:
        try:
            return fetch(f"{self._url}/health", 5).status_code == 200
        except EngineProblem:
            return False

    def _look(self) -> tuple[float | None, int]:
        counters = self._look_at().counters
        if counters is None:
            return None, 0
        finished = sum(value for name, value in counters.items() if name.startswith(FINISHED))
        return counters.get(TOKENS), int(finished)


def ask_all(
    url: str,
    items: list[Item],
    concurrency: int,
    ask: Callable[[httpx.AsyncClient, Item], Awaitable[Answer]],
    watch: Watch,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[Answer]:
    """Ask a server about every item, `concurrency` at a time; the answers in the items' order.

    Raises what `ask` raises, and EngineProblem when the engine ends or is stuck; nothing is left running.
    """
    return asyncio.run(_ask_all(url, items, concurrency, ask, watch, progress))


async def _ask_all(
    url: str,
    items: list[Item],
    concurrency: int,
    ask: Callable[[httpx.AsyncClient, Item], Awaitable[Answer]],
    watch: Watch,
    progress: Callable[[int, int], None],
) -> list[Answer]:
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency, keepalive_expiry=KEPT_S)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:  # noqa: S113

        async def one(item: Item) -> Answer:
            async with gate:
                return await ask(client, item)

        work = [asyncio.create_task(one(item)) for item in items]
        try:
            pending = set(work)
            while pending:
                done, pending = await asyncio.wait(pending, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
                await asyncio.to_thread(watch.check)
                progress(len(items) - len(pending), len(items))
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
    return [task.result() for task in work]


async def post(client: httpx.AsyncClient, path: str, body: dict) -> httpx.Response:
    """POST `body` as JSON; once more where the connection broke before the head of the answer was there.

    A server closes an idle connection as it is used again, and a burst of new ones may be reset. To send twice is
    harmless: these requests change nothing in the server but its counters, and nobody measures them; at temperature 0
    both would get one answer. The second goes over a connection of its own: the client's others are as old as the one
    that broke. Raises the second's httpx.TransportError, saying so; what broke within an answer is not sent again, nor
    what isn't encoded as it says (httpx.DecodingError). All of them are httpx.RequestError.
    """
    try:
        answer = await client.send(client.build_request("POST", path, json=body), stream=True)
    except BROKEN:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=client.timeout, trust_env=False) as fresh:
            try:
                return await fresh.post(path, json=body)
            except httpx.TransportError as error:
                raise type(error)(f"{error}, sent twice".removeprefix(", ")) from error
    try:
        await answer.aread()
    finally:
        await answer.aclose()
    return answer
