"""Ladders through the front door: on the reference engine, whose truth is known, and micro's on the real one."""

import json
import os
import random
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from bench.evidence import Resolved, read_evidence
from bench.guards import run_guards
from bench.ladder.proof import effect, proofs
from bench.ladder.resolve import resolved_record
from bench.plan import Options, gather
from images.engine import ensure_engine
from recipes.load import load_recipe
from tests.disturbed import ended_well, sound_runs
from tests.ladders import FAMILY, RUNGS, Workshop, base, rung

KILLS = 10
INVALID = 7


def rows(table: dict) -> dict[str, dict]:
    return {row["rung"]: row for row in table["rungs"]}


def test_each_change_is_measured_alone_its_effect_proved_and_a_finished_ladder_stays_what_it_is(tmp_path):
    shop = Workshop(tmp_path)
    code, table, said = shop.ladder("--recipe", FAMILY, "--boots", "3")
    assert ended_well(code, table), said
    found = rows(table)
    assert table["order"] == "interleaved" and table["drift"]["rounds"].keys() == {"1", "2", "3"}
    assert all(row["effect_proved"] is True and len(sound_runs(row)) == 3 for row in found.values())
    assert found["base"]["step_gain"] is None and found["mtp1"]["against"] == "base"
    # 1.8 tokens a step that takes 1.1 times as long; then steps of 0.8 of that.
    assert found["mtp1"]["acceptance_length"] == pytest.approx(1.8, abs=0.03)
    low, high = found["mtp1"]["step_ci95"]
    assert low < found["mtp1"]["step_gain"] < high  # how high it is, other work on the cores decides
    assert found["fp16-mamba-state"]["delta"] == ["--mamba-ssm-cache-dtype float16"]
    folder = shop.folder / table["folder"]
    boots = [
        json.loads(line)["boot"] for line in (folder / "journal.jsonl").read_text().splitlines() if "begun" in line
    ]
    assert boots == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    before = (folder / "ladder.json").read_bytes()
    code, _, said = shop.ladder("--resume", str(folder))
    assert code == 0 and "boot 1" not in said
    assert (folder / "ladder.json").read_bytes() == before


BROKEN = {
    "no-op": ({}, ("max-num-seqs",), {"flags": {"max-num-seqs": 256}}, "the engine makes the same of both"),
    "overridden": (
        {"REFERENCE_FORCES": "mamba_ssm_cache_dtype=float32"},
        (),
        {"flags": {"mamba-ssm-cache-dtype": "float16"}},
        'mamba-ssm-cache-dtype: declared "float16", the engine makes it "float32"',
    ),
    "state reset": (
        {"REFERENCE_RESETS_STATE": "1"},
        (),
        {"flags": {"mamba-ssm-cache-dtype": "float16"}},
        "the log says: Reset SSM cache type to float32",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rung_without_effect_is_not_called_proved(tmp_path, name):
    env, without, change, why = BROKEN[name]
    shop = Workshop(tmp_path, {"broken": change}, base(env, without))
    code, table, said = shop.ladder("--recipe", FAMILY, "--boots", "1")
    assert code == INVALID, said
    found = rows(table)
    assert found["base"]["effect_proved"] is True, found["base"]["effect_why"]
    assert found["broken"]["effect_proved"] is False
    assert why in found["broken"]["effect_why"]


def test_asynchronous_scheduling_at_its_default_or_forced_off_is_refused_before_a_boot(tmp_path):
    change = {"async": {"flags": {"async-scheduling": True}}}
    shop = Workshop(tmp_path / "default", change, base({}, ("async-scheduling",)))
    code, table, said = shop.ladder("--recipe", FAMILY, "--boots", "1")
    assert (code, table) == (2, {})
    assert "async-scheduling must be declared" in said
    shop = Workshop(tmp_path / "declared", change)
    code, table, said = shop.ladder("--recipe", FAMILY, "--boots", "1")
    assert (code, table) == (2, {})
    assert "async-scheduling can't be on with the CPU engine" in said
    assert not (shop.folder / ".runs").exists()


def test_a_rung_that_dies_at_boot_is_told_with_its_cause_and_the_ladder_goes_on(tmp_path):
    shop = Workshop(tmp_path, {"dies": {"env": {"REFERENCE_DIES": "CUDA out of memory"}}})
    library = shop.folder / "recipes/library" / FAMILY
    (library / "mtp1.yaml").write_text(yaml.safe_dump(rung("mtp1", "base", RUNGS["mtp1"]), sort_keys=False))
    code, table, _ = shop.ladder("--recipe", FAMILY, "--boots", "1", "--rungs", "base,dies,mtp1")
    found = rows(table)
    assert code == INVALID
    assert "CUDA out of memory" in found["dies"]["failed"][0]["cause"]
    assert found["dies"].get("output_tok_s") is None, "it never counts as zero"
    assert len(sound_runs(found["mtp1"])) == 1 and table["left"] == 0


@pytest.mark.timeout(2400)
def test_a_ladder_killed_ten_times_ends_with_the_same_windows_counts_and_decisions(tmp_path):
    drafts = {"speculative-config": {"method": "mtp", "num_speculative_tokens": 3}}
    rungs = {"mtp1": RUNGS["mtp1"], "mtp3": {"flags": drafts}}
    # A metric that other work on the cores doesn't move, so that the decision is the same whenever it is taken.
    metric = "acceptance_length"
    keep = ("--keep-if-better", metric, "--guard", metric, "--without-quality", "--boots", "3", "--rungs", "mtp1,mtp3")
    whole, started = Workshop(tmp_path / "whole", rungs), time.monotonic()
    code, undisturbed, said = whole.ladder("--recipe", FAMILY, *keep)
    assert ended_well(code, undisturbed), said
    lasted = time.monotonic() - started
    cut = Workshop(tmp_path / "cut", rungs)
    from_the_start = argv = cut.argv("--recipe", FAMILY, *keep)
    dice, kills = random.Random(5), 0
    while kills < KILLS:
        known = ladders_of(cut)
        process = subprocess.Popen(
            argv, cwd=cut.folder, env=cut.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with suppress(subprocess.TimeoutExpired):
            # Together as long as a whole ladder: one that is over before its tenth kill is followed by another.
            assert process.wait(timeout=dice.uniform(0.5, 2 * lasted / KILLS)) in {0, INVALID}
            argv = from_the_start
            continue
        process.kill()
        process.wait()
        kills += 1
        if begun := ladders_of(cut) - known:
            argv = cut.argv("--resume", str(begun.pop()))
    for folder in ladders_of(cut):
        code, resumed, said = cut.ladder("--resume", str(folder))
        assert ended_well(code, resumed), said
        assert resumed["left"] == 0
        assert [each["kept"] for each in undisturbed["decisions"]] == [True]
        assert what_was_done(resumed, folder) == what_was_done(undisturbed, whole.folder / undisturbed["folder"])


def ladders_of(shop: Workshop) -> set[Path]:
    """The folders of a workshop's ladders."""
    return set((shop.folder / ".runs").glob("ladder-*"))


def what_was_done(table: dict, folder: Path) -> dict:
    """Which windows with which prompts count, how many, and what was decided: no rate, which no two runs share."""
    found = {}
    for row in table["rungs"]:
        runs = [folder / "runs" / run for run in sound_runs(row)]
        read = [read_evidence(run) for run in runs]
        found[row["rung"]] = {
            "boots": [boot["boot"] for boot in row["boots"]],
            "prompts": sorted(run.joinpath("prompts.sha256").read_text() for run in runs),
            "requests": [[len(window.arrays["start_s"]) for window in evidence.windows] for evidence in read],
        }
    decisions = [(each["rung"], each["against"], each["kept"]) for each in table["decisions"]]
    return {"rungs": found, "decisions": decisions}


def test_a_boot_whose_files_were_changed_is_void_and_done_again(tmp_path):
    shop = Workshop(tmp_path, {})
    _, table, _ = shop.ladder("--recipe", FAMILY, "--boots", "1")
    folder = shop.folder / table["folder"]
    (run,) = (folder / "runs").iterdir()
    (run / "claims.json").write_text("[ ]")
    code, again, _ = shop.ladder("--resume", str(folder))
    assert ended_well(code, again)
    assert "claims.json was changed" in again["void_boots"][0]["cause"]
    assert run.name not in sound_runs(rows(again)["base"])


def interrupted(shop: Workshop, *options: str, at: str, with_signal: int) -> tuple[int, str, str]:
    """Run a ladder, send a signal when it says `at`: its exit code, what it printed and what it said."""
    argv = [*shop.argv(*options), "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(argv, cwd=shop.folder, env=shop.environ, **pipes)
    said = ""
    for line in process.stderr:
        said += line
        if at in line:
            process.send_signal(with_signal)
            break
    printed, rest = process.communicate(timeout=120)
    return process.returncode, printed, said + rest


def test_a_ladder_interrupted_at_any_stage_says_where_it_is_and_goes_on_from_there(tmp_path):
    shop = Workshop(tmp_path, {})
    code, printed, said = interrupted(shop, "--recipe", FAMILY, "--boots", "1", at="Ladder ", with_signal=signal.SIGINT)
    assert code == INVALID and json.loads(printed)["left"] == 1
    folder = json.loads(printed)["folder"]
    assert f"--resume {folder} goes on" in said
    stages = {"starting the engine": signal.SIGTERM, "warming up": signal.SIGINT, "window 1": signal.SIGHUP}
    for number, (stage, with_signal) in enumerate(stages.items(), start=1):
        code, printed, said = interrupted(shop, "--resume", folder, at=stage, with_signal=with_signal)
        assert code == INVALID and "Traceback" not in said
        assert len(json.loads(printed)["void_boots"]) == number
    code, table, _ = shop.ladder("--resume", folder)
    assert ended_well(code, table) and table["left"] == 0


def test_a_boot_whose_port_somebody_takes_is_done_again_and_a_changed_recipe_is_not_mixed_in(tmp_path):
    shop = Workshop(tmp_path, {})
    _, table, _ = shop.ladder("--recipe", FAMILY, "--boots", "1")
    folder = table["folder"]
    argv = [*shop.argv("--resume", folder, "--boots", "2"), "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(argv, cwd=shop.folder, env=shop.environ, **pipes)
    assert any("starting the engine" in line for line in process.stderr)
    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taker.bind(("127.0.0.1", 8611))
        taker.listen()
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == INVALID and not rows(json.loads(printed))["base"]["failed"]
    assert "8611" in json.loads(printed)["void_boots"][0]["cause"]
    file = shop.folder / "recipes/library" / FAMILY / "base.yaml"
    whole = file.read_text()
    file.write_text(whole.replace("max-num-seqs: 16", "max-num-seqs: 32"))
    code, _, said = shop.ladder("--resume", folder)
    assert code == 1 and "quick/base is another recipe than when boot 1 of it was measured" in said
    file.write_text(whole)
    code, table, _ = shop.ladder("--resume", folder)
    assert ended_well(code, table) and len(sound_runs(rows(table)["base"])) == 2


def test_two_ladders_of_different_cards_are_joined_and_none_counts_twice(tmp_path):
    shop = Workshop(tmp_path)
    tables = [shop.ladder("--recipe", FAMILY, "--boots", "1", "--rungs", rungs)[1] for rungs in ("base,mtp1", "base")]
    folders = [table["folder"] for table in tables]
    argv = ["--json", "--join", folders[0], "--join", folders[1]]
    answer = subprocess.run(
        [*shop.argv()[:3], *argv], cwd=shop.folder, env=shop.environ, capture_output=True, text=True, check=False
    )
    joined = json.loads(answer.stdout)
    assert ended_well(answer.returncode, joined), answer.stderr
    assert [len(sound_runs(rows(joined)[name])) for name in ("base", "mtp1")] == [2, 1]
    twice = [*argv, "--join", folders[1]]
    answer = subprocess.run(
        [*shop.argv()[:3], *twice], cwd=shop.folder, env=shop.environ, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1 and "is in two of these ladders" in answer.stderr


def test_the_engine_on_a_cpu_forces_asynchronous_scheduling_off_and_that_is_seen(tmp_path):
    """The real engine's own configuration, where a flag is asked for that it overrides."""
    plan = gather(Options("micro/mtp3", port=8613))
    before = plan.loaded
    flags = {**before.recipe.engine.flags, "async-scheduling": True}
    engine = before.recipe.engine.model_copy(update={"flags": flags})
    asked = before.__class__(before.recipe.model_copy(update={"engine": engine}), before.folder, before.marks)
    record = Resolved.model_validate(resolved_record(plan.__class__(**{**vars(plan), "loaded": asked}), before))
    assert record.changes == ["engine.flags.async-scheduling"]
    evidence = read_evidence(next(iter(sorted(Path("results/cpu-x86-64/micro").iterdir()))))
    evidence = evidence.__class__(**{**vars(evidence), "recipe": asked.recipe, "resolved": record})
    found = proofs(evidence, run_guards(evidence))
    assert effect(found) is False
    assert any("async_scheduling: false → false" in proof.said for proof in found)


@pytest.mark.timeout(2400)
def test_the_micro_ladder_on_the_real_engine_proves_what_applies_and_lists_the_rest(tmp_path):
    ensure_engine("cpu")
    argv = ["./inv", "ladder", "--recipe", "micro", "--boots", "1", "--port", "8614", "--out", str(tmp_path), "--json"]
    answer = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=1200, env={**os.environ})
    table = json.loads(answer.stdout)
    lost = [name for name, row in rows(table).items() if any(boot["voided_by"] for boot in row["boots"])]
    if lost:  # a shared machine may stand still for seconds: the guards void such a boot, and one more is asked for
        more = ["--rungs", ",".join(lost), "--boots", "2", "--port", "8614", "--json"]
        argv = ["./inv", "ladder", "--resume", table["folder"], *more]
        answer = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=1200, env={**os.environ})
        table = json.loads(answer.stdout)
    found = rows(table)
    assert answer.returncode in ({0, 7} if lost else {0}), answer.stderr  # the other rungs have their second boot to do
    for name in ("base", "mtp3", "mtp1", "fp16-mamba-state"):
        row = found[name]
        assert row["effect_proved"] is True, row["effect_why"]
        assert row["state"] == "REPRODUCED"
        assert row["quality"]["micro-tasks"]["all"]["n"] == 300
    assert found["mtp3"]["acceptance_length"] > 3.9 and found["mtp1"]["acceptance_length"] > 1.98
    assert found["mtp1"]["quality_change"]["micro-tasks"]["n"] == 300
    for name in ("async-scheduling", "flashinfer-mamba"):
        assert "does not apply to the cpu engine" in found[name]["applies"]
        assert load_recipe(f"micro/{name}").recipe.applies.reason in found[name]["applies"]
