"""What a run's evidence says: guards, states, exit codes, and the same bytes every time."""

import io
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from pydantic import ValidationError
from rich.console import Console

from bench import verdict as verdict_module
from bench.attribution import claimed_factors
from bench.evidence import read_evidence
from bench.exchange.outgoing import export
from bench.floors import hardware_of, load_of
from bench.guards import run_guards
from bench.report.text import print_verdict
from bench.runfolder import dump_json, seal, window_folder
from bench.verdict import EXIT_CODES, judge, write_verdict
from images.errors import Problem, RunProblem
from tests.runs import MODEL_FILES, claim, closed_loop, counters, recipe, write_run


def spoiled_window(change: str) -> dict:
    arrays = closed_loop(8, 80, 32, 0.01)
    if change == "error":
        arrays["error"] = arrays["error"].astype("U40")
        arrays["error"][3] = "ClientPayloadError: cut off"
    if change == "short":
        arrays["output_tokens"][5] = 31
    return arrays


def spoiled_counters(name: str, value: float) -> dict:
    counted = counters(recipe())
    counted["after"][name] = counted["before"][name] + value
    return counted


FAULTS = {
    "a request failed": ({"boots": [[spoiled_window("error")]]}, {"completed", "client_errors"}),
    "an output is short": ({"boots": [[spoiled_window("short")]]}, {"output_lengths"}),
    "a stream ended in an error event": (
        {"counted": spoiled_counters("request_success_total{finished_reason=length}", 79)},
        {"finish_counters"},
    ),
    "the server generated other tokens": (
        {"counted": spoiled_counters("generation_tokens_total", 80 * 32 * 1.01)},
        {"generation_tokens"},
    ),
    "a prompt had one token more": (
        {"counted": spoiled_counters("prompt_tokens_total", 80 * 64 + 1)},
        {"prompt_tokens"},
    ),
    "requests were preempted": ({"counted": spoiled_counters("num_preemptions_total", 2)}, {"preemptions"}),
    "the server restarted": (
        {"counted": spoiled_counters("num_preemptions_total", -3)},
        {"preemptions", "same_server"},
    ),
    "another engine version": ({"manifest": {"engine": {"answered": ["0.31.0"]}}}, {"engine_version"}),
    "the live argv differs": ({"live_argv": ["python", "serve", "--other"]}, {"live_argv"}),
    "a window is missing": ({"boots": []}, {"finished"}),
    "the run failed": ({"manifest": {"failure": {"stage": "boot 1", "cause": "killed"}}}, {"finished"}),
    "the run was never sealed": ({"sealed": False}, {"seal"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_voids_the_run_and_is_named_by_its_own_guard(tmp_path: Path, fault: str):
    arguments, expected = FAULTS[fault]
    run = write_run(tmp_path / "run", recipe(), **arguments)
    verdict = judge(read_evidence(run))
    assert {guard["id"] for guard in verdict["guards"] if guard["ok"] is False} == expected
    assert verdict["state"] == "INVALID"
    assert verdict["latency_ms"] is None and set(verdict["output_tok_s"].values()) == {None}, (
        "an invalid run has no figure"
    )
    assert "invalid" in verdict["reasons"]["output_tok_s"]


def test_prefix_hits_above_one_percent_void_the_run(tmp_path: Path):
    counted = counters(recipe())
    counted["after"]["prefix_cache_queries_total"] += 1000
    for hits, ok in ((10, True), (11, False)):
        counted["after"]["prefix_cache_hits_total"] = 7 + hits
        run = write_run(tmp_path / str(hits), recipe(), counted=counted)
        found = {guard.id: guard.ok for guard in run_guards(read_evidence(run))}
        assert found["prefix_hits"] is ok


def test_a_run_without_a_fault_and_without_claims_is_measured(tmp_path: Path):
    verdict = judge(read_evidence(write_run(tmp_path / "run", recipe())))
    assert verdict["state"] == "MEASURED"
    assert all(guard["ok"] for guard in verdict["guards"])
    assert verdict["reasons"]["ci95"] == "one boot, no interval"


def test_a_guard_whose_data_is_missing_cannot_check_and_does_not_pass(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe())
    (window_folder(run, 1, 1) / "counters.json").unlink()
    seal(run)
    found = {guard.id: guard.ok for guard in run_guards(read_evidence(run))}
    assert found["prompt_tokens"] is None
    assert found["completed"] is True


@pytest.mark.parametrize(
    ("accepted", "state"), [(75, "REPRODUCED"), (84, "REPRODUCED"), (60, "NOT_REPRODUCED"), (95, "EXCEEDED")]
)
def test_one_boot_judges_acceptance_length(tmp_path: Path, accepted: int, state: str):
    subject = recipe(claims=[claim("acceptance_length", 1.8, 0.05)])
    run = write_run(tmp_path / "run", subject, counted=counters(subject, accepted, 100))
    verdict = judge(read_evidence(run))
    assert verdict["state"] == state
    assert verdict["claims"][0]["measured"] == pytest.approx(1 + accepted / 100)


WAVES = 100
LONG = {"prompts": 8 * WAVES}


def boots_at(*rates: float, ramp: float = 0.0) -> list:
    """One window a boot, 8 streams of 32 tokens, each with the given steady rate (tokens/s).

    The whole run is slower by the ramps: 0.9% and, where `ramp` is given, that share more: a straggler at the end.
    """
    return [[_scaled(rate, ramp)] for rate in rates]


def _scaled(rate: float, ramp: float) -> dict:
    arrays = closed_loop(8, 8 * WAVES, 32, 0.01)
    factor = 8 * 32 / 0.36 / rate
    for name in ("start_s", "ttft_s", "e2e_s"):
        arrays[name] = arrays[name] * factor
    arrays["gaps_us"] = (arrays["gaps_us"] * factor).astype("uint32")
    last = arrays["start_s"].argmax()
    arrays["e2e_s"][last] += ramp * (arrays["start_s"].max() - arrays["start_s"].min())
    return arrays


def judged_rates(folder: Path, boots: list, subject=None, **more: object) -> dict:
    """The verdict on output_tok_s of 1000 ± 30 for boots of boots_at."""
    claims = [claim("output_tok_s", 1000, 30, "cpu-x86-64")]
    subject = subject or recipe(claims=claims, benchmark={**LONG, "boots": len(boots)})
    return judge(read_evidence(write_run(folder, subject, boots=boots, **more)))


@pytest.mark.parametrize(
    ("rates", "state"),
    [
        ((1000.0, 1001.0, 1002.0), "REPRODUCED"),
        ((900.0, 901.0, 902.0), "NOT_REPRODUCED"),
        ((1100.0, 1101.0, 1102.0), "EXCEEDED"),
        ((960.0, 1000.0, 1040.0), "INCONCLUSIVE"),
        ((1000.0, 1001.0), "INCONCLUSIVE"),
        ((1000.0,), "INCONCLUSIVE"),
    ],
)
def test_throughput_is_judged_by_equivalence_over_boots(tmp_path: Path, rates: tuple, state: str):
    verdict = judged_rates(tmp_path / "run", boots_at(*rates))
    assert verdict["state"] == state, verdict["claims"]


def test_one_boot_has_no_interval_and_says_so(tmp_path: Path):
    row = judged_rates(tmp_path / "run", boots_at(1000.0))["claims"][0]
    assert row["reason"] == "one boot, no interval: 3 are needed"
    assert row["ci95"] is None and row["more_boots"] == 2


def test_whole_run_and_steady_state_have_to_agree(tmp_path: Path):
    claims = [claim("output_tok_s", 1000, 30, "cpu-x86-64")]
    waive = {"waive": [{"guard": "straggler", "reason": "the test's ramp is one"}]}
    subject = recipe(claims=claims, benchmark={**LONG, "boots": 3}, proof=waive, status="synthetic")
    verdict = judged_rates(tmp_path / "run", boots_at(1000.0, 1001.0, 1002.0, ramp=0.08), subject)
    row = verdict["claims"][0]
    assert verdict["output_tok_s"]["whole"] < 940 and verdict["output_tok_s"]["steady"] > 999
    assert row["state"] == "INCONCLUSIVE" and row["more_boots"] is None
    assert "the whole run to NOT_REPRODUCED and the steady state to REPRODUCED" in row["reason"]
    assert "more prompts a window" in row["reason"]


def test_without_a_steady_window_a_rate_is_not_judged_and_the_reason_is_given(tmp_path: Path):
    boots = [[closed_loop(7, 80, 32, 0.01)]] * 3
    claims = [claim("output_tok_s", 560, 30, "cpu-x86-64")]
    waived = {"waive": [{"guard": "running", "reason": "seven of eight streams is what this is about"}]}
    subject = recipe(claims=claims, benchmark={"boots": 3}, proof=waived, status="synthetic")
    verdict = judged_rates(tmp_path / "run", boots, subject)
    assert verdict["state"] == "INCONCLUSIVE"
    said = "no steady window: boot 1 window 1: never 8 of 8 streams in flight at once, 7 at most"
    assert said in verdict["claims"][0]["reason"]
    assert said in verdict["reasons"]["output_tok_s.steady"]


@pytest.mark.parametrize(
    ("rates", "more", "said"),
    [
        ((975.0, 1004.0, 1033.0), 10, "if mean and scatter stay, a new run with --boots 13 would decide, 4 times in 5"),
        ((940.0, 1004.0, 1068.0), 52, "55 boots would decide, 4 times in 5: more than the 20 of one run"),
    ],
)
def test_an_inconclusive_interval_names_the_run_that_would_decide(tmp_path: Path, rates: tuple, more: int, said: str):
    row = judged_rates(tmp_path / "run", boots_at(*rates))["claims"][0]
    assert row["state"] == "INCONCLUSIVE"
    assert said in row["reason"] and row["more_boots"] == more


HARDWARE = {"cpu": {"model": "a CPU", "cores": 2}, "gpus": [{"uuid": "GPU-1", "name": "a card"}]}


def noisy_machine(relative: float, **other: object) -> dict:
    metrics = {"output_tok_s": {"relative": relative, "relative_sd": relative / 5}}
    names = {"machine": "cpu-x86-64", "engine": "e1", "recipe": "test/base", "run": "an A/A run", "boots": 5}
    names |= {"load": load_of(recipe(benchmark=LONG).benchmark), "hardware": hardware_of(HARDWARE), **other}
    return {**HARDWARE, "noise_floor": {**names, "metrics": metrics}}


ENGINE = {"engine": {"answered": ["0.32.0"], "identity": "e1"}}


@pytest.mark.parametrize(
    ("floor", "rate", "state", "used"),
    [
        (0.01, 950, "NOT_REPRODUCED", 30),
        (0.03, 990, "REPRODUCED", 30),
        (0.055, 990, "INCONCLUSIVE", 55),
        (0.055, 960, "INCONCLUSIVE", 55),
        (0.055, 900, "NOT_REPRODUCED", 55),
    ],
)
def test_within_a_noise_floor_above_the_tolerance_nothing_is_confirmed_nor_refuted_and_both_are_said(
    tmp_path: Path, floor: float, rate: float, state: str, used: float
):
    boots = boots_at(rate - 1, rate, rate + 1)
    run = judged_rates(tmp_path / "run", boots, machine=noisy_machine(floor), manifest=ENGINE)
    row = run["claims"][0]
    sink = io.StringIO()
    print_verdict(run, Console(file=sink, width=300))
    printed = f"1000 ± 30{', ± 55 used: the noise floor' if used > 30 else ''} (measured)"
    assert printed in sink.getvalue()
    assert (row["state"], row["tolerance"], row["tolerance_used"]) == (state, 30, used)
    assert f"tolerance 30, noise floor {1000 * floor:g}" in row["reason"]
    assert run["noise_floor"] == {"run": "an A/A run", "boots": 5, "relative": {"output_tok_s": floor}}


OTHERS = {
    "machine": {"machine": "h200"},
    "engine": {"engine": "e2"},
    "recipe": {"recipe": "test/mtp1"},
    "load": {"load": load_of(recipe(benchmark={**LONG, "input_len": 128}).benchmark)},
    "hardware": {"hardware": hardware_of({**HARDWARE, "gpus": [{"uuid": "GPU-2"}]})},
    "recipe, load": {"recipe": None, "load": None},
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_noise_floor_of_another_machine_engine_rung_load_or_card_is_not_used(tmp_path: Path, other: str):
    machine = noisy_machine(0.055, **OTHERS[other])
    found = judged_rates(tmp_path / "run", boots_at(959, 960, 961), machine=machine, manifest=ENGINE)
    row = found["claims"][0]
    assert row["state"] == "NOT_REPRODUCED" and "noise floor not measured" in row["reason"]
    assert found["noise_floor"] is None
    assert f"the noise floor is of another {other}" in found["reasons"]["noise_floor"]


def test_a_latency_claim_is_judged_over_boots_and_lower_is_better(tmp_path: Path):
    for published, state in ((360, "REPRODUCED"), (300, "NOT_REPRODUCED"), (400, "EXCEEDED")):
        claims = [claim("ttft_p95_ms", published / 360 * 50, 1, "cpu-x86-64")]
        subject = recipe(claims=claims, benchmark={**LONG, "boots": 3})
        boots = boots_at(8 * 32 / 0.36, 8 * 32 / 0.3601, 8 * 32 / 0.3599)
        assert judged_rates(tmp_path / state, boots, subject)["state"] == state


def test_a_claim_of_another_machine_is_not_comparable_and_the_figure_is_still_reported(tmp_path: Path):
    subject = recipe(claims=[claim("output_tok_s", 11840, 500, "dgx-station-gb300")])
    verdict = judge(read_evidence(write_run(tmp_path / "run", subject)))
    assert verdict["state"] == "NOT_COMPARABLE"
    assert verdict["claims"][0]["measured"] > 0
    assert "dgx-station-gb300" in verdict["claims"][0]["reason"]


@pytest.mark.parametrize(
    "files",
    [
        {**MODEL_FILES, "model.safetensors": "c" * 64},
        {**MODEL_FILES, "tokenizer.json": None},
        {**MODEL_FILES, "added_tokens.json": "d" * 64},
    ],
)
def test_another_model_is_not_comparable(tmp_path: Path, files: dict):
    subject = recipe(claims=[claim("acceptance_length", 1.8, 0.05)])
    counted = counters(subject, 80, 100)
    run = write_run(tmp_path / "run", subject, counted=counted, manifest={"model": {"files": files}})
    verdict = judge(read_evidence(run))
    assert verdict["state"] == "NOT_COMPARABLE"
    assert "model" in verdict["claims"][0]["reason"]


def test_a_verdict_on_a_substitute_engine_says_so(tmp_path: Path):
    engine = {"image": "cpu", "version": "0.32.0rc1", "substitutes": ["0.32.0"]}
    subject = recipe(engine=engine, claims=[claim("acceptance_length", 1.8, 0.05)])
    verdict = judge(read_evidence(write_run(tmp_path / "run", subject, counted=counters(subject, 80, 100))))
    assert verdict["state"] == "REPRODUCED"
    assert "on the substitute engine 0.32.0, not 0.32.0rc1" in verdict["claims"][0]["reason"]


def test_the_worst_judged_claim_decides_and_unjudged_claims_do_not(tmp_path: Path):
    good, bad = claim("acceptance_length", 1.8, 0.05), claim("acceptance_length", 2.5, 0.05)
    for claims, state in (([good, bad], "NOT_REPRODUCED"), ([good, {**bad, "judge": False}], "REPRODUCED")):
        subject = recipe(claims=claims)
        run = write_run(tmp_path / state, subject, counted=counters(subject, 80, 100))
        assert judge(read_evidence(run))["state"] == state


def test_a_waived_guard_is_shown_and_does_not_void(tmp_path: Path):
    waive = {"waive": [{"guard": "preemptions", "reason": "memory is short on purpose"}]}
    subject = recipe(proof=waive, status="synthetic")
    run = write_run(tmp_path / "run", subject, counted=spoiled_counters("num_preemptions_total", 2))
    verdict = judge(read_evidence(run))
    assert verdict["state"] == "MEASURED"
    waived = [guard for guard in verdict["guards"] if guard["waived"]]
    assert [guard["id"] for guard in waived] == ["preemptions"] and waived[0]["ok"] is False


def test_the_log_proof_names_what_the_log_lacks(tmp_path: Path):
    proof = {"must_log": ["Using cpu Mamba SSU backend"], "must_not_log": ["Reset SSM cache"]}
    for log, ok in (("Using cpu Mamba SSU backend", True), ("Using cpu Mamba SSU backend\nReset SSM cache", False)):
        run = write_run(tmp_path / str(ok), recipe(proof=proof), log=log)
        found = {guard.id: guard for guard in run_guards(read_evidence(run))}
        assert found["log_proof"].ok is ok


def test_a_boot_without_a_log_keeps_the_log_proof_from_passing_and_is_named(tmp_path: Path):
    subject = recipe(proof={"must_log": ["as meant"]}, benchmark={**LONG, "boots": 3})
    for log, ok, said in (
        ("as meant", False, "boot 2 has no log; boot 3 has no log"),
        ("otherwise", False, "boot 1 lacks 'as meant'; boot 2 has no log; boot 3 has no log"),
    ):
        run = write_run(tmp_path / log, subject, boots=boots_at(999, 1000, 1001), log=log)
        for boot in (2, 3):
            (run / f"boots/{boot}/server.log.gz").unlink()
        seal(run)
        found = {guard.id: guard for guard in run_guards(read_evidence(run))}["log_proof"]
        assert (found.ok, found.observed) == (ok, said)


def test_judging_twice_gives_the_same_bytes(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe(benchmark={"boots": 3}), boots=boots_at(999.3, 1000.1, 1001.7))
    write_verdict(run)
    first = (run / "verdict.json").read_bytes()
    write_verdict(run)
    assert (run / "verdict.json").read_bytes() == first
    moved = tmp_path / "elsewhere"
    run.rename(moved)
    write_verdict(moved)
    assert (moved / "verdict.json").read_bytes() == first


def test_a_changed_byte_anywhere_voids_the_run(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe())
    manifest = run / "manifest.json"
    manifest.write_text(dump_json({**json.loads(manifest.read_text()), "seed": 2}))
    verdict = judge(read_evidence(run))
    assert verdict["state"] == "INVALID"
    assert "manifest.json was changed" in verdict["guards"][0]["observed"]


@pytest.mark.parametrize(
    "broken", ["manifest.json", "recipe.yaml", "boots/1/w1/client.npz", "boots/1/w1/counters.json"]
)
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"- 1\n", b"PK\x03\x04rubbish"])
def test_a_broken_file_is_one_clear_error_and_never_a_traceback(tmp_path: Path, broken: str, content: bytes):
    run = write_run(tmp_path / "run", recipe())
    (run / broken).write_bytes(content)
    with pytest.raises(Problem) as caught:
        write_verdict(run)
    assert Path(broken).name in str(caught.value)


def test_the_exit_codes_are_the_contract():
    assert EXIT_CODES == {
        "REPRODUCED": 0,
        "MEASURED": 0,
        "NOT_REPRODUCED": 3,
        "INCONCLUSIVE": 4,
        "NOT_COMPARABLE": 5,
        "EXCEEDED": 6,
        "INVALID": 7,
    }


def test_what_a_stranger_s_run_leaves_out_is_a_question_mark_and_no_traceback(tmp_path: Path):
    manifest = {"engine": {"answered": ["0.32.0"], "patches": [{"sha256": "a"}]}}
    machine = {"gpus": [{"uuid": "GPU-1"}, {"name": None}]}
    sink = io.StringIO()
    run = write_run(tmp_path / "run", recipe(), manifest=manifest, machine=machine)
    print_verdict(write_verdict(run), Console(file=sink, width=200))
    assert "patched: ?" in sink.getvalue() and "cores, ?, ?" in sink.getvalue()


@pytest.mark.parametrize("rates", [["a", "b"], "ab", {"a": 1}, [None]])
def test_synthetic_rates_that_are_no_numbers_are_not_known(tmp_path: Path, rates: object):
    flags = {"speculative-config": {"synthetic_acceptance_rates": rates}}
    subject = recipe(engine={"image": "cpu", "version": "0.32.0", "flags": flags})
    assert claimed_factors(subject, 1000.0).acceptance is None


def test_whatever_goes_wrong_while_judging_is_one_error_that_names_the_run(tmp_path: Path, monkeypatch):
    run = write_run(tmp_path / "run", recipe())
    for error in (TypeError("odd"), ZeroDivisionError("odd"), KeyError("odd")):
        monkeypatch.setattr(verdict_module, "run_guards", Mock(side_effect=error))
        for what in (lambda: write_verdict(run), lambda: export(run, "csv", tmp_path / "out.csv")):
            with pytest.raises(RunProblem, match=f"{run}: can't be judged: {type(error).__name__}"):
                what()
        with pytest.raises(RunProblem, match="can't be judged"):
            judge(read_evidence(run))


def test_a_claim_of_nothing_is_refused():
    with pytest.raises(ValidationError, match="greater than 0"):
        recipe(claims=[claim("output_tok_s", 0, 1)])
