"""Room bench: the load: our own warm-up, then `vllm bench serve` of the pinned engine as load engine."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np

from bench.loops import is_loop
from bench.prompts import as_jsonl
from bench.watch import Watch, ask_all
from images.engine import Engine
from images.errors import EngineProblem
from images.index import cache_root
from recipes.run.supervised import base_environment, supervised
from recipes.schema import Benchmark
from recipes.spec import FIXED_ENV

TEXT_SHARE = 0.01
POLL_S = 0.5

Progress = Callable[[int, int], None]


class LoadProblem(EngineProblem):
    """The load could not be applied: the window has no result."""


def warm_up(url: str, model: str, load: Benchmark, prompts: list[str], watch: Watch, progress: Progress) -> None:
    """Send `prompts` at full concurrency, unmeasured.

    Raises LoadProblem when any of them fails: a window after that would measure a broken server.
    """
    body = {"model": model, "max_tokens": load.output_len, "ignore_eos": True, "temperature": load.temperature}

    async def ask(client: httpx.AsyncClient, prompt: str) -> str | None:
        try:
            answer = await client.post("/v1/completions", json={**body, "prompt": prompt})
        except httpx.HTTPError as error:
            return f"{type(error).__name__} {error}"
        return None if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"

    failures = [failure for failure in ask_all(url, prompts, load.concurrency, ask, watch, progress) if failure]
    if failures:
        raise LoadProblem(f"warm-up: {len(failures)} of {len(prompts)} requests failed; the first: {failures[0]}")


def client_command(engine: Engine, url: str, model: str, tokenizer: Path, load: Benchmark, folder: Path) -> list[str]:
    """The load engine's command line. Every default that would bend the load is stated."""
    return [
        *engine.command(),
        *("bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", model, "--tokenizer", str(tokenizer)),
        *("--dataset-name", "custom", "--dataset-path", str(folder / "prompts.jsonl")),
        *("--skip-chat-template", "--disable-shuffle", "--custom-output-len", str(load.output_len)),
        *("--num-prompts", str(load.prompts), "--max-concurrency", str(load.concurrency)),
        *("--request-rate", "inf", "--ignore-eos", "--temperature", str(load.temperature)),
        *("--num-warmups", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"),
        *(
            "--save-result",
            "--save-detailed",
            "--result-dir",
            str(folder),
            "--result-filename",
            "result.json",
        ),
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
    progress: Progress = lambda _done, _all: None,
    watch: Watch | None = None,
) -> dict[str, np.ndarray]:
    """Apply one measured load and return its raw arrays (see `compact`). `watch`: the caller's, if it has one.

    Raises LoadProblem when the engine or the client ends without a result; the message says which.
    """
    with tempfile.TemporaryDirectory(prefix="station-recipes-") as name:
        folder = Path(name)
        (folder / "prompts.jsonl").write_text(as_jsonl(prompts, load.output_len))
        argv = client_command(engine, url, model, tokenizer, load, folder)
        environment = {**base_environment(), **FIXED_ENV, "OMP_NUM_THREADS": "1", "TMPDIR": name}
        environment |= {"PYTHONUNBUFFERED": "1", "VLLM_CACHE_ROOT": str(cache_root() / "vllm")}
        log = folder / "client.log"
        watch = watch or Watch(url, alive)
        with supervised(argv, environment, log) as client:
            while client.alive():
                try:
                    watch.check()
                except EngineProblem as problem:
                    _grant_last_words(client.alive)
                    if alive():
                        raise LoadProblem(str(problem)) from problem
                    break
                progress(watch.finished, load.prompts)
                time.sleep(POLL_S)
            status = client.status()
        result = folder / "result.json"
        if not result.exists():
            why = "the engine ended during the window" if not alive() else f"the load client ended with status {status}"
            raise LoadProblem(f"{why}; the window has no result.\n{_last_words(log)}")
        try:
            return compact(json.loads(result.read_text()))
        except (ValueError, KeyError, TypeError) as error:
            raise LoadProblem(f"the load client's result can't be read ({error}): is {name} full?") from error


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
    requests one after another), `error` (R, text, empty where none), `text_sha256` (R, 16 hex digits),
    `looping` (R, bool: see loops.is_loop), `texts` (the first 1% of the texts, at least one). The client's
    summary fields are left behind.
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
        "gaps_us": np.rint(np.concatenate([np.asarray(gap, np.float64) for gap in gaps] or [[]]) * 1e6).astype(
            np.uint32
        ),
        "error": np.asarray([_short(error) for error in result["errors"]], dtype=np.str_),
        "text_sha256": np.asarray([hashlib.sha256((text or "").encode()).hexdigest()[:16] for text in texts], np.str_),
        "looping": np.asarray([is_loop(text or "") for text in texts], np.bool_),
        "texts": np.asarray(texts[:kept], dtype=np.str_),
    }


def _short(error: str) -> str:
    """The last line of a client's traceback: the cause without the frames."""
    lines = (error or "").strip().splitlines()
    return lines[-1][:200] if lines else ""


def save_window(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write client.npz whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "client.npz.partial"
    with partial.open("wb") as sink:
        np.savez_compressed(sink, **arrays)
        sink.flush()
        os.fsync(sink.fileno())
    partial.rename(folder / "client.npz")
