"""Asking a server about many items: a connection that breaks before an answer costs nothing, one that always does is said."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from bench.counters import Sample
from bench.load import LoadProblem, warm_up
from bench.quality.runner import ask_suite
from bench.quality.suites import Item
from bench.reference.http import Call, Connection, as_json
from bench.watch import Watch, ask_all, post
from images.errors import EngineProblem
from tests.runs import recipe
from tests.unit.test_reference_server import serving

ITEMS = [Item(f"sort-{number}", "sort", f"sort {number}", "7") for number in range(24)]
ANSWER = as_json({"choices": [{"text": "7"}]})
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"


class Breaking:
    """A server that answers every prompt with 7, unless `fault` has something else in mind for this try of it."""

    def __init__(self, fault: Callable[["Breaking", str, Connection], Callable[[], None] | None]) -> None:
        self.tries: Counter[str] = Counter()
        self.served: Counter[int] = Counter()  # calls by connection
        self.url, self._fault = "", fault
        self._loop, self._kept = asyncio.new_event_loop(), []  # kept: so that no two connections have one id

    def _handle(self, call: Call, connection: Connection) -> None:
        if call.path != "/v1/completions":
            connection.answer(404, b"")
            return
        prompt = json.loads(call.body)["prompt"]
        self.tries[prompt] += 1
        self.served[id(connection)] += 1
        self._kept.append(connection)
        broken = self._fault(self, prompt, connection)
        if broken:
            broken()
        else:
            connection.answer(200, ANSWER)

    async def _begin(self) -> None:
        server = await self._loop.create_server(lambda: Connection(self._handle), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextmanager
def breaking(fault: Callable[[Breaking, str, Connection], Callable[[], None] | None]) -> Iterator[Breaking]:
    """Such a server, in a thread of its own, on any free port."""
    server = Breaking(fault)
    server._loop.run_until_complete(server._begin())
    thread = threading.Thread(target=server._loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server._loop.call_soon_threadsafe(server._loop.stop)
        thread.join(5)


def ask(url: str, items: list[Item] = ITEMS, concurrency: int = 8) -> list[dict]:
    watch = Watch(url, lambda: True, look=lambda: Sample(0.0, {}, {}))
    return ask_suite(url, "reference", items, concurrency, watch, lambda _done, _all: None)


BREAKS = {
    "reset": lambda connection: connection.reset,
    "closed": lambda connection: connection.close,
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_suite_asks_once_more_where_a_connection_breaks_before_the_answer(how):
    def first_of_every_third(server: Breaking, prompt: str, connection: Connection) -> Callable[[], None] | None:
        return BREAKS[how](connection) if server.tries[prompt] == 1 and int(prompt.split()[1]) % 3 == 0 else None

    with breaking(first_of_every_third) as server:
        answers = ask(server.url)
    assert [answer["id"] for answer in answers] == [item.id for item in ITEMS]
    assert all(answer["exact"] for answer in answers)
    assert server.tries == {item.prompt: 2 if number % 3 == 0 else 1 for number, item in enumerate(ITEMS)}


def test_it_asks_on_a_new_connection_since_the_others_may_be_as_stale_as_the_one_that_broke():
    def every_used_one(server: Breaking, _prompt: str, connection: Connection) -> Callable[[], None] | None:
        # Late, so that the other stream's connection is idle by then, and would be taken if any could be.
        late = lambda: server._loop.call_later(0.1, connection.reset)  # noqa: E731
        return late if server.served[id(connection)] > 1 else None

    with breaking(every_used_one) as server:
        assert len(ask(server.url, ITEMS[:3], concurrency=2)) == 3
        assert max(server.served.values()) == 2, "a connection was used again, and broke"


@pytest.mark.parametrize("how", BREAKS)
def test_a_connection_that_always_breaks_is_one_clear_error(how):
    def always(_server: Breaking, prompt: str, connection: Connection) -> Callable[[], None] | None:
        return BREAKS[how](connection) if prompt == "sort 5" else None

    with (
        breaking(always) as server,
        pytest.raises(EngineProblem, match=r"^quality suite: item sort-5 was not answered: Re.*sent twice'\)$"),
    ):
        ask(server.url)
    assert server.tries["sort 5"] == 2


NO_BREAK = {
    "a status of its own": lambda connection: lambda: connection.answer(503, b"{}"),
    "half an answer": lambda connection: lambda: (connection.send(HEAD), connection.reset()),
    "no answer in time": lambda connection: lambda: None,
}


@pytest.mark.parametrize("what", NO_BREAK)
def test_what_is_no_broken_connection_is_not_sent_again(what):
    async def once(url: str) -> int:
        async with httpx.AsyncClient(base_url=url, timeout=0.5, trust_env=False) as client:
            return (await post(client, "/v1/completions", {"prompt": "x"})).status_code

    with breaking(lambda _server, _prompt, connection: NO_BREAK[what](connection)) as server:
        try:
            assert asyncio.run(once(server.url)) == 503 and what == "a status of its own"
        except httpx.TransportError as error:
            assert what != "a status of its own" and "twice" not in str(error)
    assert server.tries == {"x": 1}


def test_an_idle_connection_is_left_before_a_server_would_close_it():
    """vLLM's server closes it after 5 s: a client that keeps it just as long uses it as it is closed."""

    async def ask_late(client: httpx.AsyncClient, item: str) -> int:
        answer = await post(client, "/v1/completions", {"prompt": item})
        await asyncio.sleep(2.5 if item == "a" else 0)
        return answer.status_code

    with breaking(lambda *_: None) as server:
        watch = Watch(server.url, lambda: True, look=lambda: Sample(0.0, {}, {}))
        assert ask_all(server.url, ["a", "b"], 1, ask_late, watch) == [200, 200]
    assert list(server.served.values()) == [1, 1], "each over a connection of its own"


def test_an_answer_that_is_not_encoded_as_it_says_is_one_clear_error():
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}"
    load = recipe(benchmark={"concurrency": 2, "output_len": 4}).benchmark
    with breaking(lambda _server, _prompt, connection: lambda: connection.send(head)) as server:
        watch = Watch(server.url, lambda: True, look=lambda: Sample(0.0, {}, {}))
        with pytest.raises(LoadProblem, match=r"^warm-up: 6 of 6 requests failed; the first: DecodingError "):
            warm_up(server.url, "reference", load, list("abcdef"), watch, lambda _done, _all: None)
        with pytest.raises(EngineProblem, match=r"^quality suite: item sort-\d+ was not answered: DecodingError"):
            ask(server.url)
    assert set(server.tries.values()) == {1}


@pytest.mark.parametrize(("fault", "refused"), [("reset@3", False), ("reset@3+100", True)])
def test_a_warm_up_and_a_suite_meet_a_reset_connection_as_the_reference_server_makes_it(fault, refused):
    load = recipe(benchmark={"concurrency": 2, "output_len": 4}).benchmark
    with serving("--step-ms", "2", "--fault", fault) as (url, _):
        warm = lambda: warm_up(  # noqa: E731
            url, "reference", load, list("abcdef"), Watch(url, lambda: True), lambda _done, _all: None
        )
        if refused:
            with pytest.raises(LoadProblem, match=r"of 6 requests failed; the first: ReadError sent twice$"):
                warm()
            with pytest.raises(EngineProblem, match=r"item sort-\d+ was not answered: ReadError\('sent twice'\)$"):
                ask(url)
        else:
            assert warm() > 0
    if not refused:
        with serving("--step-ms", "2", "--fault", fault) as (url, _):
            assert [len(answer["got"]) for answer in ask(url)] == [9] * len(ITEMS)
