"""Analysis against windows whose truth is known."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.analyse import analyse_window, chunk_spans, latencies_ms, steady_bounds
from bench.arrays import read_arrays, save_window
from bench.counters import acceptance_length, difference, parse_counters
from bench.load import compact
from tests.runs import closed_loop


@settings(max_examples=60, deadline=None)
@given(
    streams=st.sampled_from([4, 16, 64, 256]),
    waves=st.integers(6, 20),
    step_ms=st.floats(1, 60),
    tokens_a_chunk=st.sampled_from([1, 3, 7]),
    ttft_s=st.floats(0.005, 0.5),
)
def test_the_steady_estimate_is_within_half_a_percent_of_the_truth(streams, waves, step_ms, tokens_a_chunk, ttft_s):
    step_s = round(step_ms * 1e3) / 1e6
    arrays = closed_loop(streams, streams * waves, 64, step_s, tokens_a_chunk, ttft_s)
    truth = streams * 64 / (ttft_s + (63 // tokens_a_chunk) * step_s)
    result = analyse_window(arrays, streams)
    assert result.steady == pytest.approx(truth, rel=0.005)
    assert result.little == pytest.approx(truth, rel=0.005)
    assert result.whole < truth, "ramps make the whole run slower than its plateau"
    assert result.peak_in_flight == streams


def test_a_run_without_a_plateau_has_no_steady_figure_and_says_why():
    short = analyse_window(closed_loop(16, 32, 32, 0.01), 16)
    assert short.steady is None and "mean request times at a stretch, 3 are needed" in short.no_steady
    thin = analyse_window(closed_loop(8, 80, 32, 0.01), 16)
    assert thin.steady is None and thin.no_steady == "never 16 of 16 streams in flight at once, 8 at most"
    assert thin.n_eff == pytest.approx(8, rel=0.1), "how many streams there were is still told"


def with_pause(pause_s: float, after: int, streams: int = 8, waves: int = 40) -> dict:
    """A closed loop whose client sends nothing for a while after a number of waves."""
    arrays = closed_loop(streams, streams * waves, 32, 0.01)
    arrays["start_s"] = arrays["start_s"] + np.where(np.arange(streams * waves) >= after * streams, pause_s, 0)
    return arrays


def test_a_client_s_pause_ends_the_plateau_and_a_moment_between_requests_does_not():
    whole = analyse_window(with_pause(0, 20), 8)
    moment = analyse_window(with_pause(0.002, 20), 8)
    assert moment.bounds[1] - moment.bounds[0] == pytest.approx(whole.bounds[1] - whole.bounds[0], rel=0.01)
    pause = analyse_window(with_pause(5, 25), 8)
    assert pause.bounds[1] - pause.bounds[0] == pytest.approx(25 * 0.36, rel=0.05), "the longest stretch counts"
    assert pause.steady == pytest.approx(whole.steady, rel=0.005)
    assert pause.whole < 0.8 * whole.whole


def test_a_straggler_bends_the_whole_run_and_not_the_steady_state():
    arrays = closed_loop(64, 64 * 10, 64, 0.01, 3)
    truth = analyse_window(arrays, 64)
    arrays["e2e_s"][639] += 3 * arrays["e2e_s"][0]
    late = analyse_window(arrays, 64)
    assert late.steady == pytest.approx(truth.steady, rel=0.005)
    assert late.whole < 0.85 * truth.whole
    assert late.peak_in_flight == 64


def test_little_s_law_holds_on_a_plateau_and_names_numbers_that_disagree():
    arrays = closed_loop(64, 640, 64, 0.01, 3)
    assert analyse_window(arrays, 64).little_gap < 0.01
    arrays["output_tokens"][::2] += 30  # what the client counts and when it came no longer belong together
    arrays["ttft_s"][1::2] *= 0.1
    arrays["e2e_s"][1::2] *= 0.3
    assert (analyse_window(arrays, 64).little_gap or 1) > 0.05


def test_chunks_hold_every_good_token_once():
    arrays = noisy(5)
    arrays["error"] = arrays["error"].astype("U9")
    arrays["error"][:3] = "refused"
    assert chunk_spans(arrays)[2].sum() == pytest.approx(77 * 32)


def noisy(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = closed_loop(8, 80, 32, 0.01)
    arrays["gaps_us"] = rng.integers(5_000, 15_000, len(arrays["gaps_us"])).astype(np.uint32)
    arrays["ttft_s"] = rng.uniform(0.02, 0.2, 80)
    arrays["e2e_s"] = arrays["ttft_s"] + arrays["gaps_us"].reshape(80, 31).sum(axis=1) * 1e-6
    return arrays


def picked(arrays: dict[str, np.ndarray], chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Some requests of `noisy`, in the order given."""
    some = {name: values[chosen] for name, values in arrays.items() if len(values) == 80}
    return {**some, "gaps_us": arrays["gaps_us"].reshape(80, 31)[chosen].ravel()}


def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@given(seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_order_of_requests_changes_not_one_bit(seed):
    arrays = noisy(seed)
    moved = picked(arrays, np.random.default_rng(seed + 1).permutation(80))
    assert analyse_window(arrays, 8) == analyse_window(moved, 8)
    assert latencies_ms([arrays]) == latencies_ms([moved])


@given(seed=st.integers(0, 1000), clients=st.integers(2, 8))
@settings(max_examples=30, deadline=None)
def test_splitting_a_run_across_client_processes_changes_not_one_bit(seed, clients):
    arrays = noisy(seed)
    owner = np.random.default_rng(seed).integers(0, clients, 80)
    parts = [picked(arrays, np.flatnonzero(owner == client)) for client in range(clients)]
    assert analyse_window(joined(parts), 8) == analyse_window(arrays, 8)
    assert latencies_ms([joined(parts)]) == latencies_ms([arrays]) == latencies_ms(parts)


@given(seed=st.integers(0, 1000), shift=st.floats(-900, 1e5))
@settings(max_examples=30, deadline=None)
def test_the_clock_s_origin_changes_nothing(seed, shift):
    arrays = noisy(seed)
    moved = {**arrays, "start_s": arrays["start_s"] + shift}
    one, other = analyse_window(arrays, 8), analyse_window(moved, 8)
    for name in ("whole", "steady", "little", "per_user", "n_eff", "mean_e2e_s", "wall_s", "in_flight_s"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6), name
    assert one.peak_in_flight == other.peak_in_flight
    assert latencies_ms([arrays]) == latencies_ms([moved])


LARGE = """
import resource, time
import numpy as np
from bench.analyse import analyse_window, latencies_ms
from tests.runs import closed_loop

arrays = closed_loop(256, 100_000, 512, 0.02)
began = time.process_time()
result = analyse_window(arrays, 256)
latencies_ms([arrays])
spent = time.process_time() - began
assert result.steady
print(spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
"""


def test_a_hundred_thousand_requests_of_512_tokens_take_less_than_ten_seconds_and_two_gigabytes():
    answer = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    spent_s, peak_gb = map(float, answer.stdout.split())
    assert spent_s < 10 and peak_gb < 2, answer.stdout


def test_a_chunk_weighs_its_tokens():
    arrays = closed_loop(1, 1, 7, 0.1, tokens_a_chunk=3, ttft_s=0.5)
    begins, ends, weights = chunk_spans(arrays)
    assert begins == pytest.approx([1000, 1000.5, 1000.6])
    assert ends == pytest.approx([1000.5, 1000.6, 1000.7])
    assert weights.tolist() == [1, 3, 3]


def test_a_remainder_that_is_sent_early_weighs_less_and_the_sum_stays():
    arrays = closed_loop(1, 1, 31, 0.1, tokens_a_chunk=10, ttft_s=0.5)
    arrays["output_tokens"][:] = 32  # 1, 10, 10, 10 and one more, a tenth of a gap later
    arrays["chunks"][:] = 5
    arrays["gaps_us"] = np.append(arrays["gaps_us"], 10_000).astype(np.uint32)
    arrays["e2e_s"] = arrays["e2e_s"] + 0.01
    assert chunk_spans(arrays)[2] == pytest.approx([1, 10, 10, 10, 1])


def test_the_steady_estimate_keeps_to_the_plateau_when_idle_streams_make_the_others_faster():
    arrays = closed_loop(64, 640, 65, 0.02, 1)
    truth = 64 * 65 / arrays["e2e_s"][0]
    gaps = arrays["gaps_us"].reshape(640, 64).astype(float)
    full = arrays["start_s"].max()  # no request is sent after it: streams fall idle, steps take half the time
    ends = arrays["start_s"] + arrays["ttft_s"]
    for request in range(640):
        at = ends[request]
        for chunk in range(64):
            gaps[request, chunk] *= 0.5 if at > full + 0.2 else 1
            at += gaps[request, chunk] * 1e-6
        arrays["e2e_s"][request] = at - arrays["start_s"][request]
    arrays["gaps_us"] = gaps.round().astype(np.uint32).ravel()
    assert analyse_window(arrays, 64).steady == pytest.approx(truth, rel=0.005)


def test_a_failed_request_counts_as_infinitely_slow():
    arrays = closed_loop(8, 80, 32, 0.01)
    arrays["error"] = arrays["error"].astype("U10")
    arrays["error"][:3] = "refused"
    latency = latencies_ms([arrays])
    for name in ("ttft", "tpot", "e2e"):
        assert latency[name]["n"] == 80 and latency[name]["p95"] is not None and latency[name]["p99"] is None
    assert latency["e2e"]["p95"] == pytest.approx(360)


METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 20.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 90.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 5.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 9.0
# TYPE http_requests_total counter
http_requests_total{handler="/x"} 3.0
"""


def test_counters_are_summed_over_engines_and_gauges_are_never_read():
    assert parse_counters(METRICS) == {
        "spec_decode_num_drafts_total": 120.0,
        "spec_decode_num_accepted_tokens_total": 90.0,
        "request_success_total{finished_reason=length}": 5.0,
    }


def test_acceptance_length_is_one_plus_accepted_over_drafts():
    after = parse_counters(METRICS)
    assert acceptance_length(difference(dict.fromkeys(after, 0.0), after)) == pytest.approx(1.75)
    assert acceptance_length({"generation_tokens_total": 5.0}) is None


@given(st.lists(st.lists(st.integers(0, 3_000_000), max_size=60), min_size=1, max_size=6))
def test_a_chunk_s_moment_is_kept_to_a_tick_and_a_tick_is_small_beside_a_gap(tmp_path_factory, gaps):
    flat = [gap for each in gaps for gap in each]
    arrays = {name: np.ones(len(gaps)) for name in ("start_s", "ttft_s", "e2e_s")} | {
        "error": np.array([""] * len(gaps))
    }
    arrays |= {
        name: np.array([len(each) + 1 for each in gaps], np.int32)
        for name in ("input_tokens", "output_tokens", "chunks")
    }
    folder = tmp_path_factory.mktemp("window")
    save_window(folder, {**arrays, "gaps_us": np.array(flat, np.uint32)})
    found = read_arrays(folder / "client.npz")
    kept = found.pop("gaps_us")
    assert found.keys() == arrays.keys() and all(np.array_equal(found[name], arrays[name]) for name in arrays)
    tick = max(100, min(1000, np.median(flat) / 64)) if flat else 100
    for true, each in zip(gaps, np.split(kept, np.cumsum([len(each) for each in gaps])[:-1]), strict=True):
        assert np.all(np.abs(np.cumsum(each) - np.cumsum(true)) <= tick / 2), "however many chunks came before it"


def test_the_client_s_detailed_file_becomes_arrays_and_its_lying_fields_stay_behind():
    arrays = compact(
        {
            "start_times": [5.0, 5.1],
            "ttfts": [0.2, 0.0],
            "latencies": [0.5, 0.0],
            "input_lens": [64, 64],
            "output_lens": [7, 0],
            "itls": [[0.1, 0.2], []],
            "errors": ["", "Traceback …\n  File x\nConnectionError: refused\n"],
            "generated_texts": ["abc", ""],
            "max_output_tokens_per_s": 99999,
        }
    )
    assert arrays["chunks"].tolist() == [3, 0]
    assert arrays["gaps_us"].tolist() == [100_000, 200_000]
    assert arrays["error"].tolist() == ["", "ConnectionError: refused"]
    assert "max_output_tokens_per_s" not in arrays


def test_the_steady_window_has_the_first_wave_s_prefill_in_it_and_not_the_end_where_streams_fall_idle():
    index = np.arange(80)
    e2e = 0.36 + 0.02 * (index % 8)  # streams that drift apart, and fall idle one by one
    arrays = {**closed_loop(8, 80, 32, 0.01), "start_s": 1000 + index // 8 * (e2e + 1e-7), "e2e_s": e2e}
    begin, end = steady_bounds(arrays, 8)
    assert begin == arrays["start_s"].min()
    assert end == pytest.approx(1000 + 10 * e2e.min(), abs=1e-5) and end < (arrays["start_s"] + e2e).max()
