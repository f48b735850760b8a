"""Two teams' runs compared: the same claims on both, what differs, and that the cause named is the one that was made."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.evidence import read_evidence
from bench.handover.compare import _other_load, compare, side
from bench.handover.comparing import read_side
from bench.verdict import judge
from images.errors import RunProblem
from tests.runs import MODEL_FILES, claim, closed_loop, counters, recipe, telemetry, write_run

RATE = claim("output_tok_s", 2500, 125)
ACCEPTANCE = claim("acceptance_length", 2.0, 0.05)
LOAD = {"boots": 3}
RESULTS = Path(__file__).parents[2] / "results"
DRAFTS = {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}}


def run(folder: Path, step_s: float = 0.01, accepted: int = 0, boots: int = 3, change: dict | None = None, **options):
    """A sealed run of a recipe whose true rate follows from its step time (s)."""
    told = {
        "engine": {"image": "cpu", "version": "0.32.0", "flags": DRAFTS if accepted else {}},
        "claims": [RATE, *([ACCEPTANCE] if accepted else [])],
        "benchmark": {"boots": boots},
    }
    subject = recipe(**{**told, **(change or {})})
    load = subject.benchmark
    windows = [[closed_loop(load.concurrency, load.prompts, load.output_len, step_s)] for _ in range(boots)]
    if accepted:
        options["counted"] = counters(subject, accepted=accepted, drafts=1000, arrays=windows[0][0])
    return write_run(folder, subject, boots=windows, **options)


def compared(mine: Path, theirs: Path) -> dict:
    return compare(read_side(mine), read_side(theirs))


def kinds(found: dict) -> set[str]:
    return {row["kind"] for row in found["fingerprint"]}


def test_two_runs_of_the_same_thing_agree_and_nothing_needs_a_cause(tmp_path):
    found = compared(run(tmp_path / "a"), run(tmp_path / "b"))
    assert found["agree"] and found["fingerprint"] == [] and found["cause"]["text"] == "No gap to explain."
    (row,) = found["claims"]
    assert row["mine"]["state"] == row["theirs"]["state"] and row["gap"] == 0 and row["apart"] is False


def test_comparing_is_pure_and_swapping_the_runs_turns_the_gap_round(tmp_path):
    slow, fast = run(tmp_path / "a", step_s=0.02), run(tmp_path / "b")
    there, back = compared(slow, fast), compared(fast, slow)
    assert there == compared(slow, fast)
    assert there["claims"][0]["gap"] == pytest.approx(-back["claims"][0]["gap"])
    assert there["rate"]["gap"] < -0.3 < 0.3 < back["rate"]["gap"]


def test_a_run_against_itself_has_no_gap_though_one_side_shows_no_steady_state(tmp_path):
    """The steady rate leaves out the end of a run, where streams fall idle: it stands against no whole run's rate."""
    mine = read_side(run(tmp_path / "a"))
    told = {**mine.verdict["output_tok_s"], "steady": None}
    assert mine.verdict["output_tok_s"]["steady"] > 1.01 * told["whole"]
    theirs = replace(mine, verdict={**mine.verdict, "output_tok_s": told})
    for pair in ((mine, theirs), (theirs, mine)):
        rate = compare(*pair)["rate"]
        assert (rate["gap"], rate["estimate"]) == (0, "whole")
    assert compare(mine, mine)["rate"]["estimate"] == "steady"


def test_a_run_s_guards_are_asked_once_however_many_claims_are_compared(tmp_path, monkeypatch):
    sides = [read_side(run(tmp_path / name)) for name in "ab"]
    monkeypatch.setattr("bench.handover.compare.run_guards", lambda _: pytest.fail("asked again"))
    assert compare(*sides)["agree"]


def test_the_other_side_of_a_comparison_is_called_a_run_and_not_a_claim(tmp_path):
    text = compared(run(tmp_path / "a", step_s=0.02), run(tmp_path / "b"))["rate"]["text"]
    assert "claim" not in text and "acceptance the same" in text


def test_a_slower_machine_is_named_for_a_slower_rate(tmp_path):
    theirs = run(tmp_path / "b", slug="h200-sxm", machine={"gpus": [{"name": "NVIDIA H200"}]})
    found = compared(run(tmp_path / "a", step_s=0.02, machine={"cpu": {"model": "old"}}), theirs)
    assert found["cause"]["kind"] == "machine" and "theirs h200-sxm" in found["cause"]["text"]
    assert "step" in found["rate"]["text"] and not found["agree"]


def test_another_build_of_the_engine_goes_before_the_machine(tmp_path):
    engine = {"engine": {"answered": ["0.32.0"] * 3, "identity": "new"}}
    mine = run(tmp_path / "a", step_s=0.02, manifest=engine, machine={"cpu": {"model": "old"}})
    found = compared(mine, run(tmp_path / "b"))
    assert [row["kind"] for row in found["fingerprint"]] == ["engine", "machine"] and found["cause"]["kind"] == "engine"


def test_other_settings_go_before_another_engine_and_name_the_flag(tmp_path):
    change = {"engine": {"image": "cpu", "version": "0.32.0", "flags": {"max-num-seqs": 4}}}
    engine = {"engine": {"answered": ["0.32.0"] * 3, "identity": "new"}}
    found = compared(run(tmp_path / "a", step_s=0.02, change=change, manifest=engine), run(tmp_path / "b"))
    assert found["cause"]["kind"] == "settings"
    assert "engine.flags.max-num-seqs is 4, theirs none" in found["cause"]["text"]


def test_other_weights_go_before_everything_and_make_the_claim_another_one(tmp_path):
    files = {**MODEL_FILES, "model.safetensors": "c" * 64}
    change = {"model": {"path": "model", "served_name": "m", "dtype": "float32", "files": files}}
    mine = run(tmp_path / "a", step_s=0.02, change=change, manifest={"model": {"files": files}}, slug="other")
    found = compared(mine, run(tmp_path / "b"))
    assert found["cause"]["kind"] == "model" and "model.safetensors" in found["cause"]["text"]
    assert found["claims"][0]["mine"]["state"] == "NOT_COMPARABLE"
    assert found["claims"][0]["theirs"]["state"] != "NOT_COMPARABLE"


QUALITY = {"suites": ["micro-tasks"], "items": 5, "seed": 3}


@pytest.mark.parametrize(
    ("metric", "change", "other"),
    [
        (
            "output_tok_s",
            {"benchmark": {"prompt_source": "task-stream"}},
            "prompt_source task-stream, theirs random-text",
        ),
        ("acceptance_length", {"benchmark": {"temperature": 1}}, "temperature 1.0, theirs 0.0"),
        ("output_tok_s", {"benchmark": {"boots": 2, "windows": 2, "seed": 9}}, None),
        ("exact_match", {"quality": {**QUALITY, "seed": 4}}, "seed 4, theirs 3"),
        ("exact_match", {"quality": {**QUALITY, "concurrency": 2}, "benchmark": {"prompts": 160}}, None),
        ("exact_match", {"quality": None, "claims": []}, "suites none, theirs micro-tasks"),
    ],
)
def test_a_claim_is_not_judged_on_another_load(metric, change, other):
    scope = {"scope": "micro-tasks/add"} if metric == "exact_match" else {}
    theirs = recipe(quality=QUALITY, claims=[claim(metric, 1, 1, **scope)])
    mine = recipe(**{"quality": QUALITY, **change})
    found = _other_load(theirs.claims[0], mine, theirs)
    assert found == other if other is None else other in found


def test_a_run_of_another_load_is_comparable_with_no_claim_about_a_rate(tmp_path):
    change = {"benchmark": {"boots": 3, "prompt_source": "task-stream"}}
    found = compared(run(tmp_path / "a", change=change), run(tmp_path / "b"))
    (row,) = found["claims"]
    assert row["mine"]["state"] == "NOT_COMPARABLE" and "theirs random-text" in row["mine"]["reason"]
    assert row["theirs"]["state"] != "NOT_COMPARABLE" and row["mine"]["measured"] is not None
    assert found["cause"]["kind"] == "load"
    void = compared(run(tmp_path / "c", change=change, live_argv=["other"]), run(tmp_path / "d"))
    assert void["claims"][0]["mine"]["state"] == "INVALID"


def test_an_acceptance_that_differs_is_never_laid_to_the_machine(tmp_path):
    mine = run(tmp_path / "a", accepted=500, machine={"cpu": {"model": "old"}})
    found = compared(mine, run(tmp_path / "b", accepted=1000))
    row = next(row for row in found["claims"] if row["metric"] == "acceptance_length")
    assert (row["mine"]["measured"], row["theirs"]["measured"], row["apart"]) == (1.5, 2.0, True)
    assert "machine" in kinds(found) and found["cause"]["kind"] != "machine"


def test_prompts_that_differ_explain_an_acceptance(tmp_path):
    mine, theirs = run(tmp_path / "a", accepted=500), run(tmp_path / "b", accepted=1000)
    sides = [side(read_evidence(each), {"boots/1/w1": str(each)}) for each in (mine, theirs)]
    assert compare(*sides)["cause"]["kind"] == "prompts"


def test_two_runs_that_both_prove_nothing_do_not_agree_in_silence(tmp_path):
    found = compared(*(run(tmp_path / name, live_argv=["other"]) for name in "ab"))
    assert found["cause"]["kind"] == "validity"


def test_what_nothing_recorded_explains_is_not_explained(tmp_path):
    found = compared(run(tmp_path / "a", step_s=0.02), run(tmp_path / "b"))
    assert found["cause"]["kind"] is None and "was not recorded" in found["cause"]["text"]
    one = compared(run(tmp_path / "c", step_s=0.02, boots=1), run(tmp_path / "d", boots=1))
    assert one["cause"]["kind"] == "noise" and "three each tell" in one["cause"]["text"]


def test_a_run_that_proves_nothing_is_the_cause_before_all_others(tmp_path):
    mine = run(tmp_path / "a", step_s=0.02, live_argv=["python", "serve", "--other"], machine={"cpu": {"model": "x"}})
    found = compared(mine, run(tmp_path / "b"))
    assert found["mine"]["state"] == "INVALID" and found["cause"]["kind"] == "validity"
    assert "live_argv" in found["cause"]["text"]


def saturated(step_s: float = 0.01):
    """Telemetry of a load client that was at its limit: nothing that was timed counts, what was counted does."""
    return telemetry(closed_loop(8, 80, 32, step_s), client=0.95)


def test_a_guard_on_what_was_timed_explains_no_acceptance(tmp_path):
    other = {"image": "cpu", "version": "0.32.0", "flags": {"speculative-config": {"num_speculative_tokens": 3}}}
    mine = run(tmp_path / "a", accepted=500, change={"engine": other}, seen=saturated())
    found = compared(mine, run(tmp_path / "b", accepted=1000, seen=saturated()))
    assert found["cause"]["kind"] == "settings" and "speculative-config" in found["cause"]["text"]
    assert kinds(found) == {"settings", "timing"} and found["fingerprint"][-1]["mine"] == "client_saturation"


def test_runs_whose_counts_agree_have_no_gap_though_nothing_timed_in_them_counts(tmp_path):
    pair = [run(tmp_path / name, accepted=1000, change={"claims": [ACCEPTANCE]}, seen=saturated()) for name in "ab"]
    found = compared(*pair)
    assert found["mine"]["state"] == found["theirs"]["state"] == "REPRODUCED" and found["agree"]
    assert found["cause"] == {"kind": None, "text": "No gap to explain."} and found["rate"] is None


@pytest.mark.parametrize("both", [False, True])
def test_that_a_side_has_no_rate_is_laid_to_the_guard_that_took_it_and_not_to_what_else_differs(tmp_path, both):
    change = {"engine": {"image": "cpu", "version": "0.32.0", "flags": {"max-num-seqs": 4}}}
    mine = run(tmp_path / "a", change=change, seen=saturated())
    found = compared(mine, run(tmp_path / "b", **({"seen": saturated()} if both else {})))
    assert "settings" in kinds(found) and found["cause"]["kind"] == "timing"
    assert "client_saturation" in found["cause"]["text"]


def test_a_rate_that_no_verdict_rests_on_is_missed_for_the_guard_s_sake_all_the_same(tmp_path):
    change = {"claims": [{**RATE, "judge": False}, ACCEPTANCE]}
    mine = run(tmp_path / "a", accepted=1000, change=change, seen=saturated(), machine={"cpu": {"model": "old"}})
    found = compared(mine, run(tmp_path / "b", accepted=1000, change=change))
    assert found["mine"]["state"] == "REPRODUCED" and found["cause"]["kind"] == "timing"


def host_bound(one, limits: str | None = "the API server was at its limit"):
    server = {"api_server": 0.9, "engine_core": 0.5, "engine_idle": 0.4, "limits": limits}
    return replace(one, verdict={**one.verdict, "server_cpu": server})


@pytest.mark.parametrize(
    ("slow", "fast", "kind"), [(True, False, "host"), (True, True, "host"), (False, True, "machine")]
)
def test_a_host_limit_is_the_cause_only_where_it_holds_the_slower_side_back(tmp_path, slow, fast, kind):
    slower = read_side(run(tmp_path / "a", step_s=0.011, machine={"cpu": {"model": "old"}}))
    faster = read_side(run(tmp_path / "b"))
    slower, faster = host_bound(slower, "bound" if slow else None), host_bound(faster, "bound" if fast else None)
    for pair in ((slower, faster), (faster, slower)):
        found = compare(*pair)
        assert {"host", "machine"} <= kinds(found) and found["cause"]["kind"] == kind


def test_a_latency_that_lies_apart_says_too_which_side_the_host_held_back(tmp_path):
    change = {"claims": [claim("ttft_p95_ms", 50, 5)]}
    windows = [[closed_loop(8, 80, 32, 0.01, ttft_s=0.06)]] * 3
    late = read_side(write_run(tmp_path / "a", recipe(benchmark=LOAD, **change), boots=windows))
    soon = read_side(run(tmp_path / "b", change=change))
    told = dict.fromkeys(("whole", "steady", "little"), 1000.0)
    late, soon = (replace(each, verdict={**each.verdict, "output_tok_s": told}) for each in (late, soon))
    assert compare(host_bound(late), soon)["cause"]["kind"] == "host"
    assert compare(late, host_bound(soon))["cause"]["kind"] != "host"


def test_a_run_whose_timing_is_void_shows_no_load_of_its_host():
    bound = read_side(next((RESULTS / "h200/nemotron-h-synthetic").rglob("recipe.yaml")).parent)
    guards = [replace(guard, ok=False) if guard.id == "client_saturation" else guard for guard in bound.guards]
    void = replace(bound, guards=guards, verdict=judge(bound.evidence, guards))
    assert void.measured.limits and "host" not in kinds(compare(void, void))
    rows = [row for row in compare(void, bound)["fingerprint"] if row["kind"] == "host"]
    assert rows and all(row["mine"] is None and row["theirs"] for row in rows)


def test_a_run_that_was_edited_is_compared_with_nothing(tmp_path):
    mine, theirs = run(tmp_path / "a"), run(tmp_path / "b")
    (mine / "machine.json").write_text('{"slug": "faster"}')
    with pytest.raises(RunProblem, match="is not what was sealed: machine.json was changed"):
        compared(mine, theirs)


def test_what_caches_tell_of_a_hub_s_files_is_compared_where_both_tell_the_same_kind_of_digest(tmp_path):
    told = {"config.json": "a" * 40, "weights-1.safetensors": "b" * 64}
    for name, others, differing in (
        ("same", told, []),
        ("other weights", {**told, "weights-1.safetensors": "c" * 64}, ["weights-1.safetensors"]),
        ("another kind of digest", {**told, "config.json": "d" * 64}, []),
        ("one that tells nothing", {}, []),
    ):
        records = [{"model": {"files": MODEL_FILES, "told": each}} for each in (told, others)]
        mine, theirs = (run(tmp_path / name / str(n), manifest=record) for n, record in enumerate(records))
        found = compared(mine, theirs)
        assert [row["what"] for row in found["fingerprint"] if row["kind"] == "model"] == differing, name
