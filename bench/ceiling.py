"""Room bench: measures what one load client can do on this machine, against the reference server."""

import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.analyse import Arrays, chunk_spans, steady_bounds
from bench.ceilings import SCHEMA, cpu_of
from bench.clients import Running, StartClient, start_client
from bench.load import run_window
from bench.prompts import load_tokenizer, make_prompts
from bench.record import REPOSITORY, now
from bench.telemetry.sampler import Sampler, Watched
from bench.telemetry.window import window_figures
from images.command import tail
from images.console import emit_json, out, stage, table
from images.declaration import declaration
from images.engine import Engine, ensure_engine
from images.errors import EngineProblem, UsageProblem
from images.given import given_engine, require_interpreter
from recipes.load import Loaded
from recipes.run.fetch import fetch
from recipes.run.supervised import base_environment, supervised
from recipes.schema import Benchmark

MODEL = "reference"
TOKENIZER = REPOSITORY / "recipes" / "library" / "micro" / "model"  # the one that every checkout has
# 3,200 chunks a second: work that a client keeps up with, so that it takes every chunk by itself. At a rate beyond
# its means it takes them in heaps, each cheaper and all of them late: that would flatter it.
STREAMS, OUTPUT_LEN, STEP_MS, WAVES = 64, 128, 20, 6
SATURATED = 0.9
HEAP_US, HEAPS_LIMIT = 200, 0.1
WAIT_LIMIT = 0.25
READY_LIMIT_S = 30


def client_engine(loaded: Loaded, python: str | None, paths: Sequence[str]) -> Engine:
    """The engine whose load client is measured: the recipe's own, or the one behind an interpreter.

    Raises UsageProblem for an engine that runs in a container only: its client there has no ceiling.
    """
    name = loaded.recipe.engine.image
    require_interpreter(python, paths)
    if python:
        return given_engine(name, python, paths)
    if declaration(name).disk_gb is None:
        raise UsageProblem(
            f"the {name} engine of {loaded.recipe.id} runs in a container, and what one client can do is measured "
            "outside of it: name an interpreter that has the engine, --engine-python PYTHON"
        )
    return ensure_engine(name, loaded.wheels)


def measure_ceiling(engine: Engine, machine: dict, start: StartClient = start_client) -> dict:
    """Let one client load the reference server, and see what each chunk costs it.

    Returns the mapping that goes to machine.json as client_ceiling: `achieved_chunks_per_s` is what arrived in
    the steady window, `client_share` the client's share of a core in it, and `chunks_per_s` the ceiling: what a
    whole core allows at that cost a chunk. Raises EngineProblem, also when the machine was too busy with other
    work: a client that waits for a core takes its chunks in heaps, and its cost says nothing then.
    """
    load = Benchmark(
        prompt_source="task-stream",
        input_len=32,
        output_len=OUTPUT_LEN,
        concurrency=STREAMS,
        prompts=WAVES * STREAMS,
        temperature=0,
        seed=1,
    )
    prompts = make_prompts(load, load_tokenizer(TOKENIZER), load.seed, load.prompts)
    port = _free_port()
    command = [sys.executable, "-m", "bench.reference_server", "--port", str(port), "--model", MODEL]
    command += ["--step-ms", str(STEP_MS), "--prefill-ms", "1", "--tokenizer", str(TOKENIZER / "tokenizer.json")]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="station-recipes-")))
        environment = {**base_environment(), "PYTHONPATH": str(REPOSITORY)}
        server = stack.enter_context(supervised(command, environment, folder / "server.log"))
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, server)
        watched = [Watched("server", 0, server.processes)]

        def watch(running: list[Running]) -> None:
            watched.extend(Watched("client", index, client.processes) for index, client in enumerate(running))

        sampler = Sampler([], lambda: list(watched), "not needed")
        sampler.start()
        try:
            with stage(f"measuring what one load client can do, {load.prompts} requests") as update:
                applied = run_window(
                    engine,
                    url,
                    MODEL,
                    TOKENIZER,
                    load,
                    prompts,
                    server.alive,
                    progress=_said(update),
                    on_start=watch,
                    start=start,
                )
        finally:
            telemetry = sampler.stop()
    bounds = steady_bounds(applied.arrays, STREAMS)
    if bounds is None:
        raise EngineProblem(f"the reference server was never under full load; try again on an idle machine\n{url}")
    figures = window_figures(telemetry, bounds)
    if not figures.client_share:
        raise EngineProblem("the load client's CPU time could not be read from /proc")
    found = ceiling_of(applied.arrays, bounds, figures.client_share)
    refuse_crowded(found, figures.client_wait_share)
    return found | {
        "schema": SCHEMA,
        "engine": f"{engine.name}-{engine.identity}",
        "measured": now(),
        "cpu": cpu_of(machine),
        "client_wait_share": None if figures.client_wait_share is None else round(figures.client_wait_share, 3),
        "streams": STREAMS,
        "output_len": OUTPUT_LEN,
    }


def refuse_crowded(found: dict, wait_share: float | None) -> None:
    """Raise EngineProblem where other work kept the client from its core: its cost a chunk means nothing then."""
    if found["limited_by"] == "client" or (found["heaps"] <= HEAPS_LIMIT and (wait_share or 0.0) <= WAIT_LIMIT):
        return
    waited = "an unknown share" if wait_share is None else f"{wait_share:.0%}"
    raise EngineProblem(
        f"the machine was busy with other work: the client had {found['client_share']:.0%} of a core, waited for one "
        f"{waited} of the time, and took {found['heaps']:.0%} of its chunks in heaps. Nothing was kept; try again "
        "when the machine is idle"
    )


def ceiling_of(arrays: Arrays, bounds: tuple[float, float], client_share: float) -> dict:
    """The ceiling's figures from a window's chunks and the client's mean share of a core in `bounds`. Pure.

    `limited_by`: the client, where it had no time left, else the server. `heaps` is the share of chunks that
    came in one go with the one before.
    """
    arrivals = chunk_spans(arrays)[1]
    seconds = bounds[1] - bounds[0]
    achieved = float(np.sum((arrivals > bounds[0]) & (arrivals <= bounds[1])) / seconds)
    saturated = client_share >= SATURATED
    return {
        "chunks_per_s": round(achieved if saturated else achieved / client_share, 1),
        "achieved_chunks_per_s": round(achieved, 1),
        "cpu_us_per_chunk": round(client_share / achieved * 1e6, 2),
        "client_share": round(client_share, 3),
        "heaps": round(float(np.mean(arrays["gaps_us"] < HEAP_US)), 4),
        "limited_by": "client" if saturated else "server",
    }


def print_ceiling(found: dict, file: Path, as_json: bool) -> None:
    """Print a ceiling, and where it is kept."""
    if as_json:
        emit_json(found)
        return
    rows = [
        (
            "one client process can take",
            f"{found['chunks_per_s']:,.0f} chunks/s ({found['cpu_us_per_chunk']:.0f} µs each)",
        ),
        ("seen", f"{found['achieved_chunks_per_s']:,.0f} chunks/s at {found['client_share']:.0%} of a core"),
        ("limited by", found["limited_by"]),
        ("engine", found["engine"]),
        ("kept in", str(file)),
    ]
    out().print(table("Load client's ceiling", ("", ""), rows))


def _said(update: Callable) -> Callable[[int, int], None]:
    return lambda done, total: update(f"{done}/{total} requests", done, total)


def _wait_ready(url: str, server: Running) -> None:
    deadline = time.monotonic() + READY_LIMIT_S
    while True:
        try:
            if fetch(f"{url}/health", 5).status_code == 200:
                return
        except EngineProblem:
            pass
        if not server.alive() or time.monotonic() > deadline:
            raise EngineProblem(f"the reference server did not start:\n{tail(server.log)}")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
