"""What a ladder may conclude from boots that are void, few, or of several visits: nothing that isn't shown."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bench.guards import in_words
from bench.ladder.exits import exit_code, incomplete
from bench.ladder.join import join_ladders, remake
from bench.ladder.journal import FILE, read_boots
from bench.ladder.rows import Measured, RungRuns, read_measured, rung_row
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
    recipe = each.evidence.recipe.model_copy(update={"claims": [ACCEPTANCE]})
    return replace(each, evidence=replace(each.evidence, recipe=recipe))


def failing(each: Measured, *ids: str) -> Measured:
    """The boot with guards that fail; what is left of their findings stays."""
    found = [replace(guard, ok=False, observed=3.0) if guard.id in ids else guard for guard in each.guards]
    assert sum(guard.voids for guard in found) == len(ids)
    return replace(each, guards=found, voids=in_words(found))


def row_of(runs: RungRuns) -> dict:
    row = rung_row(PLAN, runs, None, {each.visit: "1" for each in runs.measured})
    return {**row, "effect_proved": True} if "effect_proved" in row else row


def test_a_rung_of_which_no_boot_s_time_counts_is_no_whole_result(drafting: RungRuns):
    assert exit_code({"rungs": [row_of(drafting)], "left": 0}) == 0
    slow = replace(drafting, measured=[failing(each, "straggler") for each in drafting.measured])
    row = row_of(slow)
    assert row["state"] == "REPRODUCED" and row["claims"][0]["state"] == "REPRODUCED", "drafts need no clock"
    assert row["output_tok_s"] is None and "straggler" in row["why"]
    table = {"rungs": [row], "left": 0}
    assert incomplete(table) == ["mtp3 has no boot that counts"] and exit_code(table) == 7


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
    row = rung_row(PLAN, void, None, {each.visit: "1" for each in void.measured})
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
