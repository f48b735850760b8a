"""The real load engine against the reference server: several client processes are one load."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench.analyse import analyse_window
from bench.load import run_window
from bench.prompts import load_tokenizer, make_prompts
from bench.saturation import dispatch_share
from bench.telemetry.sampler import Sampler, Watched
from bench.telemetry.window import window_figures
from images.engine import ensure_engine
from images.errors import EngineProblem
from recipes.run.fetch import fetch, fetch_json
from recipes.schema import Benchmark

ROOT = Path(__file__).resolve().parent.parent.parent
TOKENIZER = ROOT / "recipes/library/micro/model"


class Reference:
    """A reference server on a free port."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-m", "bench.reference_server", "--port", str(port), "--step-ms", "50"]
        self.process = subprocess.Popen([*argv, "--tokenizer", str(TOKENIZER / "tokenizer.json")], cwd=ROOT)
        deadline = time.monotonic() + 30
        while not self.answers():
            assert time.monotonic() < deadline and self.alive()
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            return fetch(f"{self.url}/health", 2).status_code == 200
        except EngineProblem:
            return False

    def alive(self) -> bool:
        return self.process.poll() is None


@pytest.fixture
def reference():
    server = Reference()
    yield server
    server.process.terminate()
    server.process.wait(10)


def test_two_real_clients_begin_together_and_are_one_load(reference):
    load = Benchmark(
        prompt_source="task-stream",
        input_len=32,
        output_len=33,
        concurrency=9,
        prompts=54,
        temperature=0,
        seed=1,
    )
    prompts = make_prompts(load, load_tokenizer(TOKENIZER), 1, load.prompts)
    watched = [Watched("server", 0, lambda: [reference.process.pid])]

    def watch(running) -> None:
        watched.extend(Watched("client", index, client.processes) for index, client in enumerate(running))

    sampler = Sampler([], lambda: list(watched), "not needed")
    sampler.start()
    try:
        applied = run_window(
            ensure_engine("cpu"),
            reference.url,
            "reference",
            TOKENIZER,
            load,
            prompts,
            reference.alive,
            clients=2,
            on_start=watch,
        )
    finally:
        telemetry = sampler.stop()
    arrays = applied.arrays
    assert applied.streams == [5, 4] and applied.prompts == [30, 24]
    assert np.bincount(arrays["client"]).tolist() == [30, 24]
    assert (arrays["error"] == "").all() and (arrays["output_tokens"] == 33).all()
    assert (arrays["input_tokens"] == 32).all()
    assert applied.start_skew_s < 0.5, "each took tens of seconds to start, and never the same"
    assert 0 <= arrays["start_s"].min() - applied.began_s < 5, "nothing was sent before all were let go"
    truth = fetch_json(f"{reference.url}/truth")
    result = analyse_window(arrays, load.concurrency)
    assert result.peak_in_flight == load.concurrency
    bounds = (float(arrays["start_s"].min()), float((arrays["start_s"] + arrays["e2e_s"]).max()))
    figures = window_figures(telemetry, bounds)
    assert len(figures.client_shares) >= 2 and 0 < figures.client_share < 1.05
    assert figures.server_share is not None
    # A client that has to wait for a core stamps late what came in time.
    waited = figures.client_wait_share or 0.0
    assert result.steady == pytest.approx(truth["steady_tok_s"], rel=0.02 if waited < 0.05 else 0.06)
    assert dispatch_share(arrays) < 1 and figures.gap_share < 0.2


def test_a_ceiling_is_measured_and_kept_or_refused_on_a_crowded_machine(inv, tmp_path):
    answer = inv("ceiling", "--json", STATION_RECIPES_STATE=str(tmp_path))
    kept = list((tmp_path / "ceilings").glob("*.json"))
    if answer.returncode:
        assert "busy with other work" in answer.stderr and not kept, answer.stderr
        return
    found = json.loads(answer.stdout)
    assert json.loads(kept[0].read_text()) == found
    assert 500 < found["achieved_chunks_per_s"] < 3300 and found["chunks_per_s"] >= found["achieved_chunks_per_s"]
    assert 5 < found["cpu_us_per_chunk"] < 2000
