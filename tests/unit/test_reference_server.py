"""The reference server over HTTP: vLLM's words, its own truth, its faults; and what watches a server."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from bench.analyse import analyse_window
from bench.counters import parse_metrics, read_counters, read_sample
from bench.load import compact
from bench.reference.faults import FAULTS, parse_fault
from bench.sampler import CounterSampler
from bench.watch import Watch
from images.errors import EngineProblem, UsageProblem
from recipes.run.fetch import fetch_json

ROOT = Path(__file__).resolve().parent.parent.parent
COMMITTED = next((ROOT / "results/cpu-x86-64/micro").glob("*-micro-mtp1-*/boots/1/w1/counters.json"))


@contextmanager
def serving(*options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A reference server as its own process, on any free port."""
    argv = [sys.executable, "-m", "bench.reference_server", "--port", "0", *options]
    process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        said = process.stderr.readline()
        assert said.startswith("reference server on http://"), said
        yield said.split()[-1], process
    finally:
        process.terminate()
        process.wait(timeout=10)
        process.stderr.close()


async def _stream(client: httpx.AsyncClient, prompt: str, tokens: int) -> dict:
    """One request as the load client does it: times of chunks with text, usage, and error events left unread."""
    body = {"model": "reference", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    times, text, usage = [time.perf_counter()], "", {}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return {"times": times, "text": "", "usage": {}, "error": answer.reason_phrase}
            async for line in answer.aiter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                if event.get("choices"):
                    times.append(time.perf_counter())
                    text += event["choices"][0]["text"]
                usage = event.get("usage") or usage
    except httpx.HTTPError as error:
        return {"times": times, "text": text, "usage": usage, "error": type(error).__name__}
    return {"times": times, "text": text, "usage": usage, "error": ""}


def load(url: str, concurrency: int, prompts: int, tokens: int) -> dict[str, np.ndarray]:
    """A closed loop over HTTP; the arrays of a window."""

    async def work() -> list[dict]:
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as client:
            left = iter(range(prompts))
            streams = await asyncio.gather(*(one(client, left) for _ in range(concurrency)))
            return [each for stream in streams for each in stream]

    async def one(client: httpx.AsyncClient, left: Iterator[int]) -> list[dict]:
        return [await _stream(client, f"prompt {number:04}", tokens) for number in left]

    seen = asyncio.run(work())
    return compact(
        {
            "start_times": [each["times"][0] for each in seen],
            "ttfts": [(each["times"] + [each["times"][0]])[1] - each["times"][0] for each in seen],
            "latencies": [each["times"][-1] - each["times"][0] for each in seen],
            "input_lens": [each["usage"].get("prompt_tokens", 0) for each in seen],
            "output_lens": [each["usage"].get("completion_tokens", len(each["text"])) for each in seen],
            "itls": [np.diff(each["times"][1:]).tolist() for each in seen],
            "errors": [each["error"] for each in seen],
            "generated_texts": [each["text"] for each in seen],
        }
    )


def test_its_metrics_are_a_subset_of_the_real_engine_s_by_name_and_label():
    real = set(json.loads(COMMITTED.read_text())["after"])
    with serving("--acceptance", "0.8") as (url, _):
        e2e = {"e2e_request_latency_seconds_sum", "e2e_request_latency_seconds_count"}  # since the second schema
        assert e2e < set(read_counters(url)) <= real | e2e
        gauges = parse_metrics(httpx.get(f"{url}/metrics").text)[1]
    assert set(gauges) == {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}


def test_over_http_the_estimate_meets_the_truth_and_the_counters_agree_to_the_token():
    with serving("--step-ms", "25", "--acceptance", "0.8", "--prefill-ms", "50", "--seed", "3") as (url, _):
        with CounterSampler(url, 0.2) as sampler:
            arrays = load(url, 8, 80, 64)
        truth = fetch_json(f"{url}/truth?concurrency=8")
        counters = read_counters(url)
    result = analyse_window(arrays, 8)
    assert result.steady == pytest.approx(truth["steady_tok_s"], rel=0.02), (
        "a busy machine delays chunks, not the truth"
    )
    assert arrays["output_tokens"].tolist() == [64] * 80 and arrays["input_tokens"].tolist() == [11] * 80
    assert counters["generation_tokens_total"] == 80 * 64 == truth["tokens"] == sum(truth["steps"]["tokens"])
    assert counters["prompt_tokens_total"] == 80 * 11
    assert counters["request_success_total{finished_reason=length}"] == 80
    drafts, accepted = (counters[f"spec_decode_num_{name}_total"] for name in ("drafts", "accepted_tokens"))
    assert 1 + accepted / drafts == pytest.approx(truth["acceptance_length"])
    assert max(sample.gauges["num_requests_running"] for sample in sampler.samples if sample.gauges) == 8
    assert (np.diff(truth["steps"]["begin_s"]) > 0).all()


def test_over_http_faults_reach_the_client_as_an_engine_s_would():
    faults = ("error-event@3+1", "short-output@4+1", "extra-tokens@5+1", "refuse@6+1", "chat-template@7+1")
    options = [part for fault in faults for part in ("--fault", fault)]
    with serving("--step-ms", "5", *options) as (url, _):
        arrays = load(url, 1, 10, 20)
        counters = read_counters(url)
    assert arrays["error"].tolist() == [""] * 6 + ["Service Unavailable"] + [""] * 3
    assert arrays["output_tokens"].tolist() == [20, 20, 20, 9, 15, 21, 0, 20, 20, 20]
    assert arrays["input_tokens"].tolist() == [11, 11, 11, 0, 11, 11, 0, 20, 11, 11], "no usage after an error event"
    assert counters["request_success_total{finished_reason=error}"] == 1
    assert counters["request_success_total{finished_reason=length}"] == 8


def test_death_in_the_middle_is_a_death():
    with serving("--step-ms", "5", "--fault", "die@4") as (url, process):
        arrays = load(url, 1, 6, 20)
        assert process.wait(timeout=5) == 70
    assert [bool(error) for error in arrays["error"]] == [False] * 4 + [True] * 2


def test_a_metrics_outage_is_a_gap_in_the_course_and_ends_nothing():
    with serving("--step-ms", "5", "--fault", "metrics-outage@2+3") as (url, _):
        with CounterSampler(url, 0.05) as sampler:
            watch = Watch(url, lambda: True, stall_s=1, look=sampler.latest)
            load(url, 1, 5, 60)  # ends in the outage: nothing more is submitted
            time.sleep(1.2)
            watch.check()
    assert sampler.samples[0].counters is not None
    assert any(sample.counters is None for sample in sampler.samples)
    watch = Watch(url, lambda: True, stall_s=0.1)  # nobody listens any more
    time.sleep(1.2)
    with pytest.raises(EngineProblem, match="stuck"):
        watch.check()


def test_a_server_still_booting_is_not_healthy_yet():
    with serving("--boot-s", "30") as (url, _):
        assert httpx.get(f"{url}/health").status_code == 503
    with serving() as (url, _):
        assert httpx.get(f"{url}/health").status_code == 200
        assert fetch_json(f"{url}/v1/models")["data"][0]["id"] == "reference"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"model":"reference"}', b'{"model":"x","prompt":"a"}', b'{"model":"reference","prompt":[[1]]}',
             b'{"model":"reference","prompt":"a","max_tokens":-1}', b'{"model":"reference","prompt":"a","max_tokens":"x"}']
)  # fmt: skip
def test_a_bad_request_is_answered_and_harms_nobody(body: bytes):
    with serving() as (url, process):
        assert httpx.post(f"{url}/v1/completions", content=body).status_code in {400, 404}
        assert httpx.get(f"{url}/nothing").status_code == 404
        assert read_sample(url, 0.0).counters["generation_tokens_total"] == 0
        assert process.poll() is None


def test_a_client_that_goes_away_is_counted_as_an_abort():
    with serving("--step-ms", "20") as (url, _):
        body = {"model": "reference", "prompt": "x", "max_tokens": 5000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        deadline = time.monotonic() + 5
        while read_sample(url, 0.0).gauges["num_requests_running"] and time.monotonic() < deadline:
            time.sleep(0.05)
        counters = read_counters(url)
    assert counters["request_success_total{finished_reason=abort}"] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fault", "nonsense"], "wanted NAME"),
        (["--fault", "straggler@x"], "wanted NAME"),
        (["--step-ms", "0"], "wanted more than 0"),
        (["--acceptance", "0.5,0.8"], "do not rise"),
        (["--acceptance", "0.8", "--tokens-per-step", "2"], "leave one out"),
    ],
)
def test_a_wrong_option_is_one_clear_error(options, said):
    argv = [sys.executable, "-m", "bench.reference_server", "--port", "0", *options]
    answer = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 2 and said in answer.stderr and "Traceback" not in answer.stderr


def test_a_fault_is_written_as_name_after_and_count():
    fault = parse_fault("straggler@40+2")
    assert [fault.takes(index) for index in (39, 40, 41, 42)] == [False, True, True, False]
    assert parse_fault("refuse").takes(10**9) and parse_fault("straggler").count == 1
    assert {parse_fault(name).kind for name in FAULTS} == set(FAULTS)
    with pytest.raises(UsageProblem, match="straggler"):
        parse_fault("stragler")
