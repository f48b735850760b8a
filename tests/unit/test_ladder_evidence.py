"""What a ladder may conclude from boots that are void, few, or of several visits: nothing that isn't shown."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench.guards import in_words
from bench.ladder.decide import decide
from bench.ladder.exits import exit_code, incomplete
from bench.ladder.join import join_ladders, remake
from bench.ladder.journal import FILE, read_boots
from bench.ladder.proof import Proof
from bench.ladder.rows import Ladder, Measured, RungRuns, answers, read_measured, rung_row
from bench.ladder.setting import read_setting
from bench.ladder.steps import step
from bench.quality.score import paired_difference
from bench.report.ladder import notes, print_ladder_table
from bench.statistics import noise_floor
from recipes.schema import Claim
from tests.ladders import written_ladder
from tests.runs import claim

PLAN = {"rung": "mtp3", "title": "", "delta": [], "published_tok_s": None, "applies": None}
ACCEPTANCE = Claim.model_validate(claim("acceptance_length", 1.5, 0.05))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> RungRuns:
    """Three sound boots of a rung whose acceptance length is claimed, rightly."""
    folder = written_ladder(tmp_path_factory.mktemp("ladder") / "whole", {"mtp3": [0.008, 0.0081, 0.0079]})
    runs = read_measured(folder, read_boots(folder))["mtp3"]
    return replace(runs, measured=[claiming(each) for each in runs.measured])


def claiming(each: Measured) -> Measured:
    return with_claims(each, [ACCEPTANCE])


def failing(each: Measured, *ids: str) -> Measured:
    """The boot with guards that fail; what is left of their findings stays."""
    found = [replace(guard, ok=False, observed=3.0) if guard.id in ids else guard for guard in each.guards]
    assert sum(guard.voids for guard in found) == len(ids)
    return replace(each, guards=found, voids=in_words(found))


def row_of(runs: RungRuns) -> dict:
    row = rung_row(PLAN, runs, None, Ladder([runs]))
    return {**row, "effect_proved": True} if "effect_proved" in row else row


def test_a_rung_of_which_no_boot_s_time_counts_is_no_whole_result(drafting: RungRuns):
    assert exit_code({"rungs": [row_of(drafting)], "left": 0}) == 0
    slow = replace(drafting, measured=[failing(each, "straggler") for each in drafting.measured])
    row = row_of(slow)
    assert row["state"] == "REPRODUCED" and row["claims"][0]["state"] == "REPRODUCED", "drafts need no clock"
    assert row["output_tok_s"] is None and "straggler" in row["why"]
    table = {"rungs": [row], "left": 0}
    assert incomplete(table) == ["mtp3 has no boot whose timing counts"] and exit_code(table) == 7


def test_a_rung_whose_boots_prove_nothing_is_invalid_whichever_boot_came_first(drafting: RungRuns):
    first, second, third = drafting.measured
    void = replace(drafting, measured=[failing(each, "prefix_hits") for each in drafting.measured])
    row = row_of(void)
    assert row["state"] == "INVALID" and row["run"] == [] and "prefix_hits" in row["why"]
    half = [failing(first, "straggler"), failing(second, "prefix_hits")]
    for boots in (half, half[::-1]):
        row = row_of(replace(drafting, measured=boots))
        assert row["run"] == ["mtp3-1"] and exit_code({"rungs": [row], "left": 0}) == 7
    both = [failing(second, "dispatch_delay"), failing(third, "straggler")]
    row = row_of(replace(drafting, measured=both))
    assert "straggler" in row["why"] and "dispatch_delay" in row["why"] and row["output_tok_s"] is None


def test_a_boot_that_proves_nothing_proves_no_effect(drafting: RungRuns):
    void = replace(drafting, measured=[failing(each, "prefix_hits") for each in drafting.measured])
    row = rung_row(PLAN, void, None, Ladder([void]))
    assert row["effect_proved"] is not True


def cut_off(folder: Path, *kept: int) -> Path:
    """The ladder as it is where only these boots of each rung were done."""
    lines = (folder / FILE).read_text().splitlines(keepends=True)
    (folder / FILE).write_text("".join(line for line in lines if json.loads(line)["boot"] in kept))
    names = {json.loads(line)["run"] for line in lines if json.loads(line)["boot"] not in kept}
    for name in names:
        shutil.rmtree(folder / "runs" / name)
    return folder


def a_visit(folder: Path, number: int, boots: int) -> Path:
    """A ladder of two rungs; no two visits measure quite the same, else one is a copy of the other."""
    steps = {name: [s * (1 + number / 1e3 + boot / 1e2) for boot in range(boots)] for name, s in STEPS.items()}
    return written_ladder(folder / f"visit{number}", steps, tag=f"-{number}")


STEPS = {"base": 0.010, "mtp3": 0.008}  # s a token


def test_ladders_that_were_cut_off_are_not_made_whole_by_being_joined(tmp_path: Path):
    first = cut_off(a_visit(tmp_path, 1, 3), 1)
    second = cut_off(a_visit(tmp_path, 2, 3), 2)
    assert remake(first)["left"] == 4
    _, table = join_ladders([first, second], tmp_path / "joined")
    assert table["left"] == 2 and exit_code(table) == 7
    third = cut_off(a_visit(tmp_path, 3, 3), 2)
    _, table = join_ladders([first, second, third], tmp_path / "joined")
    assert table["left"] == 0, "three boots were asked for, and three there are, whatever each visit called its own"


def test_two_visits_of_one_boot_each_are_two_boots_of_a_whole_ladder(tmp_path: Path):
    _, table = join_ladders([a_visit(tmp_path, number, 1) for number in (1, 2)], tmp_path / "joined")
    assert table["left"] == 0 and [len(row["run"]) for row in table["rungs"]] == [2, 2]


def test_nothing_is_seldom_a_step_beyond_noise_even_from_one_boot_each():
    """The floor of five boots of one thing, then two more boots of it: at most one in twenty may look like a step."""
    rng, trials = np.random.default_rng(3), 4000
    seen = 0
    for _ in range(trials):
        boots = list(100 * np.exp(rng.normal(0, 0.02, 7)))
        found = step({"1": boots[5:6]}, {"1": boots[6:]}, noise_floor(boots[:5]))
        seen += found.below_noise is False
    assert seen / trials < 0.055


def test_a_step_of_one_boot_each_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture):
    table = remake(written_ladder(tmp_path / "a", {"base": [0.010], "mtp3": [0.008]}))
    row = table["rungs"][1] | step({"1": [100.0]}, {"1": [106.0]}, 0.02).__dict__
    row |= {"step_gain": row["gain"], "step_ci95": None, "step_why": row["why"], "below_noise": False, "delta": []}
    print_ladder_table({**table, "rungs": [row]}, Console(width=250))
    assert "one boot, no interval; by the noise floor ±2.8%" in capsys.readouterr().out


def test_a_guard_metric_passes_only_where_it_is_shown_to_be_no_worse(tmp_path: Path, monkeypatch):
    """A change that doubles the rate; its TPOT is the same in truth, seen sharply or through a wide scatter."""
    folder = written_ladder(tmp_path / "a", {"base": [0.010, 0.0101, 0.0099], "mtp3": [0.008, 0.0081, 0.0079]})
    runs = read_measured(folder, read_boots(folder))
    setting = replace(read_setting(folder), keep="output_tok_s", guards=["ttft_p95_ms"])

    def decided(ttft: dict[str, list[float]], boots: int = 3, floors: dict[str, float] | None = None):
        sides = [shown(runs[name], ttft[name][:boots]) for name in ("base", "mtp3")]
        monkeypatch.setattr("bench.ladder.rows.floors_of", lambda _: floors or {})
        found = decide(setting, *sides, Ladder(sides, deciding=True))
        return found.kept, next(reason for reason in found.reasons if "guard" in reason)

    kept, said = decided({"base": [50.0, 50.1, 49.9], "mtp3": [50.2, 50.0, 50.1]})
    assert kept and said.startswith("guard metric no worse, or by less than 5%")
    kept, said = decided({"base": [50.0, 60.0, 40.0], "mtp3": [55.0, 45.0, 58.0]})
    assert not kept and "not shown to be no worse" in said and "more than 5%" in said
    kept, said = decided({"base": [50.0, 50.1, 49.9], "mtp3": [51.2, 51.0, 51.1]})
    assert not kept and said.startswith("guard metric worse"), "beyond noise is worse, however little"
    once = {"base": [50.0], "mtp3": [50.5]}
    known = {"output_tok_s": 0.01, "ttft_p95_ms": 0.02}
    assert decided(once, 1, known)[0]
    assert not decided(once, 1, {**known, "ttft_p95_ms": 0.03})[0], "it may be 1 + 4.2% worse"


def shown(runs: RungRuns, ttft_ms: list[float]) -> RungRuns:
    """A rung's boots with these TTFTs, its effect proved."""
    boots = []
    for each, value in zip(runs.measured, ttft_ms, strict=False):
        latency = {**each.figures.latency_ms, "ttft": {**each.figures.latency_ms["ttft"], "p95": value}}
        proofs = [Proof("x", True, "")]
        boots.append(replace(each, proofs=proofs, figures=replace(each.figures, latency_ms=latency)))
    return replace(runs, measured=boots)


@pytest.mark.parametrize(
    ("items", "lost", "gained", "kept", "said"),
    [
        (300, 0, 0, True, "quality passes"),
        (300, 3, 3, True, "quality passes"),
        (300, 5, 0, False, "quality is worse"),
        (300, 11, 11, False, "quality not shown to be no worse"),
        (20, 0, 0, False, "quality not shown to be no worse"),
        (300, 0, 5, True, "quality passes"),
    ],
)
def test_quality_passes_only_where_it_is_shown_to_be_no_worse(tmp_path, items, lost, gained, kept, said):
    folder = written_ladder(tmp_path / "a", {"base": [0.010, 0.0101, 0.0099], "mtp3": [0.008, 0.0081, 0.0079]})
    runs = read_measured(folder, read_boots(folder))
    setting = replace(read_setting(folder), keep="output_tok_s", guards=[], quality=True)
    before = answered(items, set(range(lost, lost + gained)))
    after = answered(items, set(range(lost)))
    sides = [with_answers(shown(runs[name], [50.0] * 3), each) for name, each in (("base", before), ("mtp3", after))]
    found = decide(setting, *sides, Ladder(sides, deciding=True))
    assert found.kept is kept
    reason = next(reason for reason in found.reasons if "quality" in reason)
    assert reason.startswith(said)
    # The comparison of two runs says "changed" by the same interval: what it calls changed for the worse isn't kept.
    assert (paired_difference(before, after).interval95[1] < 0) == (said == "quality is worse")


def answered(items: int, wrong: set[int]) -> list[dict]:
    return [{"id": str(at), "prompt": "p", "task": "t", "exact": at not in wrong} for at in range(items)]


def with_answers(runs: RungRuns, found: list[dict]) -> RungRuns:
    boots = [replace(each, evidence=replace(each.evidence, quality={"suite": found})) for each in runs.measured]
    return replace(runs, measured=boots)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("guards", [(), ("straggler",)], ids=["a boot that counts", "a boot whose timing is void"])
def test_no_boot_s_answers_hide_behind_another_boot_s(drafting: RungRuns, at: int, guards: tuple[str, ...]):
    runs = with_answers(drafting, answered(20, set()))
    claimed = Claim.model_validate(claim("exact_match", 1, 0.02, scope="suite/t"))
    boots = [with_claims(each, [claimed]) for each in runs.measured]
    assert row_of(replace(runs, measured=boots))["claims"][0]["state"] == "REPRODUCED"
    wrong = replace(boots[at].evidence, quality={"suite": answered(20, set(range(5, 20)))})
    boots[at] = failing(replace(boots[at], evidence=wrong), *guards)
    row = row_of(replace(runs, measured=boots))
    assert row["quality"]["suite"]["all"]["exact"] == 5
    assert row["claims"][0]["state"] == "INCONCLUSIVE" and "0.25 to 1 over 3 boots" in row["claims"][0]["reason"]
    assert answers(replace(runs, measured=boots)) == wrong.quality, "a change of quality is by the same answers"


def with_claims(each: Measured, claims: list[Claim]) -> Measured:
    recipe = each.evidence.recipe.model_copy(update={"claims": claims})
    return replace(each, evidence=replace(each.evidence, recipe=recipe))


def said_of(table: dict, **rows: dict) -> str:
    """What the notes say of a table in which these rungs' rows are otherwise."""
    changed = [{**row, "effect_proved": True, **rows.get(row["rung"], {})} for row in table["rungs"]]
    return next((line for line in notes({**table, "rungs": changed}) if "whole ladder" in line), "")


def test_a_ladder_that_is_not_whole_says_the_way_on_that_there_is(tmp_path: Path):
    table = remake(a_visit(tmp_path, 1, 2))
    assert said_of(table) == ""
    spoilt = {"output_tok_s": None, "boots": [{**boot, "voided_by": ["x"]} for boot in table["rungs"][1]["boots"]]}
    said = said_of(table, mtp3=spoilt)
    assert "--resume FOLDER --boots 3 measures once more: mtp3" in said and "goes on" not in said
    said = said_of(table, mtp3={"effect_proved": False})
    assert "mend the recipe and start a new ladder" in said and "--resume" not in said
    died = {"output_tok_s": None, "boots": [], "failed": [{"boot": 1, "run": None, "cause": "it died"}]}
    said = said_of(table, mtp3=died)
    assert "More boots can't mend mtp3" in said and "--resume" not in said
    assert "--resume FOLDER goes on" in said_of(remake(cut_off(a_visit(tmp_path, 2, 2), 1)))


def test_the_ratio_of_rungs_that_its_own_boots_chose_is_told_as_flattered(tmp_path: Path):
    table = remake(a_visit(tmp_path, 1, 2))
    line = next(line for line in notes(table) if "÷" in line)
    assert "flatters" not in line
    kept = {**table, "keep_if_better": "output_tok_s"}
    assert "by the boots that chose these rungs" in next(line for line in notes(kept) if "÷" in line)
