"""A stranger's ladder folder, or a broken one: one clear error or a sound table, and nothing outside it is touched."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.ladder.begun import write_begun
from bench.ladder.join import join_ladders, remake
from bench.ladder.journal import Boot, Journal, locked, outcome, read_boots
from bench.ladder.sequence import rungs_here
from bench.ladder.setting import read_setting
from bench.runfolder import seal, write_text
from images.errors import OutsideProblem, Problem, RunProblem
from recipes.load import load_recipe
from tests.ladders import written_ladder

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
entry = st.fixed_dictionaries(
    {},
    optional={
        "event": st.sampled_from(["begun", "finished", "failed", "void"]) | anything,
        "rung": st.sampled_from(["base", "../x", "mtp3"]) | anything,
        "boot": st.integers() | anything,
        "run": st.sampled_from(["base-1", "../../base-1", "..", ".", "", "/etc"]) | anything,
        "cause": anything,
    },
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return written_ladder(
        tmp_path_factory.mktemp("ladder") / "whole", {"base": [0.010, 0.0101], "mtp3": [0.008, 0.0081]}
    )


@pytest.fixture
def ladder(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "ladder"))


def rows(table: dict) -> dict[str, dict]:
    return {row["rung"]: row for row in table["rungs"]}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(entry | anything, max_size=4))
def test_whatever_lines_a_journal_has_no_run_counts_that_lies_elsewhere_or_counted_before(ladder, lines):
    (ladder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    boots = read_boots(ladder)
    counted = [boot.run for boot in boots if boot.state == "finished"]
    assert len(set(counted)) == len(counted)
    assert set(counted) <= {"base-1"}
    assert all(boot.boot >= 1 and (boot.cause is None or isinstance(boot.cause, str)) for boot in boots)


def replan(folder: Path, **changes: object) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, **changes}))


def rewrite(folder: Path, name: str, text: str) -> None:
    for run in (folder / "runs").iterdir():
        write_text(run / name, text)
        seal(run)


def swap(folder: Path) -> None:
    (folder / "journal.jsonl").unlink()
    Journal(folder).ended(Boot("mtp3", 1, "base-1", "finished"))


HOSTILE = {
    "a deep journal": lambda folder: (folder / "journal.jsonl").write_text("[" * 200_000 + "\n"),
    "a journal that is a folder": lambda folder: (
        (folder / "journal.jsonl").unlink(),
        (folder / "journal.jsonl").mkdir(),
    ),
    "no plan's values": lambda folder: (folder / "plan.json").write_text("[]"),
    "a deep plan": lambda folder: (folder / "plan.json").write_text("[" * 200_000),
    "a cut plan": lambda folder: (folder / "plan.json").write_text((folder / "plan.json").read_text()[:40]),
    "negative boots": lambda folder: replan(folder, boots=-3),
    "a million boots": lambda folder: replan(folder, boots=10**6),
    "boots that are no number": lambda folder: replan(folder, boots=float("nan")),
    "no such family": lambda folder: replan(folder, family="../../etc"),
    "no such rung": lambda folder: replan(folder, rungs=["base", "../base"]),
    "no rung": lambda folder: replan(folder, rungs=[]),
    "no such metric": lambda folder: replan(folder, keep="speed", order="replicated"),
    "facts that are a list": lambda folder: rewrite(folder, "machine.json", "[]"),
    "a machine without a name": lambda folder: rewrite(folder, "machine.json", "{}"),
    "gpus that are none": lambda folder: rewrite(folder, "machine.json", '{"slug": "cpu-x86-64", "gpus": 7}'),
    "another rung's run": swap,
    "recipes that are none": lambda folder: (folder / "recipes.json").write_text('{"rungs": [{"rung": "base"}]}'),
    "deep recipes": lambda folder: (folder / "recipes.json").write_text("[" * 200_000),
    "another family's recipes": lambda folder: write_begun(
        folder, rungs_here(read_setting(folder), [load_recipe("micro-cuda/base")], {"gpus": []})
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_ladder_is_one_clear_error_or_a_table_without_its_figures(ladder, name):
    HOSTILE[name](ladder)
    try:
        table = remake(ladder)
    except Problem as problem:
        assert str(problem) and "Traceback" not in str(problem)
        return
    assert json.loads((ladder / "ladder.json").read_text()) == json.loads(json.dumps(table))
    assert name in {"a deep journal", "a journal that is a folder"}
    assert all(row.get("output_tok_s") is None for row in table["rungs"])


def test_a_run_outside_the_folder_a_linked_one_and_a_copy_count_for_nothing(ladder, tmp_path):
    shutil.move(ladder / "runs" / "base-1", tmp_path / "elsewhere")
    (ladder / "runs" / "base-1").symlink_to(tmp_path / "elsewhere")
    shutil.copytree(ladder / "runs" / "base-2", ladder / "runs" / "copy")
    Journal(ladder).ended(Boot("base", 3, "copy", "finished"))
    Journal(ladder).ended(Boot("mtp3", 3, "base-2", "finished"))
    boots = {(boot.rung, boot.boot): boot for boot in read_boots(ladder)}
    assert "link" in boots["base", 1].cause
    assert boots["base", 2].state == "finished"
    assert "the same measurement as base, boot 2" in boots["base", 3].cause
    assert "the same measurement as base, boot 2" in boots["mtp3", 3].cause
    assert rows(remake(ladder))["base"]["run"] == ["base-2"]


def test_what_links_in_a_ladder_s_folder_point_to_is_never_written(ladder, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in (".lock", "journal.jsonl", "ladder.json"):
        (ladder / name).unlink(missing_ok=True)
        (ladder / name).symlink_to(precious)
    with pytest.raises(RunProblem, match=r"a ladder can't be run in it"), locked(ladder):
        pass
    with pytest.raises(OutsideProblem, match="can't be written"):
        Journal(ladder).begun("base", 1, "x")
    remake(ladder)
    assert precious.read_text() == "mine"
    (ladder / ".lock").unlink()
    shutil.rmtree(ladder / "runs")
    (ladder / "runs").symlink_to(tmp_path)
    with pytest.raises(RunProblem, match="is a link"), locked(ladder):
        pass


def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(ladder):
    for name in (".lock", "journal.jsonl"):
        (ladder / name).unlink(missing_ok=True)
        os.mkfifo(ladder / name)
    assert read_boots(ladder) == []
    with pytest.raises(RunProblem), locked(ladder):
        pass
    with pytest.raises(OutsideProblem):
        Journal(ladder).begun("base", 1, "x")


def test_boots_of_two_recipes_or_engines_give_no_figure_and_no_step(tmp_path):
    edited = {"base-2": {"engine": {"name": "cpu", "identity": "f" * 16, "answered": ["0.32.0"]}}}
    folder = written_ladder(tmp_path / "a", {"base": [0.01, 0.0101], "mtp3": [0.008, 0.0081]}, changed=edited)
    found = rows(remake(folder))
    assert found["base"]["state"] == "INVALID" and "the engine changed between them" in found["base"]["why"]
    assert found["base"].get("output_tok_s") is None
    assert found["mtp3"]["output_tok_s"] > 0
    assert found["mtp3"]["step_gain"] is None and found["mtp3"]["step_why"] == "base gave no figure to compare with"
    other = {f"mtp3-{boot}": edited["base-2"] for boot in (1, 2)}
    folder = written_ladder(tmp_path / "b", {"base": [0.01, 0.0101], "mtp3": [0.008, 0.0081]}, changed=other)
    table = remake(folder)
    assert rows(table)["mtp3"]["step_why"] == "not comparable with base: the engine changed between them"
    assert rows(table)["mtp3"]["step_gain"] is None and table["whole"]["ratio"] is None


def test_a_joined_ladder_takes_nothing_from_beyond_a_failed_run_s_links_and_leaves_no_half_folder(ladder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    run = ladder / "runs" / "base-9"
    run.mkdir()
    (run / "server.log").symlink_to(secret)
    Journal(ladder).ended(Boot("base", 9, "base-9", "failed", "it died"))
    other = written_ladder(tmp_path / "other", {"base": [0.0103]}, tag="b")
    made, table = join_ladders([ladder, other], tmp_path / "joined")
    assert not [file for file in made.rglob("*") if file.is_file() and file.read_bytes() == b"mine"]
    assert rows(table)["base"]["failed"][0]["cause"] == "it died"
    assert len(rows(table)["base"]["run"]) == 3
    rewrite(other, "machine.json", "[]")
    before = sorted((tmp_path / "joined").iterdir())
    with pytest.raises(Problem):
        join_ladders([other, ladder], tmp_path / "joined")
    assert sorted((tmp_path / "joined").iterdir()) == before


@pytest.mark.parametrize(
    ("failure", "state"),
    [
        (None, "finished"),
        ({"stage": "boot 1", "cause": "CUDA out of memory"}, "failed"),
        ({"stage": "boot 1", "cause": "interrupted", "outside": True}, "void"),
        ({"stage": "boot 1", "cause": "No space left on device", "outside": True}, "void"),
        ("not written", "void"),
    ],
)
def test_what_stopped_a_boot_from_outside_is_done_again_and_what_the_rung_did_is_not(tmp_path, failure, state):
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    if failure != "not written":
        write_text(run / "manifest.json", json.dumps({"failure": failure}))
    seal(run)
    assert outcome(tmp_path, "base", 1, run).state == state
    (run / "SHA256SUMS").unlink()
    assert outcome(tmp_path, "base", 1, run).state == "void", "a run that could not be closed is no evidence"
