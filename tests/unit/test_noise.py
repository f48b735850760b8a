"""The noise floor: taken from an A/A run of this machine, stored, and copied into the runs that come after."""

from pathlib import Path

import pytest

from bench import noise
from bench.evidence import read_evidence
from bench.runfolder import dump_json, write_text
from bench.statistics import noise_floor
from bench.verdict import judge
from images.errors import Problem
from tests.runs import recipe, write_run
from tests.unit.test_verdict import ENGINE, LONG, boots_at, claim, spoiled_window

HERE = {"slug": "cpu-x86-64", "cpu": {"model": "a CPU", "cores": 2}, "gpus": []}


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(noise, "machine_facts", lambda: HERE)


def a_run(folder: Path, *rates: float, machine: dict = HERE, manifest: dict = ENGINE) -> Path:
    subject = recipe(benchmark={**LONG, "boots": len(rates)})
    return write_run(folder, subject, boots=boots_at(*rates), machine=machine, manifest=manifest)


def test_an_a_a_run_s_scatter_becomes_the_floor_of_later_runs(tmp_path: Path):
    run = a_run(tmp_path / "aa", 1000, 1010, 990, 1005, 995)
    record, file = noise.learn(run, tmp_path / "state")
    assert file == tmp_path / "state/noise/cpu-x86-64/e1/test/base.json"
    floor = record["metrics"]["output_tok_s"]
    assert floor["relative"] == pytest.approx(noise_floor(floor["values"]))
    assert floor["relative"] == pytest.approx(2.776 * 0.00791 * (1 + 1 / 5) ** 0.5, rel=0.01)

    later = recipe(claims=[claim("output_tok_s", 1000, 10, "cpu-x86-64")], benchmark={**LONG, "boots": 3})
    machine = noise.with_noise_floor({**HERE, "reasons": {}}, "e1", later, tmp_path / "state")
    run = write_run(tmp_path / "later", later, boots=boots_at(999, 1000, 1001), machine=machine, manifest=ENGINE)
    row = judge(read_evidence(run))["claims"][0]
    assert row["tolerance_used"] == row["noise_floor"] > row["tolerance"] == 10


OTHERS = {
    "slug": ({"slug": "h200"}, "e1", {}, "no A/A run"),
    "engine": ({}, "e2", {}, "no A/A run"),
    "rung": ({}, "e1", {"id": "test/mtp1"}, "no A/A run"),
    "load": ({}, "e1", {"benchmark": {**LONG, "concurrency": 4}}, "another load"),
    "CPU": ({"cpu": {"model": "another CPU", "cores": 2}}, "e1", {}, "another hardware"),
    "card": ({"gpus": [{"uuid": "GPU-other"}]}, "e1", {}, "another hardware"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_run_knows_only_the_floor_of_its_own_machine_engine_rung_load_and_card(tmp_path: Path, other: str):
    noise.learn(a_run(tmp_path / "aa", 1000, 1010, 990), tmp_path / "state")
    facts, engine, changes, said = OTHERS[other]
    subject = recipe(**{"benchmark": LONG, **changes})
    machine = noise.with_noise_floor({**HERE, "reasons": {}, **facts}, engine, subject, tmp_path / "state")
    why = machine["reasons"]["noise_floor"]
    assert machine["noise_floor"] is None and said in why and f"./inv noise --recipe {subject.id}" in why
    same = noise.with_noise_floor({**HERE, "reasons": {}}, "e1", recipe(benchmark=LONG), tmp_path / "state")
    assert same["noise_floor"] and "noise_floor" not in same["reasons"]
    assert noise.with_noise_floor(HERE, None, subject, tmp_path / "state")["noise_floor"] is None


def test_a_floor_that_cannot_be_stored_is_a_fault_and_a_run_that_cannot_tell_is_invalid(tmp_path: Path, monkeypatch):
    (tmp_path / "a file").write_text("where a folder should be")
    monkeypatch.setattr(noise, "state_root", lambda: tmp_path / "a file")
    run = a_run(tmp_path / "aa", 1000, 1010, 990)
    assert noise.print_noise(run, True, True) == 1
    assert noise.print_noise(a_run(tmp_path / "two", 1000, 1010), True, True) == 7


def test_a_run_on_one_gpu_of_several_shows_the_floor_of_that_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gpus = [{"uuid": "GPU-display", "name": "NVIDIA RTX PRO 2000"}, {"uuid": "GPU-big", "name": "NVIDIA GB300"}]
    monkeypatch.setattr(noise, "machine_facts", lambda: {**HERE, "gpus": gpus})
    run = a_run(tmp_path / "aa", 1000, 1010, 990, machine={**HERE, "gpus": gpus[1:]})
    record, file = noise.learn(run, tmp_path / "state")
    assert file.is_file() and record["boots"] == 3


@pytest.mark.parametrize("task", [("noise", "--recipe", "micro"), ("quality",), ("serve",), ("reproduce",)])
def test_whatever_serves_a_recipe_takes_the_gpu_and_the_engine_s_interpreter(inv, task: tuple[str, ...]):
    answer = inv(*task, "--gpu", "GPU-nowhere")
    assert answer.returncode == 2 and "--gpu GPU-nowhere: this machine has" in " ".join(answer.stderr.split())
    given = ("--engine-python", "/nowhere/python", "--engine-path", "/a", "--engine-path", "/b", "--port", "8617")
    answer = inv(*task, *given)
    assert answer.returncode == 2 and "wanted the path of a Python interpreter" in " ".join(answer.stderr.split())


def test_a_floor_that_cannot_be_read_is_said_and_not_used(tmp_path: Path):
    file = noise.noise_file("cpu-x86-64", "e1", "test/base", tmp_path)
    for text in ("{", "[]", dump_json({"machine": "cpu-x86-64"})):
        write_text(file, text)
        machine = noise.with_noise_floor({**HERE, "reasons": {}}, "e1", recipe(), tmp_path)
        assert machine["noise_floor"] is None and "can't be read" in machine["reasons"]["noise_floor"]
        assert noise.stored_floors(tmp_path) == []


REFUSED = {
    "two boots": (lambda folder: a_run(folder, 1000, 1010), "2 boot"),
    "another machine": (
        lambda folder: a_run(folder, 1000, 1010, 990, machine={**HERE, "cpu": {"model": "another", "cores": 2}}),
        "another machine",
    ),
    "a GPU that isn't here": (
        lambda folder: a_run(folder, 1000, 1010, 990, machine={**HERE, "gpus": [{"uuid": "GPU-elsewhere"}]}),
        "another machine",
    ),
    "somebody else's server": (
        lambda folder: a_run(folder, 1, 2, 3, manifest={**ENGINE, "url": "http://127.0.0.1:1"}),
        "isn't ours",
    ),
    "an invalid run": (
        lambda folder: write_run(
            folder, recipe(benchmark={"boots": 3}), boots=[[spoiled_window("error")]] * 3, machine=HERE, manifest=ENGINE
        ),
        "invalid",
    ),
    "a name that leads elsewhere": (
        lambda folder: a_run(
            folder, 1000, 1010, 990, manifest={"engine": {"answered": ["0.32.0"], "identity": "../../x"}}
        ),
        "can't name a noise floor",
    ),
    "no folder": (lambda folder: folder, "no run's folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_cannot_tell_is_refused_and_nothing_is_stored(tmp_path: Path, case: str):
    make, said = REFUSED[case]
    with pytest.raises(Problem, match=said):
        noise.learn(make(tmp_path / "run"), tmp_path / "state")
    assert not (tmp_path / "state").exists()
