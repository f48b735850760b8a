"""Runs in other tools' words: what is read of a foreign file, what is said of it, and what goes out."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from bench.evidence import read_evidence
from bench.exchange.incoming import import_vllm
from bench.exchange.outgoing import export
from bench.runfolder import seal_faults
from bench.verdict import EXIT_CODES, judge, write_verdict
from images.errors import Problem, RunProblem, UsageProblem
from recipes.load import load_recipe
from tests.runs import GOOD_GPU, closed_loop, recipe, telemetry, write_run
from tests.unit.test_verdict import LONG, boots_at, claim

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = "micro/mtp1"
LOAD = load_recipe(RECIPE).recipe.benchmark
LIES = {
    "max_output_tokens_per_s": 99_999.0,
    "max_concurrent_requests": 9_999,
    "output_throughput": 1.0,
    "completed": 3,
    "failed": 7,
    "duration": 0.001,
    "mean_itl_ms": 4.2,
    "p99_ttft_ms": 0.1,
    "steady_state": {"output_throughput": 1e9},
}


def result(streams: int = LOAD.concurrency, waves: int = 10, **changes: object) -> dict:
    """What `vllm bench serve --save-detailed` writes for an ideal server under the recipe's load."""
    arrays = closed_loop(streams, streams * waves, LOAD.output_len, 0.01)
    requests, later = streams * waves, LOAD.output_len - 1
    return {
        "date": "20261101-101112",
        "backend": "openai",
        "model_id": "micro",
        "num_prompts": requests,
        "request_rate": "inf",
        "max_concurrency": streams,
        "input_lens": [LOAD.input_len] * requests,
        "output_lens": [LOAD.output_len] * requests,
        "start_times": arrays["start_s"].tolist(),
        "ttfts": arrays["ttft_s"].tolist(),
        "latencies": arrays["e2e_s"].tolist(),
        "itls": [[0.01] * later] * requests,
        "generated_texts": ["a text"] * requests,
        "errors": [""] * requests,
        **changes,
    }


def imported(folder: Path, *results: dict) -> Path:
    files = []
    for number, each in enumerate(results):
        files.append(folder / f"result{number}.json")
        files[-1].write_text(json.dumps(each) + "\n" * number)  # no two are the same bytes
    return import_vllm(files, RECIPE, folder / "runs")


def test_a_file_made_elsewhere_gives_figures_and_no_claim_is_comparable(tmp_path: Path):
    verdict = write_verdict(imported(tmp_path, result(), result(), result()))
    assert verdict["state"] == "NOT_COMPARABLE" and EXIT_CODES[verdict["state"]] == 5
    assert verdict["status"] == "claimed", "nobody here saw it measured"
    assert verdict["boots"] == 3 and verdict["ci95"] is not None
    assert verdict["output_tok_s"]["steady"] == pytest.approx(16 * 128 / 1.32, rel=0.005)
    for row in verdict["claims"]:
        assert row["state"] == "NOT_COMPARABLE" and "names no machine" in row["reason"]


def test_guards_whose_data_a_file_lacks_say_that_they_cannot_check(tmp_path: Path):
    guards = {guard["id"]: guard["ok"] for guard in judge(read_evidence(imported(tmp_path, result())))["guards"]}
    blind = {"finish_counters", "prompt_tokens", "prefix_hits", "preemptions", "engine_version", "live_argv"}
    assert {guards[name] for name in blind} == {None}
    assert {guards[name] for name in ("completed", "client_errors", "output_lengths")} == {True}
    assert False not in guards.values(), guards


def test_fields_that_lie_are_never_read(tmp_path: Path):
    one, other = tmp_path / "a", tmp_path / "b"
    for folder, changes in ((one, {}), (other, LIES)):
        folder.mkdir()
        write_verdict(imported(folder, result(**changes)))
    runs = [next((folder / "runs").iterdir()) for folder in (one, other)]
    first, second = (json.loads((run / "verdict.json").read_text()) for run in runs)
    for verdict in (first, second):
        verdict["setting"].pop("imported")  # the file's own sha256
    assert first == second
    assert len({(run / "boots/1/w1/client.npz").read_bytes() for run in runs}) == 1


def broken(**changes: object) -> dict:
    return result(**changes)


FAULTS = {
    "a failed request": (
        {"errors": ["Traceback\nConnectionError: cut"] + [""] * 159, "output_lens": [0] + [128] * 159},
        {"completed", "client_errors", "output_lengths"},
    ),
    "a short output": ({"output_lens": [127] + [128] * 159}, {"output_lengths"}),
    "more asked for than answered": ({"num_prompts": 176}, {"completed"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_file_voids_it(tmp_path: Path, fault: str):
    changes, expected = FAULTS[fault]
    verdict = judge(read_evidence(imported(tmp_path, result(**changes))))
    assert verdict["state"] == "INVALID" and verdict["latency_ms"] is None
    assert expected <= {guard["id"] for guard in verdict["guards"] if guard["ok"] is False}


def test_another_load_than_the_recipe_s_is_said(tmp_path: Path):
    lens = [LOAD.input_len + 1] * 13 + [LOAD.input_len] * 67
    run = imported(tmp_path, result(8, input_lens=lens, backend="openai-chat", request_rate=10.0))
    reason = judge(read_evidence(run))["claims"][0]["reason"]
    for said in ("8 streams, the recipe has 16", "chat template", "10.0 requests/s", "13 of 80 prompts not of 256"):
        assert said in reason


BROKEN = {
    "no detail": (lambda: {"output_throughput": 11840.0}, "--save-detailed"),
    "a list": (lambda: [1], "found a list"),
    "lists of other lengths": (lambda: result(ttfts=[0.1]), "different lengths"),
    "nothing": (lambda: {name: [] for name in result()}, "empty"),
    "text for numbers": (lambda: result(ttfts=["x"] * 160), "something else"),
    "not a number": (lambda: result(latencies=[float("nan")] * 160), "not finite"),
    "before its time": (lambda: result(start_times=[-1.0] * 160), "negative"),
    "gaps that are no lists": (lambda: result(itls=[3] * 160), "something else"),
    "gaps that are no numbers": (lambda: result(itls=[[float("nan")] * 127] * 160), "itls holds numbers that are"),
    "gaps without end": (lambda: result(itls=[[float("inf")] * 127] * 160), "itls holds numbers that are"),
    "gaps of null": (lambda: result(itls=[[None] * 127] * 160), "itls holds numbers that are"),
    "gaps of ages": (lambda: result(itls=[[1e300] * 127] * 160), "itls holds numbers that are"),
    "gaps of more": (lambda: result(itls=[[1.7e308] * 127] * 160), "itls holds numbers that are"),
    "negative gaps": (lambda: result(itls=[[-1.0] * 127] * 160), "negative"),
    "no streams": (lambda: result(max_concurrency=0), "max_concurrency"),
}


@pytest.mark.filterwarnings("error")  # numpy's on the way there would be a second one
@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_no_result_is_one_clear_error(tmp_path: Path, case: str):
    make, said = BROKEN[case]
    with pytest.raises(Problem, match=said):
        imported(tmp_path, make())


@pytest.mark.parametrize(
    ("files", "changes", "said"),
    [
        (21, {}, "21 files, each a boot: input should be less than or equal to 20 in one run"),
        (1, {"num_prompts": 2_000_000}, r"2000000 requests \(num_prompts\): input should be less than"),
    ],
)
def test_more_than_a_run_holds_is_said_before_anything_is_made(tmp_path: Path, files: int, changes: dict, said: str):
    with pytest.raises(UsageProblem, match=said):
        imported(tmp_path, *[result(**changes)] * files)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("odd", [["openai"], {"a": 1}, 7])
def test_what_a_file_says_of_its_client_may_be_anything(tmp_path: Path, odd: object):
    run = imported(tmp_path, result(backend=odd, request_rate=odd))
    assert "requests/s, not as a closed loop" in judge(read_evidence(run))["claims"][0]["reason"]


def test_files_of_different_loads_are_not_boots_of_one_run(tmp_path: Path):
    with pytest.raises(UsageProblem, match="different loads"):
        imported(tmp_path, result(16), result(8))


def exported(folder: Path, target: str, run: Path) -> list[Path]:
    return export(run, target, folder / f"out.{target}")


def test_an_exported_run_comes_back_as_the_same_arrays(tmp_path: Path):
    subject = recipe(benchmark={**LONG, "boots": 2})
    run = write_run(tmp_path / "run", subject, boots=boots_at(1000.0, 1010.0))
    files = exported(tmp_path, "vllm", run)
    assert [file.name for file in files] == ["out-b1-w1.vllm", "out-b2-w1.vllm"]
    back = read_evidence(import_vllm(files, RECIPE, tmp_path / "runs"))
    for ours, theirs in zip(read_evidence(run).windows, back.windows, strict=True):
        for name in ("start_s", "ttft_s", "e2e_s", "input_tokens", "output_tokens", "chunks", "gaps_us", "error"):
            assert (ours.arrays[name] == theirs.arrays[name]).all(), name
    assert seal_faults(tmp_path / "run") == []


def test_vllm_s_summaries_are_vllm_s_definitions_and_what_lies_is_left_out(tmp_path: Path):
    rng = np.random.default_rng(4)
    arrays = closed_loop(8, 80, 32, 0.01)
    arrays["ttft_s"] = rng.uniform(0.01, 0.2, 80)
    run = write_run(tmp_path / "run", recipe(), boots=[[arrays]])
    found = json.loads(exported(tmp_path, "vllm", run)[0].read_text())
    tpot = (arrays["e2e_s"] - arrays["ttft_s"]) / 31 * 1e3
    assert found["p95_ttft_ms"] == pytest.approx(np.percentile(arrays["ttft_s"] * 1e3, 95))
    assert found["median_tpot_ms"] == pytest.approx(np.median(tpot))
    assert found["std_tpot_ms"] == pytest.approx(np.std(tpot))
    wall = (arrays["start_s"] + arrays["e2e_s"]).max() - arrays["start_s"].min()
    assert found["output_throughput"] == pytest.approx(80 * 32 / wall)
    assert not [name for name in found if "itl_ms" in name or name.startswith(("max_o", "max_concurrent_"))]


def test_an_invalid_run_exports_its_arrays_its_state_and_no_figure(tmp_path: Path):
    arrays = closed_loop(8, 80, 32, 0.01)
    arrays["error"] = arrays["error"].astype("U9")
    arrays["error"][3] = "cut"
    run = write_run(tmp_path / "run", recipe(), boots=[[arrays]])
    found = json.loads(exported(tmp_path, "vllm", run)[0].read_text())
    assert found["station_recipes"]["state"] == "INVALID" and found["failed"] == 1
    assert "output_throughput" not in found and len(found["latencies"]) == 80
    row = next(csv.DictReader(exported(tmp_path, "csv", run)[0].open()))
    assert row["state"] == "INVALID" and row["whole_tok_s"] == row["ttft_p95_ms"] == ""
    assert row["failed_guards"].split() == ["completed", "client_errors"]
    assert json.loads(exported(tmp_path, "inferencex", run)[0].read_text())["output_tput_per_gpu"] is None


def test_csv_has_a_row_a_window_with_the_verdict_s_figures_and_status(tmp_path: Path):
    subject = recipe(status="synthetic", benchmark={**LONG, "boots": 3})
    run = write_run(tmp_path / "run", subject, boots=boots_at(1000.0, 1010.0, 1020.0))
    rows = list(csv.DictReader(exported(tmp_path, "csv", run)[0].open()))
    verdict = judge(read_evidence(run))
    assert [row["boot"] for row in rows] == ["1", "2", "3"]
    assert {row["status"] for row in rows} == {"synthetic"}
    assert np.mean([float(row["steady_tok_s"]) for row in rows]) == pytest.approx(
        verdict["output_tok_s"]["steady"], rel=1e-5
    )
    assert float(rows[0]["ttft_p95_ms"]) == pytest.approx(0.05 * (8 * 32 / 0.36) / 1000 * 1e3, rel=1e-4)


def test_a_run_whose_rate_is_the_host_s_says_so_in_every_form(tmp_path: Path):
    """Three drafts on one H200, which the host held up, and whose steps were too large for the engine's CUDA graphs."""
    run = min((ROOT / "results/h200/nemotron-h-synthetic").glob("*/runs/*-mtp3-*"))
    row = next(csv.DictReader(exported(tmp_path, "csv", run)[0].open()))
    beside = [
        json.loads(exported(tmp_path, form, run)[0].read_text())["station_recipes"] for form in ("vllm", "inferencex")
    ]
    for found in (row, *beside):
        assert "waits for the host" in found["host_bound"] and "1,024 tokens" in found["outside_cuda_graphs"]


def test_inferencex_s_row_is_in_seconds_a_gpu_with_the_status_beside_it(tmp_path: Path):
    claims = [claim("output_tok_s", 1000, 30, "cpu-x86-64")]
    subject = recipe(claims=claims, benchmark={**LONG, "boots": 3})
    boots = boots_at(1000.0, 1001.0, 1002.0)
    card, display = {"uuid": "GPU-made", "name": "GB300"}, {"uuid": "GPU-display", "name": "RTX PRO"}
    watched = telemetry(boots[0][0], gpu=GOOD_GPU)
    run = write_run(tmp_path / "run", subject, boots=boots, machine={"gpus": [card, display]}, seen=watched)
    row = json.loads(exported(tmp_path, "inferencex", run)[0].read_text())
    verdict = judge(read_evidence(run))
    assert row["output_tput_per_gpu"] == pytest.approx(verdict["output_tok_s"]["whole"])
    assert row["tp"] == 1, "the display's card serves nothing"
    assert row["p95_e2el"] == pytest.approx(verdict["latency_ms"]["e2e"]["p95"] / 1e3)
    assert row["median_intvty"] == pytest.approx(1 / row["median_tpot"])
    assert "power_valid" not in row and row["joules_per_output_token"] is None
    assert row["station_recipes"]["claims"][0]["state"] == "REPRODUCED"


def test_inferencex_s_row_of_a_run_without_a_gpu_has_no_figure_a_gpu(tmp_path: Path):
    row = json.loads(exported(tmp_path, "inferencex", write_run(tmp_path / "run", recipe()))[0].read_text())
    assert {row[name] for name in ("tp", "output_tput_per_gpu", "input_tput_per_gpu", "tput_per_gpu")} == {None}
    assert row["median_ttft"] > 0


def test_an_unknown_form_and_a_place_that_cannot_be_written_are_said(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe())
    with pytest.raises(UsageProblem, match="vllm, csv, inferencex"):
        export(run, "xml", tmp_path / "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageProblem, match="can't be written"):
        export(run, "csv", tmp_path / "file" / "x")
    with pytest.raises(RunProblem):
        export(tmp_path, "csv", tmp_path / "x")


def test_the_front_door_judges_a_file_and_exports_the_run_it_made(tmp_path: Path, inv):
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result()))
    answer = inv("verdict", str(file))
    assert answer.returncode == 2 and "--recipe NAME" in answer.stderr
    twice = inv("verdict", str(file), "--recipe", RECIPE, "--boot", str(file), "--out", str(tmp_path / "runs"))
    assert twice.returncode == 2 and "has the same bytes as" in twice.stderr and not (tmp_path / "runs").exists()
    other = tmp_path / "other.json"
    other.write_text(json.dumps(result(date="20261101-111112")))
    answer = inv("verdict", str(file), "--recipe", RECIPE, "--boot", str(other), "--out", str(tmp_path / "runs"))
    assert answer.returncode == 5 and "cannot check" in answer.stdout, answer.stderr
    run = Path(answer.stdout.splitlines()[-1])
    assert run.is_dir() and json.loads((run / "verdict.json").read_text())["boots"] == 2
    answer = inv("export", str(run), "--to", "csv", "--out", str(tmp_path / "out.csv"))
    assert answer.returncode == 0 and (tmp_path / "out.csv").read_text().count("\n") == 3
    printed = inv("export", str(run), "--to", "csv", "--out", "-")
    assert printed.returncode == 0 and printed.stdout == (tmp_path / "out.csv").read_text()
    two_files = inv("export", str(run), "--to", "vllm", "--out", "-")
    assert two_files.returncode == 2 and "2 windows" in two_files.stderr and two_files.stdout == ""
