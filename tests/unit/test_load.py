"""The load by several client processes: nobody is early, nothing is sent twice, and the sum is one load."""

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.analyse import analyse_window, rounded
from bench.ceiling import ceiling_of, client_engine, refuse_crowded
from bench.ceilings import store_ceiling, stored_ceiling
from bench.clients import ASSUMED_CEILING, Gate, choose_clients, split_prompts, split_streams
from bench.load import LoadProblem, merge, run_window
from bench.saturation import dispatch_delay, dispatch_share
from images.engine import Engine
from images.errors import EngineProblem, UsageProblem
from recipes.load import load_recipe
from tests.runs import closed_loop, recipe

ENGINE = Engine("cpu", "0.32.0", Path(sys.executable), "0" * 16)


@given(st.integers(1, 512), st.integers(1, 64), st.integers(0, 2000))
def test_streams_and_prompts_are_dealt_out_whole_without_overlap_and_in_proportion(concurrency, clients, count):
    clients = min(clients, concurrency)
    streams = split_streams(concurrency, clients)
    assert sum(streams) == concurrency and max(streams) - min(streams) <= 1 and min(streams) >= 1
    prompts = [f"prompt {index}" for index in range(count)]
    dealt = split_prompts(prompts, streams)
    assert [prompt for part in dealt for prompt in part] == prompts
    for part, share in zip(dealt, streams, strict=True):
        assert abs(len(part) - count * share / concurrency) <= 1


def parts_of(arrays: dict[str, np.ndarray], owner: np.ndarray) -> list[dict[str, np.ndarray]]:
    """The same requests as if each had been sent by the client process in `owner`."""
    gaps = arrays["chunks"] - (arrays["ttft_s"] > 0)
    of_gap = np.repeat(owner, gaps)
    one_a_gap = {"gaps_us": of_gap, "texts": np.zeros(len(arrays["texts"]), int)}
    return [
        {name: array[one_a_gap.get(name, owner) == number] for name, array in arrays.items()}
        for number in range(owner.max() + 1)
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(0, 2**32 - 1), st.sampled_from([1, 31]))
def test_splitting_a_run_across_client_processes_changes_nothing(clients, seed, tokens_a_chunk):
    rng = np.random.default_rng(seed)
    whole = closed_loop(8, 80, 32, 0.01, tokens_a_chunk)
    whole["gaps_us"] = rng.integers(5000, 15000, len(whole["gaps_us"])).astype(np.uint32)
    failed = rng.random(80) < 0.05
    whole["error"] = np.where(failed, "refused", "")
    owner = rng.integers(0, clients, 80)
    merged = merge(parts_of(whole, owner))
    assert np.bincount(merged["client"]).tolist() == np.bincount(owner).tolist()
    for concurrency in (8, 9):
        assert rounded(vars(analyse_window(merged, concurrency))) == rounded(vars(analyse_window(whole, concurrency)))
    assert len(merged["client"]) == 80 and sorted(merged["text_sha256"]) == sorted(whole["text_sha256"])


def test_the_number_of_clients_follows_from_the_expected_rate_and_the_ceiling():
    assert choose_clients(200, 11_000, 16, cores=72)[0] == 1
    assert choose_clients(13_000, 11_000, 256, cores=72)[0] == 3
    assert choose_clients(13_000, 11_000, 2, cores=72)[0] == 2, "none without a stream"
    number, why = choose_clients(13_000, 11_000, 256, cores=2)
    assert number == 1 and "3 wanted, 2 cores" in why, "the server needs cores too"
    number, why = choose_clients(2 * ASSUMED_CEILING, None, 256, cores=72)
    assert number == 4 and "assumed" in why
    assert choose_clients(None, 11_000, 256, cores=72)[0] == 1


def test_a_client_that_answers_late_shows_as_dispatch_delay_whoever_sent_what():
    prompt = closed_loop(8, 80, 33, 0.01)
    assert dispatch_delay(prompt) == pytest.approx(0, abs=1e-5)
    late = closed_loop(8, 80, 33, 0.01)
    late["start_s"] = late["start_s"] + 0.02 * (np.arange(80) // 8)
    assert dispatch_delay(late) == pytest.approx(0.02, rel=0.01)
    assert dispatch_share(late) == pytest.approx(0.4, rel=0.01)
    owner = np.arange(80) % 2
    assert dispatch_delay(merge(parts_of(late, owner))) == pytest.approx(0.02, rel=0.01)
    second = {**late, "start_s": late["start_s"] + 1.5}
    assert dispatch_delay(merge([late, second])) == pytest.approx(0.02, rel=0.01), "each client's slots are its own"
    assert dispatch_delay(closed_loop(8, 8, 33, 0.01)) is None


def test_clients_that_are_ready_at_different_times_begin_together(tmp_path):
    gate = Gate(tmp_path)
    waiting = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from client_gate import wait_at
time.sleep(float(sys.argv[3]))
wait_at(Path(sys.argv[1]), sys.argv[2])
print(time.monotonic())
"""
    clients = [
        Process([sys.executable, "-c", waiting, str(tmp_path), str(index), str(index * 0.4)]) for index in range(3)
    ]
    seen = []
    gate.wait_ready(clients, lambda: None, seen.append)
    assert seen == sorted(seen) and seen[0] < 3
    moment = gate.open()
    began = [float(client.popen.communicate(timeout=20)[0]) for client in clients]
    assert all(moment <= each < moment + 0.25 for each in began)
    assert max(began) - min(began) < 0.1


class Process:
    """A process in the shape of a running client."""

    def __init__(self, argv: list[str], log: Path | None = None) -> None:
        self.popen = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.log = log

    def alive(self) -> bool:
        return self.popen.poll() is None

    def status(self) -> int | None:
        return self.popen.poll()

    def processes(self) -> list[int]:
        return [self.popen.pid]


@pytest.mark.parametrize("before_the_gate", [True, False])
def test_a_client_that_fails_ends_the_window_and_its_last_words_are_shown(tmp_path, before_the_gate):
    started = []

    @contextmanager
    def start(_engine, arguments, folder):
        (folder / "client.log").write_text(f"I am client {arguments[2]}\nand I can't go on")
        first = arguments[2] == "0"
        code = f"import pathlib, time; time.sleep({0.1 if first and before_the_gate else 0.3})\n"
        code += "" if first and before_the_gate else f"pathlib.Path({arguments[1]!r}, 'ready-{arguments[2]}').touch()\n"
        code += "raise SystemExit(3)" if first else "time.sleep(60)"
        client = Process([sys.executable, "-c", code], folder / "client.log")
        started.append(client)
        try:
            yield client
        finally:
            client.popen.kill()
            client.popen.wait()

    load = recipe(benchmark={"concurrency": 2, "prompts": 4}).benchmark
    began = time.monotonic()
    with pytest.raises(LoadProblem, match=r"(?s)load client 0 ended with status 3.*I am client 0.*can't go on"):
        run_window(ENGINE, "http://127.0.0.1:9", "m", tmp_path, load, list("abcd"), lambda: True, 2, start=start)
    assert time.monotonic() - began < 20
    assert len(started) == 2 and not any(client.alive() for client in started)


def test_a_client_that_never_gets_ready_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.clients.START_LIMIT_S", 0.3)
    sleeper = Process([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        with pytest.raises(EngineProblem, match="0 of 1 load clients were ready"):
            Gate(tmp_path).wait_ready([sleeper], lambda: None, lambda _: None)
    finally:
        sleeper.popen.kill()
        sleeper.popen.wait()


def test_the_client_behind_an_interpreter_is_measured_where_the_engine_is_a_container_s_only(tmp_path):
    loaded = load_recipe("nemotron-h-synthetic")
    with pytest.raises(UsageProblem, match="runs in a container, .* --engine-python PYTHON"):
        client_engine(loaded, None, ())
    with pytest.raises(UsageProblem, match="--engine-path is a folder for the interpreter of --engine-python"):
        client_engine(loaded, None, (str(tmp_path),))
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"version": "0.32.0", "identity": "0123456789abcdef"}'\n""")
    python.chmod(0o755)
    engine = client_engine(loaded, str(python), ())
    assert (engine.name, engine.identity, engine.python) == ("cuda", "0123456789abcdef", python)


def test_a_ceiling_is_what_a_whole_core_allows_and_holds_for_one_machine_and_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("STATION_RECIPES_STATE", str(tmp_path))
    arrays = closed_loop(64, 640, 129, 0.02)
    rate = 64 * 129 / (0.05 + 128 * 0.02)
    bounds = (float(arrays["start_s"].min()) + 5, float(arrays["start_s"].max()) - 5)
    found = ceiling_of(arrays, bounds, client_share=0.25)
    assert found["achieved_chunks_per_s"] == pytest.approx(rate, rel=0.01) and found["limited_by"] == "server"
    assert found["chunks_per_s"] == pytest.approx(4 * rate, rel=0.01) and found["heaps"] == 0
    assert ceiling_of(arrays, bounds, 0.97)["chunks_per_s"] == pytest.approx(rate, rel=0.01), "it could do no more"
    refuse_crowded(found, 0.1)
    refuse_crowded(found, None)
    for crowded, waited in ((found, 0.5), ({**found, "heaps": 0.2}, 0.1)):
        with pytest.raises(EngineProblem, match="busy with other work"):
            refuse_crowded(crowded, waited)
    machine = {"slug": "cpu-x86-64", "cpu": {"model": "some", "cores": 8}}
    assert stored_ceiling(ENGINE, machine) is None
    store_ceiling(ENGINE, machine, {**found, "schema": 1, "cpu": {"model": "some", "cores": 8}})
    assert stored_ceiling(ENGINE, machine)["chunks_per_s"] == found["chunks_per_s"]
    assert stored_ceiling(ENGINE, {**machine, "cpu": {"model": "other", "cores": 8}}) is None
    assert stored_ceiling(Engine("cpu", "0.32.0", Path("p"), "1" * 16), machine) is None
    file = store_ceiling(ENGINE, machine, {})
    assert stored_ceiling(ENGINE, machine) is None
    file.write_text("[")
    assert stored_ceiling(ENGINE, machine) is None
