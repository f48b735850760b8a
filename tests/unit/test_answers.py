"""A suite's answers in a run folder: kept packed, read under the name of before too, and no stranger's bomb is unpacked."""

import gzip
import json
from pathlib import Path

import pytest

from bench.evidence import read_evidence
from bench.handover.adopting import Taken, ladder_finding, take
from bench.quality.answers import MAX_ITEMS, read_suites, save_answers
from bench.quality.suites import suite_items
from bench.runfolder import seal, seal_faults
from bench.verdict import judge
from images.errors import BundleProblem, RunProblem
from images.packed import gunzipped, gzipped
from recipes.bundle.layout import CarriedRun
from recipes.bundle.write import Carried
from recipes.load import load_recipe
from recipes.schema import Quality
from tests.bundles import library, tiny_bundle
from tests.runs import recipe, write_run

ITEMS = suite_items("micro-tasks", 3, 200)
ANSWERS = [
    {"id": i.id, "task": i.task, "prompt": i.prompt, "expected": i.expected, "got": i.expected, "exact": True}
    for i in ITEMS
]
PLAIN, PACKED = "quality/micro-tasks.jsonl", "quality/micro-tasks.jsonl.gz"


def lines(answers: list[dict]) -> bytes:
    return "".join(json.dumps(answer, sort_keys=True) + "\n" for answer in answers).encode()


def run_with(folder: Path, **files: bytes) -> Path:
    """A sealed run of 1,200 items with quality/micro-tasks.<ending of each>."""
    run = write_run(folder, recipe(quality={"suites": ["micro-tasks"], "items": 200, "seed": 3}), sealed=False)
    (run / "quality").mkdir()
    for ending, data in files.items():
        (run / f"quality/micro-tasks.{ending.replace('_', '.')}").write_bytes(data)
    seal(run)
    return run


def test_twelve_hundred_answers_are_kept_in_a_fifth_of_their_bytes_and_come_back_whole(tmp_path):
    run = run_with(tmp_path / "run")
    save_answers(run, "micro-tasks", ANSWERS)
    seal(run)
    assert [file.name for file in (run / "quality").iterdir()] == ["micro-tasks.jsonl.gz"]
    assert PACKED in (run / "SHA256SUMS").read_text() and seal_faults(run) == []
    assert (run / PACKED).stat().st_size < len(lines(ANSWERS)) / 5
    evidence = read_evidence(run)
    assert evidence.quality == {"micro-tasks": ANSWERS}
    guard = next(guard for guard in judge(evidence)["guards"] if guard["id"] == "quality_complete")
    assert guard["ok"] is True and guard["source"] == PACKED


def test_the_same_answers_have_the_same_bytes_whenever_and_wherever_they_are_kept(tmp_path):
    for name in ("a", "b"):
        save_answers(tmp_path / name, "micro-tasks", ANSWERS)
    first, second = ((tmp_path / name / PACKED).read_bytes() for name in ("a", "b"))
    assert first == second
    # RFC 1952: deflate, no flags (no file's name), no time, packed as small as can be, no operating system told.
    assert first[:10] == bytes([0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 2, 255])


def test_a_run_of_before_with_plain_answers_says_the_same_and_names_its_own_file(tmp_path):
    before = run_with(tmp_path / "before", jsonl=lines(ANSWERS))
    after = run_with(tmp_path / "after", jsonl_gz=gzipped(lines(ANSWERS)))
    old, new = judge(read_evidence(before)), judge(read_evidence(after))
    assert old["quality"] == new["quality"] and old["state"] == new["state"] == "MEASURED"
    sources = [
        next(guard["source"] for guard in verdict["guards"] if guard["id"] == "quality_complete")
        for verdict in (old, new)
    ]
    assert sources == [PLAIN, PACKED]


def test_a_run_that_holds_a_suite_s_answers_twice_is_one_clear_error(tmp_path):
    run = run_with(tmp_path / "run", jsonl=lines(ANSWERS), jsonl_gz=gzipped(lines(ANSWERS)))
    with pytest.raises(RunProblem, match=r"quality/ holds both micro-tasks\.jsonl and micro-tasks\.jsonl\.gz"):
        read_evidence(run)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gzip.compress(lines(ANSWERS))[:-500], "not a gzip file"),
        (b"\x1f\x8b rubbish", "not a gzip file"),
        (b"", "not a gzip file: it has no bytes"),
        (lines(ANSWERS), "not a gzip file"),
        (gzipped(b"[]\n"), "not a suite's answers"),
        (gzipped(gzipped(lines(ANSWERS))), "not a suite's answers"),
    ],
    ids=["cut short", "rubbish", "no bytes", "plain", "no answers", "packed twice"],
)
def test_packed_answers_that_are_none_are_one_clear_error(tmp_path, data, said):
    run = run_with(tmp_path / "run", jsonl_gz=data)
    with pytest.raises(RunProblem, match=rf"micro-tasks\.jsonl\.gz: {said}"):
        read_evidence(run)


def test_only_the_suites_that_the_recipe_asks_are_read_and_of_the_others_the_verdict_says_so(tmp_path):
    run = run_with(tmp_path / "run", jsonl_gz=gzipped(lines(ANSWERS)))
    (run / "quality/other.jsonl.gz").write_bytes(b"whoever reads this fails")
    seal(run)
    evidence = read_evidence(run)
    verdict = judge(evidence)
    assert evidence.quality.keys() == verdict["quality"].keys() == {"micro-tasks"}
    assert verdict["reasons"]["quality.other"] == ("quality/other.jsonl.gz was not read: the recipe asks no such suite")
    nobody = write_run(tmp_path / "nobody", recipe(), sealed=False)
    save_answers(nobody, "micro-tasks", ANSWERS)
    seal(nobody)
    assert read_evidence(nobody).quality == {} and "quality.micro-tasks" in judge(read_evidence(nobody))["reasons"]


def test_more_items_than_any_recipe_asks_are_refused_before_they_are_read(tmp_path, monkeypatch):
    largest = Quality.model_fields["items"].metadata[-1].le * len({item.task for item in ITEMS})
    assert largest < MAX_ITEMS
    monkeypatch.setattr("bench.quality.answers.MAX_ITEMS", len(ANSWERS))
    files = {suite: tmp_path / f"{suite}.jsonl" for suite in ("a", "b")}
    for file in files.values():
        file.write_bytes(lines(ANSWERS).removesuffix(b"\n"))
    assert read_suites(files, ["a"]).keys() == {"a"}
    files["b"].write_bytes(b"rubbish")  # which would be another error, were it read
    with pytest.raises(RunProblem, match=r"b\.jsonl: more items than are read: a run has 1,200 at most"):
        read_suites(files, ["a", "b"])


def bomb(size: int) -> bytes:
    return gzip.compress(b"\n" * size)  # every line is empty, so that unpacked it would be read to its end


def test_a_bomb_in_a_run_is_refused_and_never_unpacked_further_than_its_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.runfolder.MAX_TEXT_BYTES", 1_000_000)
    packed = bomb(100_000_000)
    assert len(packed) < 1_000_000
    run = run_with(tmp_path / "run", jsonl_gz=packed)
    with pytest.raises(RunProblem, match=r"micro-tasks\.jsonl\.gz: more than 1000000 bytes, the most that is read"):
        read_evidence(run)
    assert "more than 1000000 bytes" in ladder_finding_of(run)


def ladder_finding_of(run: Path) -> str:
    """What adopting says of a ladder that carries this run."""
    ladder = run.parent / "ladder"
    (ladder / "runs").mkdir(parents=True)
    run.rename(ladder / "runs" / "it")
    found = ladder_finding(ladder)
    assert found.ok is False
    return found.found


def test_unpacking_stops_at_the_bound(tmp_path):
    file = tmp_path / "x.gz"
    file.write_bytes(bomb(1001))
    assert gunzipped(file, 1000) is None and gunzipped(file, 1001) == b"\n" * 1001
    file.write_bytes(bomb(50_000_000)[:-20])  # cut short: whoever unpacks all of it meets its end
    assert gunzipped(file, 1000) is None


def test_a_bundle_that_carries_a_bomb_for_answers_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("STATION_RECIPES_STATE", str(tmp_path / "state"))
    monkeypatch.setattr("bench.runfolder.MAX_TEXT_BYTES", 1_000_000)
    asked = Quality(suites=["micro-tasks"], items=200, seed=3)
    subject = load_recipe("tiny", library(tmp_path / "of the run")).recipe.model_copy(update={"quality": asked})
    run = write_run(tmp_path / "a-run", subject, sealed=False)
    (run / "quality").mkdir()
    (run / PACKED).write_bytes(bomb(100_000_000))
    seal(run)
    carried = CarriedRun(name="a-run", machine="cpu-x86-64", state="NOT_COMPARABLE")
    bundle = tiny_bundle(tmp_path, carried=Carried(runs=((carried, run),)))
    with pytest.raises(BundleProblem, match="can't be judged.*more than 1000000 bytes"):
        take(Taken(str(bundle), doctor=False), as_json=True)
    assert list((tmp_path / "state/adopted").iterdir()) == []


def test_a_secret_in_packed_answers_is_not_bundled(tmp_path):
    subject = load_recipe("tiny", library(tmp_path / "of the run")).recipe
    run = write_run(tmp_path / "a-run", subject, sealed=False)
    save_answers(run, "micro-tasks", [{**ANSWERS[0], "got": "hf_" + "a" * 34}])
    seal(run)
    carried = CarriedRun(name="a-run", machine="cpu-x86-64", state="NOT_COMPARABLE")
    with pytest.raises(BundleProblem, match=r"micro-tasks\.jsonl\.gz seems to hold a Hugging Face token"):
        tiny_bundle(tmp_path, carried=Carried(runs=((carried, run),)))
