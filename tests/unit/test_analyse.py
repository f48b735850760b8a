"""Analysis against windows whose truth is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.analyse import analyse_window, chunk_spans, latencies_ms
from bench.counters import acceptance_length, difference, parse_counters
from bench.load import compact
from bench.statistics import interval95
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


def test_a_run_without_a_plateau_has_no_steady_figure():
    assert analyse_window(closed_loop(16, 32, 32, 0.01), 16).steady is None
    assert analyse_window(closed_loop(8, 80, 32, 0.01), 16).steady is None


def noisy(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = closed_loop(8, 80, 32, 0.01)
    arrays["gaps_us"] = rng.integers(5_000, 15_000, len(arrays["gaps_us"])).astype(np.uint32)
    arrays["ttft_s"] = rng.uniform(0.02, 0.2, 80)
    arrays["e2e_s"] = arrays["ttft_s"] + arrays["gaps_us"].reshape(80, 31).sum(axis=1) * 1e-6
    return arrays


@given(seed=st.integers(0, 1000), shift=st.floats(-1e5, 1e5))
@settings(max_examples=30, deadline=None)
def test_neither_the_order_of_requests_nor_the_clock_s_origin_changes_anything(seed, shift):
    arrays = noisy(seed)
    order = np.random.default_rng(seed + 1).permutation(80)
    moved = {name: values[order] if len(values) == 80 else values for name, values in arrays.items()}
    moved["gaps_us"] = arrays["gaps_us"].reshape(80, 31)[order].ravel()
    moved["start_s"] = moved["start_s"] + shift
    one, other = analyse_window(arrays, 8), analyse_window(moved, 8)
    for name in ("whole", "steady", "little", "n_eff"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6)
    assert latencies_ms([arrays]) == latencies_ms([moved])


def test_a_chunk_weighs_its_tokens():
    arrays = closed_loop(1, 1, 7, 0.1, tokens_a_chunk=3, ttft_s=0.5)
    begins, ends, weights = chunk_spans(arrays)
    assert begins == pytest.approx([1000, 1000.5, 1000.6])
    assert ends == pytest.approx([1000.5, 1000.6, 1000.7])
    assert weights.tolist() == [1, 3, 3]


def test_a_failed_request_counts_as_infinitely_slow():
    arrays = closed_loop(8, 80, 32, 0.01)
    arrays["error"] = arrays["error"].astype("U10")
    arrays["error"][:3] = "refused"
    latency = latencies_ms([arrays])["e2e"]
    assert latency["p95"] == pytest.approx(360)
    assert latency["p99"] is None and latency["n"] == 80


def test_the_interval_over_boots_is_student_s():
    assert interval95([10.0]) is None
    low, high = interval95([10.0, 11.0, 12.0])
    assert (low, high) == pytest.approx((11 - 4.302653 / 3**0.5, 11 + 4.302653 / 3**0.5), rel=1e-5)


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
