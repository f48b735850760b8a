"""Which verdict a listing shows of a recipe: this machine's, one that proves something, the newest."""

import json
import os
from pathlib import Path

import pytest

from bench.handover import verdicts
from bench.handover.verdicts import newest_verdicts
from bench.runfolder import seal, seal_faults


def write(folder: Path, name: str, state: str, machine: str = "cpu-x86-64") -> None:
    run = folder / name
    run.mkdir(parents=True)
    (run / "verdict.json").write_text(json.dumps({"state": state, "machine": machine, "recipe": "micro/mtp1"}))
    (run / "manifest.json").write_text('{"recipe": "micro/mtp1"}')
    (run / "machine.json").write_text(json.dumps({"slug": machine}))
    seal(run)


def test_a_cut_off_run_hides_no_verdict_and_is_told(tmp_path: Path):
    runs, results = tmp_path / "runs", tmp_path / "results"
    write(runs, "20260101T000000Z-a", "REPRODUCED")
    write(runs, "20260102T000000Z-b", "INVALID")
    write(results / "h200" / "micro", "20260103T000000Z-c", "MEASURED", "h200")
    found = newest_verdicts(runs, results, "cpu-x86-64")["micro/mtp1"]
    assert (found.state, found.run, found.invalid_since) == ("REPRODUCED", "20260101T000000Z-a", "20260102T000000Z-b")
    write(runs, "20260104T000000Z-d", "NOT_REPRODUCED")
    found = newest_verdicts(runs, results, "cpu-x86-64")["micro/mtp1"]
    assert (found.state, found.invalid_since) == ("NOT_REPRODUCED", None)


def test_a_ladder_s_boots_count_and_other_machines_only_where_this_one_has_none(tmp_path: Path):
    runs, results = tmp_path / "runs", tmp_path / "results"
    write(results / "h200" / "micro" / "ladder-1" / "runs", "20260101T000000Z-a", "MEASURED", "h200")
    assert newest_verdicts(runs, results, "cpu-x86-64")["micro/mtp1"].machine == "h200"
    write(runs / "ladder-2" / "runs", "20250101T000000Z-b", "INVALID")
    assert newest_verdicts(runs, results, "cpu-x86-64")["micro/mtp1"].state == "INVALID"
    (runs / "broken").mkdir()
    (runs / "broken" / "verdict.json").write_text("[")
    (runs / "waits").mkdir()
    os.mkfifo(runs / "waits" / "verdict.json")
    assert newest_verdicts(runs, results, "h200")["micro/mtp1"].state == "MEASURED"


def told(run: Path, **changes: str) -> None:
    """The run's verdict, otherwise than it was written: no seal covers it, since it can be made again."""
    (run / "verdict.json").write_text(json.dumps({**json.loads((run / "verdict.json").read_text()), **changes}))


FORGED = {
    "no run at all": lambda run: [(run / name).unlink() for name in ("SHA256SUMS", "manifest.json", "machine.json")],
    "a file changed since": lambda run: (run / "machine.json").write_text('{"slug": "cpu-x86-64", "more": 1}'),
    "a seal that is too large": lambda run: os.truncate(run / "SHA256SUMS", 1 << 30),
    "another recipe's run": lambda run: told(run, recipe="micro/base"),
    "another machine's run": lambda run: told(run, machine="h200"),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("state", ["REPRODUCED", "INVALID"])
def test_a_verdict_that_lies_in_no_sealed_run_is_not_listed(tmp_path: Path, forge, state):
    runs = tmp_path / "runs"
    write(runs, "20260101T000000Z-a", "MEASURED")
    write(runs, "20260102T000000Z-b", state)
    forge(runs / "20260102T000000Z-b")
    found = newest_verdicts(runs, tmp_path / "results", "cpu-x86-64")
    assert found.keys() == {"micro/mtp1"} and found["micro/mtp1"].run == "20260101T000000Z-a"
    assert found["micro/mtp1"].invalid_since is None


def test_only_the_runs_that_are_named_are_looked_into(tmp_path: Path, monkeypatch):
    looked = []
    monkeypatch.setattr(verdicts, "seal_faults", lambda run: looked.append(run.name) or seal_faults(run))
    for number in range(1, 10):
        write(tmp_path / "runs", f"2026010{number}T000000Z-a", "REPRODUCED")
    newest_verdicts(tmp_path / "runs", tmp_path / "results", "cpu-x86-64")
    assert looked == ["20260109T000000Z-a"]
