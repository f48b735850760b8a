"""The whole way of a measurement, real load client included, against the engine whose truth is known."""

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.counters import acceptance_length
from bench.evidence import read_evidence
from bench.guards import in_words, roots, run_guards
from bench.guards.guard import span
from bench.measure import measure
from bench.plan import Options, gather
from bench.runfolder import seal_faults
from bench.telemetry.window import window_figures
from bench.verdict import judge
from images.console import out
from recipes.load import LIBRARY
from recipes.run.fetch import fetch_json

ROOT = Path(__file__).resolve().parent.parent.parent
TOKENIZER = LIBRARY / "micro" / "model" / "tokenizer.json"
WARM_UP = 32
OPTIONS = ("--model", "micro", "--engine-version", "0.32.0", "--tokenizer", str(TOKENIZER), "--prefill-ms", "200")


@contextmanager
def serving(*options: str):
    argv = [sys.executable, "-m", "bench.reference_server", "--port", "0", *OPTIONS, *options]
    process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield process.stderr.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(timeout=10)
        process.stderr.close()


def measured(url: str, folder: Path) -> Path:
    """A run of the micro recipe's load, without its quality suite: the reference server has no model."""
    plan = gather(Options("micro", url=url))
    recipe = plan.loaded.recipe.model_copy(update={"quality": None, "claims": []})
    return measure(replace(plan, loaded=replace(plan.loaded, recipe=recipe)), folder)


@pytest.mark.parametrize(("step_ms", "acceptance"), [("25", "0.8"), ("40", "0.80,0.55,0.35")])
def test_through_the_real_client_the_steady_estimate_meets_the_truth(tmp_path, step_ms, acceptance):
    with serving("--step-ms", step_ms, "--acceptance", acceptance) as url:
        run = measured(url, tmp_path)
        evidence = read_evidence(run)
        (window,) = evidence.windows
        began = window.arrays["start_s"].min() - 1
        truth = fetch_json(f"{url}/truth?concurrency=16&since_s={began}")
    verdict = judge(evidence)
    found = run_guards(evidence)
    steady = verdict["output_tok_s"]["steady"]
    # A client that has to wait for a core stamps late what came in time; without other work it never waits.
    waited = window_figures(window.telemetry, span(window)).client_wait_share or 0.0
    limit = 0.005 if waited < 0.05 else 0.03
    out().print(
        f"true {truth['steady_tok_s']:.1f} tok/s, steady estimate {steady}, client waited {waited:.1%}; {in_words(found)}"
    )
    assert seal_faults(run) == []
    assert steady == pytest.approx(truth["steady_tok_s"], rel=limit)
    assert acceptance_length(window.counted) == pytest.approx(truth["acceptance_length"])
    unsure = {guard.id for guard in found if guard.ok is None}
    assert unsure <= {"live_argv", "live_env", "log_proof"}, "a server of somebody's: its process and log aren't seen"
    assert not [guard.id for guard in roots(found) if guard.scope == "run"]
    assert len(window.series.t_s) > 5


@pytest.mark.parametrize(
    ("fault", "guard", "scope"),
    [
        (f"error-event@{WARM_UP + 60}+1", "finish_counters", "run"),
        (f"metrics-outage@{WARM_UP + 40}+80", "counter_gaps", "timing"),
    ],
)
def test_through_the_real_client_a_fault_is_named_by_its_guard(tmp_path, fault, guard, scope):
    with serving("--step-ms", "25", "--acceptance", "0.8", "--fault", fault) as url:
        evidence = read_evidence(measured(url, tmp_path))
    found = run_guards(evidence)
    out().print("; ".join(in_words(found)))
    assert (guard, scope) in [(root.id, root.scope) for root in roots(found)]
    # What was timed depends on what else this machine does; what was counted does not.
    assert {root.id for root in roots(found) if root.scope == "run"} == ({guard} if scope == "run" else set())
    verdict = judge(evidence)
    assert verdict["state"] == "INVALID" and verdict["output_tok_s"]["whole"] is None
    assert (verdict["acceptance_length"] is None) == (scope == "run")
