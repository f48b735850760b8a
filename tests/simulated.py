"""A closed loop against the reference engine in simulated time: the arrays and counters a real run would give, at once."""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.counters import Sample, parse_metrics, series_of
from bench.load import compact
from bench.reference.engine import Engine, Request, Settings
from bench.reference.faults import Fault
from bench.reference.metrics import exposition
from bench.sampler import pauses_s

LOOP = "ab" * 5000


@dataclass
class Stream:
    """What the load client notes of one request."""

    start_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    output_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class Simulated:
    """A window's raw arrays, its counters.json, and the engine with its truth; `died`: the engine ended in it."""

    arrays: dict[str, np.ndarray]
    counters: dict
    engine: Engine
    began_s: float
    died: bool


def simulate(
    settings: Settings,
    concurrency: int,
    prompts: int,
    input_len: int,
    output_len: int,
    faults: Sequence[Fault] = (),
    think_s: float = 0.0004,
    seed: int = 0,
    begin_s: float = 1000.0,
) -> Simulated:
    """Run one window: `concurrency` streams, a new request `think_s` (s) after the one before it has ended.

    Chunks reach the client up to 2 ms late. Without error the client behaves like `vllm bench serve`.
    """
    engine = Engine(settings, faults)
    die = next((fault for fault in faults if fault.kind == "die"), None)
    rng = random.Random(seed)
    noise = "".join(rng.choices("abcdefghij ", k=20_000))
    streams: dict[Request, Stream] = {}
    done: list[Stream] = []
    arrivals = [(begin_s + rng.uniform(0, 0.002), number) for number in range(min(concurrency, prompts))]
    heapq.heapify(arrivals)
    queued, samples = len(arrivals), []
    before, pauses = _look(engine, begin_s), pauses_s()
    now, next_look, died = begin_s, begin_s, False
    while arrivals or not engine.idle:
        if engine.idle:
            now = max(now, arrivals[0][0])
        end = now + engine.step_s()
        while arrivals and arrivals[0][0] <= end:
            at, _ = heapq.heappop(arrivals)
            request = engine.submit(input_len, output_len, at)
            stream = Stream(at)
            done.append(stream)
            if request is None:
                stream.error = "Service Unavailable"
                if queued < prompts:
                    heapq.heappush(arrivals, (at + 0.001, queued))
                    queued += 1
                continue
            streams[request] = stream
        while next_look <= end:
            samples.append(_look(engine, next_look))
            next_look += next(pauses)
        for chunk in engine.step(now, end):
            stream = streams[chunk.request]
            if chunk.finish != "error":
                _receive(stream, chunk.request, chunk.tokens, end + rng.uniform(0.0002, 0.002), noise)
            if chunk.finish:
                del streams[chunk.request]
                _close(stream, chunk.request, chunk.finish)
                if queued < prompts:
                    heapq.heappush(arrivals, (stream.last_s + think_s, queued))
                    queued += 1
        now = end
        if die and engine.submitted > die.after:
            died = True
            break
    after = _look(engine, now)
    record = {
        "before": before.counters,
        "after": after.counters,
        "series": series_of(samples),
        "host": {"boot": "a", "dockerd": "b"},
        "log_lines": None,
    }
    return Simulated(compact(_result(done)), record, engine, begin_s, died)


def _look(engine: Engine, now: float) -> Sample:
    if engine.active("metrics-outage"):
        return Sample(now, None, {})
    counters, gauges = parse_metrics(exposition(engine, "m").decode())
    return Sample(now, counters, gauges)


def _receive(stream: Stream, request: Request, tokens: int, at: float, noise: str) -> None:
    if stream.first_s:
        stream.gaps.append(at - stream.last_s)
    else:
        stream.first_s = at
    stream.last_s = at
    begin = len(stream.text)
    source = LOOP if request.loops else noise[request.index * 37 % 10_000 :]
    stream.text += source[begin : begin + tokens]


def _close(stream: Stream, request: Request, reason: str) -> None:
    stream.prompt_tokens = request.prompt_tokens
    # Without the usage event of a stream that broke, the client counts the text's tokens: one a letter here.
    stream.output_tokens = len(stream.text) if reason == "error" else request.emitted


def _result(done: list[Stream]) -> dict:
    return {
        "start_times": [stream.start_s for stream in done],
        "ttfts": [stream.first_s - stream.start_s if stream.first_s else 0.0 for stream in done],
        "latencies": [stream.last_s - stream.start_s if stream.first_s else 0.0 for stream in done],
        "input_lens": [stream.prompt_tokens for stream in done],
        "output_lens": [stream.output_tokens for stream in done],
        "itls": [stream.gaps for stream in done],
        "errors": [stream.error for stream in done],
        "generated_texts": [stream.text for stream in done],
    }
