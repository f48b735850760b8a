"""Quality scores: intervals and paired differences against figures worked out elsewhere."""

import time

import pytest

from bench.evidence import read_evidence
from bench.quality.answers import save_answers
from bench.quality.score import paired_difference, paired_differences, score, score_suite
from bench.quality.suites import suite_items
from bench.runfolder import seal
from bench.verdict import judge
from images.errors import RunProblem, UsageProblem
from tests.runs import closed_loop, recipe, telemetry, write_run


def answers(pattern: str, task: str = "add") -> list[dict]:
    return [
        {"id": f"{task}-{n}", "task": task, "prompt": f"{n}", "expected": "1", "got": mark, "exact": mark == "1"}
        for n, mark in enumerate(pattern)
    ]


def test_wilson_s_interval_is_the_textbook_s():
    found = score([True] * 81 + [False] * 182)  # Newcombe 1998, table I: 81 of 263
    assert found.share == pytest.approx(0.3080, abs=5e-5)
    assert found.wilson95 == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert score([True] * 50).wilson95[1] == pytest.approx(1.0)


def test_a_suite_is_scored_by_task_and_as_a_whole():
    found = score_suite(answers("1101") + answers("00", "copy"))
    assert {name: (each["exact"], each["n"]) for name, each in found.items()} == {
        "add": (3, 4),
        "copy": (0, 2),
        "all": (3, 6),
    }


def test_the_paired_difference_counts_only_items_that_changed():
    found = paired_difference(answers("11110000" * 10), answers("11010010" * 10))
    assert (found.n, found.only_first, found.only_second) == (80, 10, 10)
    assert found.difference == 0 and found.p == pytest.approx(1.0)
    worse = paired_difference(answers("1" * 100), answers("0" * 12 + "1" * 88))
    assert worse.difference == pytest.approx(-0.12)
    assert worse.p == pytest.approx(2 * 0.5**12)
    assert worse.interval95[0] < -0.12 < worse.interval95[1] < 0


def test_equal_answers_have_an_interval_of_nearly_nothing_and_never_of_nothing():
    same = paired_difference(answers("1" * 300), answers("1" * 300))
    assert same.difference == 0 and same.p == 1
    assert -0.01 < same.interval95[0] < 0 < same.interval95[1] < 0.01


def test_a_hundred_thousand_tasks_of_one_item_are_scored_in_one_pass():
    many = [{"id": str(n), "task": str(n), "exact": n % 2 == 0} for n in range(100_000)]
    began = time.process_time()
    found = score_suite(many)
    assert time.process_time() - began < 10, "a pass a task takes minutes"
    assert len(found) == 100_001 and found["all"]["exact"] == 50_000 and found["7"]["n"] == 1


def test_answers_of_a_run_in_which_only_the_timing_is_void_are_compared_and_a_void_run_s_are_not(tmp_path):
    subject = recipe(quality={"suites": ["micro-tasks"], "items": 2, "seed": 3})
    kept = [{**vars(item), "got": item.expected} for item in suite_items("micro-tasks", 3, 2)]
    runs = []
    for name, options in {
        "timing": {"seen": telemetry(closed_loop(8, 80, 32, 0.01), client=0.95)},
        "run": {"live_argv": ["other"]},
    }.items():
        run = write_run(tmp_path / name, subject, sealed=False, **options)
        save_answers(run, "micro-tasks", kept)
        seal(run)
        runs.append(read_evidence(run))
    timing, void = runs
    failed = {guard["id"] for guard in judge(timing)["guards"] if guard["ok"] is False}
    assert failed == {"client_saturation"}
    assert paired_differences(timing, timing)["micro-tasks"]["n"] == len(kept)
    with pytest.raises(RunProblem, match=r"is INVALID \(live_argv\): it proves nothing"):
        paired_differences(timing, void)


def test_different_items_are_never_compared():
    with pytest.raises(ValueError, match="different items"):
        paired_difference(answers("11"), answers("111"))


def test_an_unknown_suite_is_named():
    with pytest.raises(UsageProblem, match="unknown quality suite 'mmlu'"):
        suite_items("mmlu", 1, 1)


def exact_claim(published: float) -> dict:
    return {
        "id": "exact",
        "metric": "exact_match",
        "scope": "micro-tasks/add",
        "published": published,
        "tolerance": 0.02,
        "status": "measured",
        "machine": "any",
        "source": "a test",
    }


def answered(seed: int) -> list[dict]:
    """All items of the suite of a seed, ten a task, with the right answers."""
    items = suite_items("micro-tasks", seed, 10)
    return [
        {"id": i.id, "task": i.task, "prompt": i.prompt, "expected": i.expected, "got": i.expected, "exact": True}
        for i in items
    ]


@pytest.mark.parametrize(("wrong", "state"), [(0, "REPRODUCED"), (3, "NOT_REPRODUCED")])
def test_exact_match_is_judged_from_the_kept_answers(tmp_path, wrong, state):
    quality = {"suites": ["micro-tasks"], "items": 10, "seed": 3}
    run = write_run(tmp_path / "run", recipe(quality=quality, claims=[exact_claim(1.0)]), sealed=False)
    kept = answered(3)
    for answer in [answer for answer in kept if answer["task"] == "add"][:wrong]:
        answer["got"] = "no"  # `exact` in the file still says True: it isn't believed
    save_answers(run, "micro-tasks", kept)
    seal(run)
    verdict = judge(read_evidence(run))
    assert verdict["state"] == state, verdict["claims"]
    assert verdict["quality"]["micro-tasks"]["add"]["exact"] == 10 - wrong


def test_a_suite_with_missing_answers_voids_the_run(tmp_path):
    quality = {"suites": ["micro-tasks"], "items": 2, "seed": 3}
    run = write_run(tmp_path / "run", recipe(quality=quality), sealed=False)
    save_answers(run, "micro-tasks", answers("11"))
    seal(run)
    verdict = judge(read_evidence(run))
    assert verdict["state"] == "INVALID"
    assert [guard["id"] for guard in verdict["guards"] if guard["ok"] is False] == ["quality_complete"]


def test_answers_to_other_questions_of_the_same_names_void_the_run(tmp_path):
    quality = {"suites": ["micro-tasks"], "items": 10, "seed": 3}
    run = write_run(tmp_path / "run", recipe(quality=quality, claims=[exact_claim(1.0)]), sealed=False)
    easier = {"prompt": "add 1 1>", "expected": "2", "got": "2"}
    for kept in (answered(4), [{**each, **easier} if each["task"] == "add" else each for each in answered(3)]):
        save_answers(run, "micro-tasks", kept)
        seal(run)
        verdict = judge(read_evidence(run))
        (found,) = [guard for guard in verdict["guards"] if guard["ok"] is False]
        assert found["id"] == "quality_complete" and "of them other than the recipe's" in found["observed"]
        assert verdict["state"] == "INVALID"
