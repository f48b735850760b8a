"""Room bench: the load: our own warm-up, then `vllm bench serve` of the pinned engine as load engine."""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from bench.clients import Gate, Running, StartClient, split_prompts, split_streams, start_client
from bench.counters import Counters, Sample, acceptance_length, difference, read_counters
from bench.loops import is_loop
from bench.prompts import as_jsonl
from bench.watch import Watch, ask_all, post
from images.engine import Engine
from images.errors import EngineProblem
from recipes.schema import Benchmark

TEXT_SHARE = 0.01
POLL_S = 0.5

Progress = Callable[[int, int], None]


class LoadProblem(EngineProblem):
    """The load could not be applied: the window has no result."""


@dataclass(frozen=True)
class Applied:
    """A load that was applied: its raw arrays (see `compact` and `merge`), and who sent it.

    One entry a client process: its `streams` and `prompts`. `start_skew_s` is how far apart the first
    requests of the clients were; `began_s` when they were let go (CLOCK_MONOTONIC).
    """

    arrays: dict[str, np.ndarray]
    streams: list[int]
    prompts: list[int]
    start_skew_s: float
    began_s: float


def warm_up(
    url: str, model: str, load: Benchmark, prompts: list[str], watch: Watch, progress: Progress
) -> float | None:
    """Send `prompts` at full concurrency, unmeasured; return the rate to expect, in chunks/s.

    That is C x OSL / mean E2E of the requests that began when the first wave was through, over the
    acceptance length: with drafts a chunk holds several tokens. None where there was no second wave.
    Raises LoadProblem when a request fails: a window after that would measure a broken server.
    """
    body = {"model": model, "max_tokens": load.output_len, "ignore_eos": True, "temperature": load.temperature}
    spans: list[tuple[float, float]] = []

    async def ask(client: httpx.AsyncClient, prompt: str) -> str | None:
        try:
            answer = await post(client, "/v1/completions", {**body, "prompt": prompt})
        except httpx.RequestError as error:
            return f"{type(error).__name__} {error}"
        end = time.monotonic()
        spans.append((end - answer.elapsed.total_seconds(), end))  # of the try that was answered
        return None if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"

    before = _counters(url)
    failures = [failure for failure in ask_all(url, prompts, load.concurrency, ask, watch, progress) if failure]
    if failures:
        raise LoadProblem(f"warm-up: {len(failures)} of {len(prompts)} requests failed; the first: {failures[0]}")
    first_end = min(end for _, end in spans)
    later = [end - began for began, end in spans if began >= first_end]
    if not later:
        return None
    # Without counters a chunk counts as one token: that expects too much rather than too little.
    tokens_a_chunk = acceptance_length(difference(before, _counters(url))) or 1.0
    return load.concurrency * load.output_len / (sum(later) / len(later)) / tokens_a_chunk


def _counters(url: str) -> Counters:
    try:
        return read_counters(url)
    except EngineProblem:
        return {}


def client_arguments(url: str, model: str, tokenizer: Path, load: Benchmark, folder: Path) -> list[str]:
    """The load engine's command line after `vllm`. Every default that would bend the load is stated.

    `folder` holds prompts.jsonl; the result goes there.
    """
    return [
        *("bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", model, "--tokenizer", str(tokenizer)),
        *("--dataset-name", "custom", "--dataset-path", str(folder / "prompts.jsonl")),
        *("--skip-chat-template", "--disable-shuffle", "--custom-output-len", str(load.output_len)),
        *("--num-prompts", str(load.prompts), "--max-concurrency", str(load.concurrency)),
        *("--request-rate", "inf", "--ignore-eos", "--temperature", str(load.temperature)),
        *("--num-warmups", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "result.json"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,95,99"),
    ]


def run_window(
    engine: Engine,
    url: str,
    model: str,
    tokenizer: Path,
    load: Benchmark,
    prompts: list[str],
    alive: Callable[[], bool],
    clients: int = 1,
    progress: Progress = lambda _done, _all: None,
    on_start: Callable[[list[Running]], None] = lambda _running: None,
    start: StartClient = start_client,
    look: Callable[[], Sample] | None = None,
) -> Applied:
    """Apply one measured load by `clients` processes that begin together, and return what they saw.

    `on_start` gets the clients as soon as they run; nothing is sent before all are ready. `look`: see Watch.
    Raises LoadProblem when the engine or a client ends without a result; the message says which.
    """
    streams = split_streams(load.concurrency, clients)
    dealt = split_prompts(prompts, streams)
    with tempfile.TemporaryDirectory(prefix="station-recipes-") as name, ExitStack() as stack:
        gate = Gate(Path(name))
        folders = [Path(name) / str(index) for index in range(clients)]
        running = []
        for index, folder in enumerate(folders):
            folder.mkdir()
            (folder / "prompts.jsonl").write_text(as_jsonl(dealt[index], load.output_len))
            share = load.model_copy(update={"concurrency": streams[index], "prompts": len(dealt[index])})
            arguments = [*gate.arguments(index), *client_arguments(url, model, tokenizer, share, folder)]
            running.append(stack.enter_context(start(engine, arguments, folder)))
        on_start(running)

        def engine_lives() -> None:
            if not alive():
                raise LoadProblem("the engine ended before the window began; the window has no result.")

        gate.wait_ready(running, engine_lives, lambda _ready: progress(0, load.prompts))
        watch = Watch(url, alive, look=look)
        began_s = gate.open()
        _wait(running, watch, alive, lambda: progress(watch.finished, load.prompts))
        parts = [_result(client, folder, alive) for client, folder in zip(running, folders, strict=True)]
    firsts = [float(part["start_s"].min()) for part in parts if len(part["start_s"])]
    skew_s = max(firsts) - min(firsts) if firsts else 0.0
    return Applied(merge(parts), streams, [len(part) for part in dealt], skew_s, began_s)


def _wait(running: list[Running], watch: Watch, alive: Callable[[], bool], progress: Callable[[], None]) -> None:
    """Until every client has ended, one of them without a result, or the engine has ended.

    Raises LoadProblem when the engine is stuck.
    """
    while any(client.alive() for client in running):
        if any(not client.alive() and client.status() for client in running):
            return
        try:
            watch.check()
        except EngineProblem as problem:
            _grant_last_words(lambda: any(client.alive() for client in running))
            if alive():
                raise LoadProblem(str(problem)) from problem
            return
        progress()
        time.sleep(POLL_S)


def _result(client: Running, folder: Path, alive: Callable[[], bool]) -> dict[str, np.ndarray]:
    file = folder / "result.json"
    if not file.exists():
        why = "the engine ended during the window"
        if alive():
            status = client.status()
            why = f"load client {folder.name} ended with status {status}"
            why = f"load client {folder.name} was still at work when another failed" if status is None else why
        raise LoadProblem(f"{why}; the window has no result.\n{_last_words(client.log)}")
    try:
        return compact(json.loads(file.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise LoadProblem(f"the load client's result can't be read ({error}): is {folder} full?") from error


def _grant_last_words(client_alive: Callable[[], bool], limit_s: float = 5) -> None:
    """After the engine's end the client still writes down what it saw: give it a moment."""
    deadline = time.monotonic() + limit_s
    while client_alive() and time.monotonic() < deadline:
        time.sleep(POLL_S / 5)


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return "\n".join(f"  | {line[:200]}" for line in lines[-6:])


def compact(result: dict) -> dict[str, np.ndarray]:
    """Turn the client's detailed JSON into the raw form of a window: compact, and complete for analysis.

    With R requests and G gaps: `start_s` (R, the client's monotonic clock), `ttft_s`, `e2e_s` (R),
    `input_tokens`, `output_tokens`, `chunks` (R, int32), `gaps_us` (G, uint32, the chunk gaps of all
    requests one after another), `error` (R, text, empty where none),
    `text_sha256` (R, 16 hex digits), `looping` (R, bool: see loops.is_loop), `texts` (the first 1% of the
    texts, at least one). The client's summary fields are left behind.
    """
    gaps = result["itls"]
    texts = result["generated_texts"]
    kept = max(1, int(len(texts) * TEXT_SHARE))
    return {
        "start_s": np.asarray(result["start_times"], dtype=np.float64),
        "ttft_s": np.asarray(result["ttfts"], dtype=np.float64),
        "e2e_s": np.asarray(result["latencies"], dtype=np.float64),
        "input_tokens": np.asarray(result["input_lens"], dtype=np.int32),
        "output_tokens": np.asarray(result["output_lens"], dtype=np.int32),
        "chunks": np.asarray(
            [len(gap) + (ttft > 0) for gap, ttft in zip(gaps, result["ttfts"], strict=True)], np.int32
        ),
        "gaps_us": np.rint(np.asarray([each for gap in gaps for each in gap], np.float64) * 1e6).astype(np.uint32),
        "error": np.asarray([_short(error) for error in result["errors"]], dtype=np.str_),
        "text_sha256": np.asarray([hashlib.sha256((text or "").encode()).hexdigest()[:16] for text in texts], np.str_),
        "looping": np.asarray([is_loop(text or "") for text in texts], np.bool_),
        "texts": np.asarray(texts[:kept], dtype=np.str_),
    }


def merge(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One window's arrays from those of its client processes: all on CLOCK_MONOTONIC, so nothing is shifted.

    Adds `client` (R, int16): which process sent the request. The order of requests means nothing.
    """
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    counts = [len(part["start_s"]) for part in parts]
    return {**whole, "client": np.repeat(np.arange(len(parts), dtype=np.int16), counts)}


def _short(error: str) -> str:
    """The last line of a client's traceback: the cause without the frames."""
    lines = (error or "").strip().splitlines()
    return lines[-1][:200] if lines else ""
