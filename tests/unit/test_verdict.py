"""What a run's evidence says: guards, states, exit codes, and the same bytes every time."""

import json
from pathlib import Path

import pytest

from bench.evidence import read_evidence
from bench.guards import run_guards
from bench.runfolder import dump_json, seal, window_folder
from bench.verdict import EXIT_CODES, judge, write_verdict
from images.errors import Problem
from tests.runs import MODEL_FILES, closed_loop, counters, recipe, write_run


def claim(metric: str, published: float, tolerance: float, machine: str = "any", **more: object) -> dict:
    return {
        "id": metric,
        "metric": metric,
        "published": published,
        "tolerance": tolerance,
        "status": "measured",
        "machine": machine,
        "source": "a test",
        **more,
    }


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


def boots_at(*rates: float) -> list:
    """One window a boot, each with the given whole-run rate (tokens/s) of 8 streams of 32 tokens."""
    return [[_scaled(rate)] for rate in rates]


def _scaled(rate: float) -> dict:
    arrays = closed_loop(8, 80, 32, 0.01)
    ends = arrays["start_s"] + arrays["e2e_s"]
    factor = 80 * 32 / (ends.max() - arrays["start_s"].min()) / rate
    for name in ("start_s", "ttft_s", "e2e_s"):
        arrays[name] = arrays[name] * factor
    arrays["gaps_us"] = (arrays["gaps_us"] * factor).astype("uint32")
    return arrays


@pytest.mark.parametrize(
    ("rates", "state"),
    [
        ((1000.0, 1001.0, 1002.0), "REPRODUCED"),
        ((900.0, 901.0, 902.0), "NOT_REPRODUCED"),
        ((1100.0, 1101.0, 1102.0), "EXCEEDED"),
        ((960.0, 1000.0, 1040.0), "INCONCLUSIVE"),
        ((1000.0, 1001.0), "INCONCLUSIVE"),
    ],
)
def test_throughput_is_judged_by_equivalence_over_boots(tmp_path: Path, rates: tuple, state: str):
    subject = recipe(claims=[claim("output_tok_s", 1000, 30, "cpu-x86-64")], benchmark={"boots": len(rates)})
    verdict = judge(read_evidence(write_run(tmp_path / "run", subject, boots=boots_at(*rates))))
    assert verdict["state"] == state, verdict["claims"]


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
    run = write_run(tmp_path / "run", recipe(proof=waive), counted=spoiled_counters("num_preemptions_total", 2))
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
