"""Room bench: the load's client processes: how many, who sends what, how they are started, and all at once."""

import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from images.engine import Engine
from images.errors import EngineProblem
from images.index import cache_root
from recipes.run.supervised import base_environment, supervised
from recipes.spec import FIXED_ENV

GATE = Path(__file__).with_name("client_gate.py")
CLIENT_SHARE = 0.5  # of what one client could do: a busier one would answer late, and that would be measured
ASSUMED_CEILING = 5000.0  # chunks/s, where no ceiling was measured: half of what a fast core does
START_LIMIT_S = 600
LEAD_S = 0.3
POLL_S = 0.1


class Running(Protocol):
    """A client at work, a process or a container: whether it lives, how it ended, and its pids on this machine."""

    log: Path

    def alive(self) -> bool:
        """Whether it still runs."""

    def status(self) -> int | None:
        """Its exit status once it has ended."""

    def processes(self) -> list[int]:
        """The pids of the client and of all it started."""


StartClient = Callable[[Engine, list[str], Path], AbstractContextManager[Running]]


def start_client(engine: Engine, arguments: list[str], folder: Path) -> AbstractContextManager[Running]:
    """Start one client: the engine's Python with `arguments`. The only place where one is started.

    Every path in `arguments` lies in `folder` or in its parent, except the tokenizer's; the client writes its
    result into `folder`, and its words into client.log there.
    """
    environment = {**base_environment(), **FIXED_ENV, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    environment |= {"PYTHONUNBUFFERED": "1", "VLLM_CACHE_ROOT": str(cache_root() / "vllm"), **engine.environ()}
    return supervised([str(engine.python), *arguments], environment, folder / "client.log")


class Gate:
    """A folder at which clients wait for each other: see client_gate.py."""

    def __init__(self, folder: Path) -> None:
        """Make a gate in an empty folder."""
        self._folder = folder
        shutil.copy(GATE, folder / GATE.name)

    def arguments(self, index: int) -> list[str]:
        """How a client's command line begins, after its Python."""
        return [str(self._folder / GATE.name), str(self._folder), str(index)]

    def wait_ready(self, clients: list[Running], check: Callable[[], None], ready: Callable[[int], None]) -> None:
        """Wait until every client stands at the gate; calls `check`, which may raise, and `ready(how many)` meanwhile.

        Returns early when a client has ended: whoever looks for its result says so. Raises EngineProblem when
        one isn't ready after START_LIMIT_S.
        """
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            waiting = sum((self._folder / f"ready-{index}").exists() for index in range(len(clients)))
            if waiting == len(clients) or not all(client.alive() for client in clients):
                return
            if time.monotonic() > deadline:
                raise EngineProblem(f"{waiting} of {len(clients)} load clients were ready after {START_LIMIT_S} s")
            check()
            ready(waiting)
            time.sleep(POLL_S)

    def open(self) -> float:
        """Let them begin together; returns the moment, s on CLOCK_MONOTONIC."""
        moment = time.monotonic() + LEAD_S
        partial = self._folder / "go.partial"
        partial.write_text(repr(moment))
        partial.rename(self._folder / "go")
        return moment


def choose_clients(
    expected_chunks_s: float | None, ceiling_chunks_s: float | None, concurrency: int, cores: int | None = None
) -> tuple[int, str]:
    """How many client processes a load needs, and why, in words.

    As many that each has at most half of its ceiling to do, but no more than half the machine's cores, and
    none without a stream.
    """
    cores = cores or os.cpu_count() or 1
    if expected_chunks_s is None:
        return 1, "the rate to expect is unknown: one client"
    ceiling = ceiling_chunks_s or ASSUMED_CEILING
    wanted = max(1, math.ceil(expected_chunks_s / (CLIENT_SHARE * ceiling)))
    chosen = min(wanted, concurrency, max(1, cores // 2))
    known = "measured" if ceiling_chunks_s else "assumed, ./inv ceiling measures it"
    why = f"{expected_chunks_s:.0f} chunks/s expected, a client's ceiling is {ceiling:.0f} ({known})"
    return chosen, why if chosen == wanted else f"{why}; {wanted} wanted, {cores} cores and {concurrency} streams"


def split_streams(concurrency: int, clients: int) -> list[int]:
    """How many streams each client has: as even as it goes, their sum is `concurrency`."""
    return [concurrency // clients + (index < concurrency % clients) for index in range(clients)]


def split_prompts(prompts: list[str], streams: list[int]) -> list[list[str]]:
    """Deal prompts out in proportion to streams: every prompt once, in order, none twice."""
    edges = [round(len(prompts) * part / sum(streams)) for part in _sums(streams)]
    return [prompts[begin:end] for begin, end in zip([0, *edges], edges, strict=False)]


def _sums(values: list[int]) -> list[int]:
    return [sum(values[: index + 1]) for index in range(len(values))]
