"""Which verdict a listing shows of a recipe: this machine's, one that proves something, the newest."""

import json
import os
from pathlib import Path

from bench.handover.verdicts import newest_verdicts


def write(folder: Path, name: str, state: str, machine: str = "cpu-x86-64") -> None:
    run = folder / name
    run.mkdir(parents=True)
    (run / "verdict.json").write_text(json.dumps({"state": state, "machine": machine, "recipe": "micro/mtp1"}))
    (run / "manifest.json").write_text("{}")


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
