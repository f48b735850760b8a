"""Room bench: one window, measured where the server is: load, counters and telemetry around it, kept in a folder."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.arrays import save_window
from bench.continuity import host_identity
from bench.counters import Counters, read_counters, series_of
from bench.load import run_window
from bench.observe import observed
from bench.runfolder import dump_rows, write_text
from bench.sampler import CounterSampler
from images.engine import Engine
from images.errors import EngineProblem
from recipes.run.fetch import fetch
from recipes.schema import Benchmark

LAST_BREATH_S = 5
LAST_LOOK_S = 30

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Target:
    """A server to be measured: one of ours with log and processes, or one at a URL of which we know less."""

    url: str
    model: str
    alive: Callable[[], bool]
    log: Path | None = None
    processes: Callable[[], list[int]] | None = None


@dataclass(frozen=True)
class Order:
    """What a window needs beside its server, in plain values: they may travel into a container.

    `gpus` are UUIDs to watch, or none and `no_gpu` says why; `clients` is how many processes send the load.
    """

    tokenizer: Path
    load: Benchmark
    prompts: list[str]
    clients: int
    gpus: list[str]
    no_gpu: str | None


@dataclass(frozen=True)
class Sent:
    """How a window's load was sent: streams and prompts of each client process, and how far apart they began."""

    streams: list[int]
    prompts: list[int]
    start_skew_s: float


def measure_window(order: Order, target: Target, engine: Engine, folder: Path, progress: Progress) -> Sent:
    """Measure one window and write client.npz, counters.json and telemetry.npz into `folder`.

    Raises EngineProblem when the engine or a client ends without a result.
    """
    before = read_counters(target.url)
    log_before = log_lines(target)
    started = time.monotonic()
    watching = observed(order.gpus, order.no_gpu, target.processes, folder)
    with CounterSampler(target.url) as sampler, watching as watch_clients:
        applied = run_window(
            engine,
            target.url,
            target.model,
            order.tokenizer,
            order.load,
            order.prompts,
            target.alive,
            order.clients,
            progress=progress,
            on_start=watch_clients,
            look=sampler.latest,
        )
    save_window(folder, applied.arrays)
    refuse_dead(target)
    record = {
        "before": before,
        "after": _last_look(target),
        # Around the client's whole life, its start included; the requests' own times are in client.npz.
        "clock": {"client_started_s": round(started, 3), "client_ended_s": round(time.monotonic(), 3)},
        "series": series_of(sampler.samples),
        "host": host_identity(),
        "log_lines": {"before": log_before, "after": log_lines(target)} if log_before is not None else None,
    }
    write_text(folder / "counters.json", dump_rows(record))
    return Sent(applied.streams, applied.prompts, applied.start_skew_s)


def _last_look(target: Target) -> Counters | None:
    """The counters after a window; None when a server that lives doesn't show them: a guard says so, no run ends."""
    deadline = time.monotonic() + LAST_LOOK_S
    while True:
        try:
            return read_counters(target.url)
        except EngineProblem:
            if time.monotonic() > deadline or not target.alive():
                return None
            time.sleep(1)


def log_lines(target: Target) -> int | None:
    """How many lines the server's log has now; None where the log isn't ours to see."""
    if target.log is None or not target.log.exists():
        return None
    return target.log.read_text(errors="replace").count("\n")  # as the log is read when it is stored


def refuse_dead(target: Target) -> None:
    """Raise EngineProblem if the engine has ended, or ends now: its last process takes a moment to notice."""
    deadline = time.monotonic() + LAST_BREATH_S
    while target.alive() and not answers(target.url):
        if time.monotonic() > deadline:
            raise EngineProblem("the engine no longer answers on /health")
        time.sleep(0.2)
    if not target.alive():
        raise EngineProblem("the engine ended during the window")


def answers(url: str) -> bool:
    """Whether a server answers on /health."""
    try:
        return fetch(f"{url}/health", 5).status_code == 200
    except EngineProblem:
        return False
