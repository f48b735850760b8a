"""Guards on evidence that no engine fault makes: clocks, GPUs, clients, restarts, images; and what a failure voids."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console

from bench.continuity import host_identity
from bench.evidence import read_evidence
from bench.guards import in_words, roots, run_guards
from bench.loops import is_loop
from bench.record import environment_record
from bench.report.remedies import REMEDIES
from bench.report.text import print_verdict
from bench.runfolder import dump_json, seal, window_folder
from bench.verdict import judge
from images.errors import RunProblem
from recipes.run.jit import FOLDERS
from recipes.spec import CACHE_ENV, ServingSpec
from tests.runs import GOOD_GPU, claim, closed_loop, counters, recipe, telemetry, write_run

ROOT = Path(__file__).resolve().parents[2]
GOOD = closed_loop(8, 80, 32, 0.01)
GPU = {"manifest": {"engine": {"answered": ["0.32.0"]}}}


def scaled(factor: float) -> dict[str, np.ndarray]:
    """The same window on a clock that runs wrong."""
    times = {name: GOOD[name] * factor for name in ("start_s", "ttft_s", "e2e_s")}
    shifted = times["start_s"] - times["start_s"].min() + 1000.0
    return {**GOOD, **times, "start_s": shifted, "gaps_us": (GOOD["gaps_us"] * factor).astype(np.uint32)}


def late(delay_s: float) -> dict[str, np.ndarray]:
    """A client that sends each next request late: by `delay_s` more every wave."""
    wave = np.arange(80) // 8
    return {**GOOD, "start_s": GOOD["start_s"] + wave * delay_s}


def restarted(what: str) -> dict:
    """counters.json of a window after a restart."""
    return {**counters(recipe()), "host": {**counters(recipe())["host"], what: "another"}}


def queueing(most: int) -> dict:
    """counters.json of a window in which the server had room for no more than `most` of the eight streams."""
    record = counters(recipe())
    course = record["series"]
    queue = {"running": [min(each, most) for each in course["running"]]}
    return {**record, "series": {**course, **queue}}


def seen(**changes) -> dict:
    return {"seen": telemetry(GOOD, **changes)}


def on_gpu(**values: float) -> dict:
    return seen(gpu={**GOOD_GPU, **values})


IMAGE = {"answered": ["0.32.0"], "image": {"id": "sha256:aa", "reference": "vllm@sha256:cc"}}

FAULTS = {
    "nothing, no GPU": ({}, set()),
    "nothing, a GPU": (on_gpu(), set()),
    "a client's clock that runs 10% slow": ({"boots": [[scaled(0.9)]], "counted": counters(recipe())}, {"peak"}),
    "a server with room for seven of eight streams": ({"counted": queueing(7)}, {"running"}),
    "a client that uses 90% of a core": (seen(client=0.9), {"client_saturation"}),
    "a client that sends late": ({"boots": [[late(0.004)]]}, {"dispatch_delay"}),
    "a tenth of the window without telemetry": (seen(gap=(0.5, 0.6)), {"telemetry_gaps"}),
    "thermal slowdown": (on_gpu(gpu_throttle_bits=float(0x40)), {"throttle"}),
    "power brake": (on_gpu(gpu_throttle_bits=float(0x84)), {"throttle"}),
    "a power cap at the default limit": (on_gpu(gpu_throttle_bits=float(0x4)), set()),
    "a lowered power limit": (on_gpu(gpu_power_limit_w=500.0), {"power_cap"}),
    "another process on the GPU": (on_gpu(gpu_foreign_count=1.0), {"gpu_alone"}),
    "the GPU was lost": (seen(gpu=GOOD_GPU, lost_s=1002.0), {"gpu_lost"}),
    "a container of the pinned image": ({"manifest": {"engine": IMAGE, "boots": [{"boot": 1, "image": "sha256:aa"}]}}, set()),
    "a container of another image": (
        {"manifest": {"engine": IMAGE, "boots": [{"boot": 1, "image": "sha256:bb"}]}},
        {"image_digest"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_voids_a_number_beside_the_engine_is_named_by_its_own_guard(tmp_path: Path, fault: str):
    arguments, expected = FAULTS[fault]
    found = run_guards(read_evidence(write_run(tmp_path / "run", recipe(), **arguments)))
    assert {root.id for root in roots(found)} == expected
    assert not [guard.id for guard in found if guard.ok is None], "all evidence is there: every guard can tell"


OF_THE_ENGINE = {
    f"{name}: {value}": ({"counted": {**counters(recipe()), "after": {**counters(recipe())["after"], name: 7.0 + value}}}, {guard})
    for name, value, guard in (
        ("request_success_total{finished_reason=length}", 79, "finish_counters"),
        ("generation_tokens_total", 2600, "generation_tokens"),
        ("prompt_tokens_total", 80 * 64 + 1, "prompt_tokens"),
        ("num_preemptions_total", 2, "preemptions"),
    )
}  # fmt: skip


@pytest.mark.parametrize("fault", [name for name, (_, found) in {**FAULTS, **OF_THE_ENGINE}.items() if found])
def test_what_one_window_proves_stands_where_another_window_has_no_evidence(tmp_path: Path, fault: str):
    arguments, expected = {**FAULTS, **OF_THE_ENGINE}[fault]
    first = arguments.get("boots", [[GOOD]])[0]
    subject = recipe(benchmark={"windows": 2})
    run = write_run(tmp_path / "run", subject, **{**arguments, "boots": [[*first, GOOD]]})
    for name in ("telemetry.npz", "counters.json"):
        (window_folder(run, 1, 2) / name).unlink()
    seal(run)
    found = {guard.id: guard for guard in run_guards(read_evidence(run))}
    assert expected <= {guard.id for guard in found.values() if guard.failed}
    for gap in ("telemetry_gaps", "counter_gaps"):
        assert found[gap].failed and found[gap].observed == 1.0, "a window that nobody watched is a gap"


def test_a_window_without_evidence_keeps_a_guard_from_passing(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe(benchmark={"windows": 2}), **on_gpu())
    for name in ("telemetry.npz", "counters.json"):
        (window_folder(run, 1, 2) / name).unlink()
    seal(run)
    found = {guard.id: guard for guard in run_guards(read_evidence(run))}
    unsure = ("prompt_tokens", "preemptions", "uninterrupted", "client_saturation", "gpu_lost", "throttle", "power_cap")
    for name in unsure:
        assert (found[name].ok, found[name].observed) == (None, None), name


def test_of_two_gpus_the_one_that_tells_is_judged_though_the_other_tells_nothing(tmp_path: Path):
    made = telemetry(GOOD, gpu={**GOOD_GPU, "gpu_throttle_bits": float(0x40), "gpu_power_limit_w": 500.0})
    both = {
        name: np.hstack([values, np.full_like(values, np.nan)]) if name.startswith("gpu_") else values
        for name, values in made.arrays.items()
    }
    card = {**made.meta["gpus"][0], "uuid": "GPU-blind", "power_limit_default_w": None}
    two = replace(made, meta={**made.meta, "gpus": [*made.meta["gpus"], card]}, arrays=both)
    found = {guard.id: guard for guard in run_guards(read_evidence(write_run(tmp_path / "run", recipe(), seen=two)))}
    assert [found[name].ok for name in ("throttle", "power_cap", "gpu_alone")] == [False, False, None]


def test_every_published_run_that_watched_a_gpu_has_its_power_limit_checked():
    checked = 0
    for file in sorted((ROOT / "results").rglob("recipe.yaml")):
        evidence = read_evidence(file.parent)
        gpus = {gpu["uuid"] for window in evidence.windows if window.telemetry for gpu in window.telemetry.meta["gpus"]}
        if gpus and evidence.manifest.schema_ >= 2:
            found = {guard.id: guard for guard in run_guards(evidence)}["power_cap"]
            assert found.ok is True and float(found.limit) > 0, file
            checked += 1
    assert checked >= 5


SPEC = ServingSpec("test/base", ("serve",), {"OMP_NUM_THREADS": "2"}, "127.0.0.1", 1, "m", None, 1, 1, "VLLM_API_KEY")
OURS = {**CACHE_ENV, **dict.fromkeys(FOLDERS, "x"), "CUDA_HOME": "x", "PATH": "x", "VLLM_API_KEY": "secret"}


@pytest.mark.parametrize(
    ("beside", "said", "ok"),
    [
        ({}, "equal", True),
        ({"LANG": "C", "MY_OWN": "1"}, "equal", True),
        ({"VLLM_USE_TRITON_SAMPLER": "s3cret"}, "set, but declared nowhere: VLLM_USE_TRITON_SAMPLER", False),
        (
            {"NCCL_P2P_DISABLE": "1", "OMP_PROC_BIND": "true"},
            "declared nowhere: NCCL_P2P_DISABLE, OMP_PROC_BIND",
            False,
        ),
    ],
)
def test_a_variable_that_an_engine_reads_and_nobody_declared_voids_the_run(tmp_path: Path, beside: dict, said: str, ok):
    record = environment_record(SPEC, {**OURS, **SPEC.env, **beside})
    run = write_run(tmp_path / "run", recipe())
    (run / "boots/1/env.json").write_text(dump_json(record))
    seal(run)
    found = {guard.id: guard for guard in run_guards(read_evidence(run))}["live_env"]
    assert found.ok is ok and found.observed.endswith(said)
    assert "s3cret" not in json.dumps(record) and "secret" not in json.dumps(record)


def test_what_a_pinned_image_sets_is_declared_by_its_digest_and_another_value_is_not():
    live = {**OURS, **SPEC.env, "VLLM_ENABLE_CUDA_COMPATIBILITY": "0", "NCCL_DEBUG": "INFO"}
    image = {"VLLM_ENABLE_CUDA_COMPATIBILITY": "0", "NCCL_DEBUG": "WARN"}
    assert environment_record(SPEC, live, image)["undeclared"] == ["NCCL_DEBUG"]


def test_a_run_that_looked_at_declared_variables_only_says_no_more_than_that(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe())
    found = {guard.id: guard for guard in run_guards(read_evidence(run))}
    assert found["live_env"].observed == "declared variables equal" and found["live_argv"].observed == "equal"


@pytest.mark.parametrize(("what", "said"), [("boot", "the machine"), ("dockerd", "dockerd")])
def test_a_restart_between_two_windows_voids_the_run(tmp_path: Path, what: str, said: str):
    run = write_run(tmp_path / "run", recipe(benchmark={"windows": 2}))
    file = window_folder(run, 1, 2) / "counters.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "host": restarted(what)["host"]}))
    seal(run)
    found = run_guards(read_evidence(run))
    assert in_words(found) == [f"uninterrupted: restarted: {said}, wanted no restart"]


def test_this_machine_has_an_identity_that_stays(tmp_path: Path):
    assert host_identity() == host_identity() and len(host_identity()["boot"]) == 16
    assert host_identity(tmp_path) == {"boot": None, "dockerd": None}


def test_compiling_that_the_log_tells_of_counts_inside_the_window_only(tmp_path: Path):
    said = "WARNING Triton kernel JIT compilation during inference: _fwd. This causes a latency spike"
    for lines, ok in (({"before": 0, "after": 2}, False), ({"before": 2, "after": 3}, True)):
        counted = {**counters(recipe()), "log_lines": lines}
        log = f"ready\n{said}\nwindow\nend"
        run = write_run(tmp_path / str(ok), recipe(), counted=counted, log=log)
        found = {guard.id: guard for guard in run_guards(read_evidence(run))}["cold_engine"]
        assert found.ok is ok
        assert ok or "1 lines of the log" in found.observed


def test_a_window_of_ours_without_telemetry_or_course_is_no_timing_and_nothing_is_made_up(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe(), counted={**counters(recipe()), "series": None, "host": None})
    (window_folder(run, 1, 1) / "telemetry.npz").unlink()
    seal(run)
    found = run_guards(read_evidence(run))
    unsure = {guard.id: guard.observed for guard in found if guard.ok is None}
    assert unsure == dict.fromkeys(("uninterrupted", "peak", "running", "client_saturation"), None)
    assert {(root.id, root.scope) for root in roots(found)} == {
        ("counter_gaps", "timing"),
        ("telemetry_gaps", "timing"),
    }


@pytest.mark.parametrize(
    ("files", "voided"),
    [
        (["counters.json"], {"counter_gaps"}),
        (["telemetry.npz"], {"telemetry_gaps"}),
        (["../server.log.gz"], {"log_proof"}),
    ],
    ids=["no counters", "no telemetry", "no log"],
)
def test_a_rate_is_not_confirmed_by_boots_that_recorded_nothing_of_the_server(tmp_path: Path, files, voided):
    subject = recipe(benchmark={"boots": 3}, proof={"must_log": ["a server log"]})
    run = write_run(tmp_path / "run", subject)
    for boot in (1, 2, 3):
        for file in files:
            (window_folder(run, boot, 1) / file).resolve().unlink()
    seal(run)
    assert {root.id for root in roots(run_guards(read_evidence(run)))} == voided


def test_a_damaged_log_is_no_log_and_no_sign_of_a_warm_engine(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe(proof={"must_log": ["a server log"]}))
    log = run / "boots/1/server.log.gz"
    log.write_bytes(log.read_bytes()[:12])
    seal(run)
    found = {guard.id: guard for guard in run_guards(read_evidence(run))}
    assert (found["log_proof"].ok, found["log_proof"].observed) == (False, "boot 1 has no log")
    assert found["cold_engine"].ok is None


def other_flags(run: Path) -> None:
    file = run / "recipe.yaml"
    text = file.read_text()
    assert "flags: {}" in text
    file.write_text(text.replace("flags: {}", "flags: {enforce-eager: true}"))


def other_variables(run: Path) -> None:
    file = run / "recipe.yaml"
    file.write_text(file.read_text().replace("env: {}", "env: {OMP_NUM_THREADS: '1'}", 1))


def other_claims(run: Path) -> None:
    (run / "claims.json").write_text("[]")


def unknown_host(run: Path) -> None:
    file = window_folder(run, 1, 1) / "counters.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "host": {"boot": None, "dockerd": None}}))


@pytest.mark.parametrize(
    ("change", "guard", "ok"),
    [
        (other_flags, "live_argv", False),
        (other_variables, "live_env", False),
        (other_claims, "seal", False),
        (unknown_host, "uninterrupted", None),
    ],
)
def test_what_ran_is_held_against_the_run_s_own_recipe(tmp_path: Path, change, guard: str, ok: bool | None):
    subject = recipe(claims=[claim("acceptance_length", 1.8, 0.1)])
    run = write_run(tmp_path / "run", subject, counted=counters(subject, 80, 100))
    assert {each.id: each.ok for each in run_guards(read_evidence(run))}[guard] is True
    change(run)
    seal(run)
    assert {each.id: each.ok for each in run_guards(read_evidence(run))}[guard] is ok


def test_a_run_of_a_newer_version_is_refused_and_one_of_no_version_too(tmp_path: Path):
    for name, schema, said in (("newer", 99, "made by a newer one"), ("none", None, "manifest.json: schema")):
        run = write_run(tmp_path / name, recipe(), manifest={"schema": schema} if schema else {})
        if schema is None:
            file = run / "manifest.json"
            file.write_text(
                json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "schema"})
            )
        with pytest.raises(RunProblem, match=said):
            read_evidence(run)


@pytest.mark.parametrize("guard", ["seal", "finished", "log_proof", "live_argv", "stragler"])
def test_what_a_run_is_and_whether_it_is_whole_cannot_be_waived(guard: str):
    with pytest.raises(ValidationError, match="guard"):
        recipe(status="synthetic", proof={"waive": [{"guard": guard, "reason": "a test"}]})


def test_only_a_synthetic_recipe_waives_a_guard():
    with pytest.raises(ValidationError, match="only a recipe with status: synthetic may waive"):
        recipe(proof={"waive": [{"guard": "straggler", "reason": "a test"}]})


def test_a_run_of_the_first_schema_is_asked_what_it_was_asked_then(tmp_path: Path):
    run = write_run(tmp_path / "run", recipe(), manifest={"schema": 1}, **seen(client=0.99))
    verdict = judge(read_evidence(run))
    assert verdict["state"] == "MEASURED"
    assert "client_saturation" not in {guard["id"] for guard in verdict["guards"]}
    assert all(
        set(guard) == {"id", "ok", "observed", "limit", "unit", "source", "waived"} for guard in verdict["guards"]
    )


def test_a_straggler_voids_what_was_timed_and_nothing_else(tmp_path: Path):
    slow = {**GOOD, "e2e_s": GOOD["e2e_s"] + np.where(np.arange(80) == 40, 0.5, 0)}
    stated = [claim("acceptance_length", 1.8, 0.05)]
    rate = claim("output_tok_s", 700, 30, "cpu-x86-64")
    for claims, state in (([], "INVALID"), (stated, "REPRODUCED"), ([*stated, rate], "INVALID")):
        subject = recipe(claims=claims)
        run = write_run(tmp_path / state / str(len(claims)), subject, [[slow]], counters(subject, 80, 100, slow))
        verdict = judge(read_evidence(run))
        assert [root.id for root in roots(run_guards(read_evidence(run)))] == ["straggler"]
        assert verdict["state"] == state
        assert set(verdict["output_tok_s"].values()) == {None} and verdict["latency_ms"] is None
        assert "straggler" in verdict["reasons"]["output_tok_s"]
        assert verdict["acceptance_length"] == 1.8
        states = {row["id"]: row["state"] for row in verdict["claims"]}
        assert states.get("output_tok_s", "INVALID") == "INVALID"
        sink = io.StringIO()
        print_verdict(verdict, Console(file=sink, width=300))
        if rate in claims:
            assert "INVALID" in sink.getvalue() and "claims that need no clock stand" in sink.getvalue()
            assert "Confirmed: acceptance_length." in sink.getvalue() and "proves nothing" not in sink.getvalue()
        assert ("proves nothing" in sink.getvalue()) is (not claims)


def test_of_a_run_that_is_void_as_a_whole_nothing_is_said_to_stand(tmp_path: Path):
    subject = recipe(claims=[claim("acceptance_length", 1.8, 0.05), claim("output_tok_s", 700, 30, "cpu-x86-64")])
    run = write_run(tmp_path / "run", subject, counted=counters(subject, 80, 100), live_argv=["another"])
    sink = io.StringIO()
    print_verdict(judge(read_evidence(run)), Console(file=sink, width=300))
    assert "the run proves nothing" in sink.getvalue() and "Confirmed" not in sink.getvalue()


def test_a_course_with_gaps_leaves_what_first_and_last_look_count_and_without_a_last_look_nothing_counts(
    tmp_path: Path,
):
    subject = recipe(claims=[claim("acceptance_length", 1.8, 0.05)])
    whole = counters(subject, 80, 100, GOOD)
    blind = {name: values[:1] for name, values in whole["series"].items()}
    for name, counted, state in (
        ("gap", {**whole, "series": blind}, "REPRODUCED"),
        ("no last look", {**whole, "after": None}, "INVALID"),
    ):
        verdict = judge(read_evidence(write_run(tmp_path / name, subject, counted=counted)))
        assert "counter_gaps" in {guard["id"] for guard in verdict["guards"] if guard["ok"] is False}
        assert verdict["state"] == state
        assert set(verdict["output_tok_s"].values()) == {None}


def test_a_waived_cause_explains_nothing(tmp_path: Path):
    waive = {"waive": [{"guard": "peak", "reason": "a test"}]}
    for proof, named in (({}, ["peak"]), (waive, ["little"])):
        subject = recipe(proof=proof, status="synthetic")
        run = write_run(tmp_path / named[0], subject, boots=[[scaled(0.9)]], counted=counters(recipe()))
        assert [root.id for root in roots(run_guards(read_evidence(run)))] == named


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("The sum is 12. " + "ab" * 40, True),
        ("x" * 40, True),
        ("again and " * 12, True),
        ("add 12+12=24\nadd 12+24=36\nadd 24+36=60\nadd 36+60=96\n", False),
        ("abcdefghijklmnopqrstuvwxyz" * 2, False),
        ("short", False),
        ("", False),
    ],
)
def test_a_loop_is_four_repetitions_in_the_second_half(text: str, loops: bool):
    assert is_loop(text) is loops


def test_a_guard_that_only_explains_a_shortfall_voids_nothing(tmp_path: Path):
    found = run_guards(read_evidence(write_run(tmp_path / "run", recipe())))[0]
    assert not replace(found, ok=False, explains_shortfall=True).voids
    assert replace(found, ok=False).voids_metric("acceptance_length")
    assert not replace(found, ok=False, scope="timing").voids_metric("acceptance_length")


def test_every_guard_has_a_remedy_and_a_failed_one_is_printed_with_it_once(tmp_path: Path):
    asked = {
        guard
        for file in (ROOT / "bench" / "guards").glob("*.py")
        for guard in re.findall(r'(?:Guard\(\s*|for name, pick in \(\()"(\w+)"', file.read_text())
    }
    assert len(asked) > 25 and asked <= REMEDIES.keys() and REMEDIES.keys() - asked <= {"live_env"}
    run = write_run(tmp_path / "run", recipe(), **seen(gap=(0.5, 0.7)))
    sink = io.StringIO()
    print_verdict(judge(read_evidence(run)), Console(file=sink, width=200))
    assert sink.getvalue().count(f"→ telemetry_gaps: {REMEDIES['telemetry_gaps']}") == 1
    assert re.search(r"telemetry_gaps: found 0\.\d+, wanted at most 0\.05", sink.getvalue())
