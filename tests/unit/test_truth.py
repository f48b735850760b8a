"""The steady estimate against a reference engine whose truth is known, in simulated time: no engine, no network."""

import itertools

import pytest

from bench.analyse import analyse_window
from bench.counters import acceptance_length, as_series, difference, falls, mean_e2e_s
from bench.evidence import read_evidence
from bench.guards import in_words, roots, run_guards
from bench.reference.engine import Settings
from bench.reference.faults import FAULTS, Fault
from images.console import out, table
from tests.runs import claim, recipe, write_run
from tests.simulated import Simulated, simulate

LIMIT = 0.005
FEWEST = 40
# Acceptance by position: none; the published ladder's synthetic rates; every draft accepted.
ACCEPTANCES = ((), (0.80,), (0.80, 0.55, 0.35), (1.0, 1.0, 1.0))
# (streams, step s, prefill s, output tokens): true rates from some 60 to some 20,000 tok/s.
SHAPES = ((4, 0.05, 0.3, 64), (16, 0.02, 0.05, 128), (64, 0.01, 0.1, 128), (256, 0.025, 0.02, 64))
INTERVALS = (1, 4)  # steps a chunk
WAVES = (5, 10, 20)


def run_of(simulated: Simulated, shape: tuple, prompts: int, folder, **changes):
    """A run folder of one simulated window."""
    streams, _, _, output_len = shape
    load = {"concurrency": streams, "prompts": prompts, "input_len": 64, "output_len": output_len}
    failure = {"stage": "boot 1 window 1", "cause": "the engine ended during the window"} if simulated.died else None
    return write_run(
        folder,
        recipe(benchmark=load, **changes),
        boots=[[]] if simulated.died else [[simulated.arrays]],
        counted=simulated.counters,
        manifest={"failure": failure},
    )


def cells() -> list[tuple]:
    """The grid: every combination, the long runs of many streams left out for time."""
    grid = itertools.product(SHAPES, ACCEPTANCES, INTERVALS, WAVES, (False, True))
    return [cell for cell in grid if cell[0][0] * cell[3] <= (640 if cell[4] or cell[2] > 1 else 1280)]


def estimate(cell: tuple) -> dict[str, object]:
    """One cell: what the engine did, and what the client's arrays say."""
    shape, acceptance, interval, waves, straggler = cell
    streams, step_s, prefill_s, output_len = shape
    settings = Settings(step_s, acceptance, interval, prefill_s, seed=waves)
    faults = [Fault("straggler", streams * waves // 2, 1)] if straggler else []
    simulated = simulate(settings, streams, streams * waves, 64, output_len, faults, seed=waves)
    result = analyse_window(simulated.arrays, streams)
    truth = simulated.engine.truth.steady_tok_s(streams)
    # With 1 to N + 1 tokens in a chunk unseen by the client, a request cut by an edge is known to a few tokens.
    few = streams * waves < FEWEST
    return {
        "streams": str(streams),
        "AL": f"{settings.acceptance_length:g}",
        "steps a chunk": str(interval),
        "requests": str(streams * waves),
        "straggler": "yes" if straggler else "",
        "true tok/s": f"{truth:.1f}",
        "steady is off": "–" if result.steady is None else f"{result.steady / truth - 1:+.3%}",
        "whole is off": f"{result.whole / truth - 1:+.2%}",
        "not judged": result.no_steady or (f"under {FEWEST} requests" if few else ""),
        "off": None if result.steady is None or few else result.steady / truth - 1,
    }


def test_over_the_whole_grid_the_steady_estimate_is_within_half_a_percent_of_the_truth():
    """Truth: tokens the engine gave while 98% of the streams were in flight. A straggler makes a cell another
    case, not an invalid one: the estimate has to hold, and the guard has to name it."""
    rows = [estimate(cell) for cell in cells()]
    heads = [name for name in rows[0] if name != "off"]
    out().print(table("steady estimate against truth", heads, [[row[name] for name in heads] for row in rows]))
    off = [abs(row["off"]) for row in rows if row["off"] is not None]
    out().print(f"{len(off)} of {len(rows)} cells judged, the worst {max(off):.3%} off")
    assert len(off) > 0.85 * len(rows)
    assert max(off) <= LIMIT


@pytest.mark.parametrize("acceptance", ACCEPTANCES[1:])
def test_the_counters_tell_the_acceptance_that_the_engine_was_set_to(acceptance):
    simulated = simulate(Settings(0.02, acceptance, prefill_s=0.02), 32, 640, 64, 128)
    delta = difference(simulated.counters["before"], simulated.counters["after"])
    assert acceptance_length(delta) == pytest.approx(simulated.engine.truth.acceptance_length())
    assert acceptance_length(delta) == pytest.approx(1 + sum(acceptance), abs=0.02)
    series = as_series(simulated.counters["series"])
    assert falls(series) == 0
    served = mean_e2e_s(delta)
    assert served == pytest.approx(simulated.arrays["e2e_s"].mean(), rel=0.01)
    assert max(series.columns["running"]) == 32


# Every fault, and the one guard it belongs to. Requests count from 0; the window has 160 of 16 streams.
BELONGS = {
    "error-event": (Fault("error-event", 60, 1), "finish_counters"),
    "short-output": (Fault("short-output", 60, 1), "output_lengths"),
    "extra-tokens": (Fault("extra-tokens", 60, 1), "output_lengths"),
    "uncounted-tokens": (Fault("uncounted-tokens"), "generation_tokens"),
    "straggler": (Fault("straggler", 60, 1), "straggler"),
    "prefix-hits": (Fault("prefix-hits"), "prefix_hits"),
    "chat-template": (Fault("chat-template"), "prompt_tokens"),
    "refuse": (Fault("refuse", 80), "completed"),
    "reset": (Fault("reset", 80), "completed"),
    "die": (Fault("die", 80), "finished"),
    "slow-start": (Fault("slow-start", 0, 80), "cold_engine"),
    "cold-jit": (Fault("cold-jit", 80, 1), "cold_engine"),
    "preempt": (Fault("preempt", 60, 2), "preemptions"),
    "counter-reset": (Fault("counter-reset", 80, 1), "same_server"),
    "metrics-outage": (Fault("metrics-outage", 40, 60), "counter_gaps"),
    "repetition": (Fault("repetition"), "degenerate_text"),
    "hidden-queue": (Fault("hidden-queue"), "little"),
}
SHAPE = (16, 0.02, 0.1, 128)


def test_every_fault_switch_is_named_by_exactly_the_guard_it_belongs_to(tmp_path):
    assert set(BELONGS) == set(FAULTS), "a fault without a guard, or the other way round"
    rows, wrong = [], []
    for name, (fault, guard) in {"none": (None, None), **BELONGS}.items():
        streams, step_s, prefill_s, output_len = SHAPE
        settings = Settings(step_s, (0.8,), prefill_s=prefill_s, stall_s=2.0)
        simulated = simulate(settings, streams, 160, 64, output_len, [fault] if fault else [])
        found = run_guards(read_evidence(run_of(simulated, SHAPE, 160, tmp_path / name)))
        named = [root.id for root in roots(found)]
        unsure = [guard.id for guard in found if guard.ok is None]
        rows.append([name, guard or "–", ", ".join(named) or "–", "; ".join(in_words(found)), ", ".join(unsure)])
        if named != [guard] * (guard is not None) or (unsure and name not in {"die", "refuse", "reset"}):
            wrong.append(name)
    out().print(table("faults and their guards", ["fault", "belongs to", "named", "in words", "can't check"], rows))
    assert wrong == []


def test_one_refused_request_is_enough_and_all_refused_leave_no_figure(tmp_path):
    for fault in (Fault("refuse", 60, 1), Fault("refuse")):
        simulated = simulate(Settings(0.02, (0.8,)), 16, 160, 64, 128, [fault])
        found = run_guards(read_evidence(run_of(simulated, SHAPE, 160, tmp_path / str(fault.after))))
        assert [root.id for root in roots(found)] == ["completed"]
        assert "client_errors" in in_words(found)[0]


def test_acceptance_above_the_claim_s_voids_the_rate_and_below_it_explains_the_shortfall(tmp_path):
    stated = [claim("acceptance_length", 1.8, 0.05), claim("output_tok_s", 1000, 30, "cpu-x86-64")]
    for rate, ok, voids in ((0.8, True, False), (0.9, False, True), (0.6, False, False)):
        simulated = simulate(Settings(0.02, (rate,), prefill_s=0.1), 16, 160, 64, 128)
        run = run_of(simulated, SHAPE, 160, tmp_path / str(rate), claims=stated)
        found = {guard.id: guard for guard in run_guards(read_evidence(run))}["acceptance"]
        assert (found.ok, found.voids) == (ok, voids)
        assert not found.voids_metric("acceptance_length"), "that claim is judged by itself"
