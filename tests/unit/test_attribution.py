"""What a shortfall comes from: each factor named by what was changed, and by nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.analyse import analyse_window
from bench.attribution import Factors, attribute, claimed_factors
from bench.evidence import read_evidence
from bench.verdict import judge
from tests.runs import GOOD_GPU, closed_loop, counters, recipe, telemetry, write_run
from tests.unit.test_verdict import claim

DRAFTING = {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}}
WAVES, STREAMS, TOKENS = 100, 8, 31


def subject(published: float, acceptance: float | None = 1.8, streams: int = STREAMS):
    claims = [claim("output_tok_s", published, published * 0.02, "cpu-x86-64")]
    claims += [claim("acceptance_length", acceptance, 2)] if acceptance else []
    engine = {"image": "cpu", "version": "0.32.0", "flags": DRAFTING}
    load = {"prompts": streams * WAVES, "boots": 3, "concurrency": streams, "output_len": TOKENS}
    return recipe(engine=engine, claims=claims, benchmark=load)


def row(folder: Path, target, step_s: float, acceptance: float) -> dict:
    """The rate claim's row for a server whose steps take `step_s` and give `acceptance` tokens each."""
    requests = target.benchmark.prompts
    drafts = round(requests * TOKENS / acceptance)
    e2e = TOKENS / acceptance * step_s
    later = TOKENS - 1
    arrays = closed_loop(target.benchmark.concurrency, requests, TOKENS, (e2e - step_s) / later, 1, step_s)
    counted = counters(target, round(drafts * (acceptance - 1)), drafts, arrays)
    verdict = judge(read_evidence(write_run(folder, target, boots=[[arrays]] * 3, counted=counted)))
    return verdict["claims"][0]


def published_rate(step_s: float, acceptance: float) -> float:
    return STREAMS * acceptance / step_s


def test_a_slow_step_is_named_with_both_step_times(tmp_path: Path):
    found = row(tmp_path / "run", subject(published_rate(0.054, 1.8)), 0.060, 1.8)
    assert found["state"] == "NOT_REPRODUCED"
    text = found["attribution"]["text"]
    assert text.startswith("10.0% below: step 54 → 60 ms (-10.0%)"), text
    assert "concurrency and acceptance as claimed" in text


def test_a_low_acceptance_is_named_with_both_lengths(tmp_path: Path):
    found = row(tmp_path / "run", subject(published_rate(0.054, 1.8)), 0.054, 1.61)
    text = found["attribution"]["text"]
    assert "acceptance 1.61 against 1.80 (-10.6%)" in text and "step" not in text.split(";")[0], text


def test_the_factors_multiply_to_the_whole_difference(tmp_path: Path):
    found = row(tmp_path / "run", subject(published_rate(0.050, 1.9)), 0.061, 1.7)["attribution"]
    product = np.prod([1 + each["change"] for each in found["factors"]]) * (1 + found["unexplained"])
    assert product == pytest.approx(1 + found["difference"], rel=1e-4)
    assert abs(found["unexplained"]) < 0.005


def test_without_a_stated_acceptance_it_says_that_the_two_cannot_be_told_apart(tmp_path: Path):
    found = row(tmp_path / "run", subject(published_rate(0.050, 1.8), acceptance=None), 0.060, 1.8)
    text = found["attribution"]["text"]
    assert "24.0 tok/s a stream" not in text and "tok/s a stream against" in text
    assert "the claim states no acceptance length (here 1.80)" in text


def test_within_the_tolerance_nothing_is_attributed(tmp_path: Path):
    assert row(tmp_path / "run", subject(published_rate(0.05, 1.8)), 0.0501, 1.8)["attribution"] is None


CLAIMED = Factors(256, 1.8, 256 * 1.8 / 11_840)


def text_of(observed: Factors, conditions: dict | None = None) -> str:
    return attribute(CLAIMED, observed, 11_840, observed.rate, conditions)["text"]


def test_streams_that_the_engine_does_not_run_are_a_lack_of_concurrency():
    assert "concurrency 236 of 256 (-7.8%)" in text_of(replace(CLAIMED, streams=236))


def test_clocks_power_and_throttling_stand_beside_the_step_time():
    conditions = {"sm_clock_mhz": 1620.4, "power_w": 699.6, "throttle": {"sw_power_cap": 0.4, "gpu_idle": 0.9}}
    slow = replace(CLAIMED, step_s=CLAIMED.step_s * 60 / 54)
    assert "ms at 1,620 MHz, 700 W, power cap (-10.0%)" in text_of(slow, conditions)
    assert "MHz" not in text_of(slow, {"sm_clock_mhz": None, "power_w": None, "throttle": None})


def test_an_excess_is_attributed_too():
    assert text_of(replace(CLAIMED, acceptance=1.98)).startswith("10.0% above: acceptance 1.98 against 1.80 (+10.0%)")


def test_synthetic_acceptance_is_one_plus_the_rates_and_no_draft_is_one():
    assert claimed_factors(recipe(), 100).acceptance == 1
    flags = {"speculative-config": {"synthetic_acceptance_rates": [0.8, 0.55, 0.35]}}
    synthetic = recipe(engine={"image": "cuda", "version": "0.32.0", "flags": flags})
    assert claimed_factors(synthetic, 100).acceptance == pytest.approx(2.7)


def test_a_gpu_s_memory_clocks_power_and_throttling_stand_in_the_verdict_and_beside_the_step(tmp_path: Path):
    arrays = closed_loop(8, 800, 32, 0.01)
    steady = analyse_window(arrays, 8).steady
    claims = [claim("output_tok_s", steady * 1.2, 10, "cpu-x86-64"), claim("gpu_memory_gb", 60, 1, "cpu-x86-64")]
    target = recipe(claims=claims, benchmark={"prompts": 800, "boots": 3})
    seen = telemetry(arrays, gpu={**GOOD_GPU, "gpu_sm_clock_mhz": 1620.0, "gpu_energy_j": 5.0})
    run = write_run(tmp_path / "run", target, boots=[[arrays]] * 3, counted=counters(target, arrays=arrays), seen=seen)
    verdict = judge(read_evidence(run))
    assert verdict["gpu_memory_gb"] == pytest.approx(60)
    assert [row["state"] for row in verdict["claims"]] == ["NOT_REPRODUCED", "REPRODUCED"]
    assert verdict["conditions"]["throttle"] == {"sw_power_cap": 1.0}
    assert "at 1,620 MHz, 650 W, power cap" in verdict["claims"][0]["attribution"]["text"]
    assert verdict["energy_j_per_token"] is None and "reset" in verdict["reasons"]["energy_j_per_token"]
