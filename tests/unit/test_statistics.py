"""What boots can show: simulated studies of the verdict's errors, and the README's table of what n boots can see."""

import re
from pathlib import Path

import numpy as np
import pytest

from bench.claims import judge_boots
from bench.evidence import EngineRecord, Evidence, Machine, Manifest, ModelRecord
from bench.floors import hardware_of, load_of
from bench.measurement import Measurement
from bench.statistics import (
    Spread,
    agreed,
    boots_needed,
    decide,
    interval95,
    noise_floor,
    power_table,
    smallest_difference,
    smallest_tolerance,
    spread,
    t_factor,
    too_noisy,
)
from recipes.schema import Claim
from tests.runs import recipe

STUDIES = 2000
PUBLISHED = 1000.0
TOLERANCE = 50.0


def claim() -> Claim:
    return Claim(
        id="rate",
        metric="output_tok_s",
        published=PUBLISHED,
        tolerance=TOLERANCE,
        status="claimed",
        machine="any",
        source="-",
    )


def simulate(
    truth: float | np.ndarray, boots: int, noise: float, seed: int, windows: int = 2, ramp: float = 0.0
) -> tuple:
    """(STUDIES, boots) whole-run and steady rates: boots scatter by `noise`, windows within one by a third of it."""
    rng = np.random.default_rng(seed)
    boot = truth * (1 + noise * rng.standard_normal((STUDIES, boots)))
    window = boot * (1 + noise / 3 * rng.standard_normal((windows, STUDIES, boots))).mean(axis=0)
    ramps = 1 - ramp * (1 + 0.1 * rng.standard_normal((STUDIES, boots)))
    return window * ramps, window


def intervals(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    boots = values.shape[1]
    half = t_factor(boots) * values.std(axis=1, ddof=1) / boots**0.5
    return values.mean(axis=1) - half, values.mean(axis=1) + half


def verdicts(whole: np.ndarray, steady: np.ndarray, floors: np.ndarray) -> np.ndarray:
    """The rule of claims.judge_boots over all studies at once; `floors` in tok/s, one a study."""
    used = np.maximum(TOLERANCE, floors)
    states = [decide(*intervals(values), PUBLISHED - used, PUBLISHED + used) for values in (whole, steady)]
    return too_noisy(agreed(*states), TOLERANCE, floors)


def floors_of(noise: float, seed: int, boots: int = 5) -> np.ndarray:
    """(STUDIES,) noise floors in tok/s, each from an A/A run of its own."""
    values = simulate(PUBLISHED, boots, noise, seed)[0]
    factor = t_factor(boots) * (1 + 1 / boots) ** 0.5 * PUBLISHED
    return factor * values.std(axis=1, ddof=1) / values.mean(axis=1)


CASES = [
    (boots, noise, floor) for boots in (3, 6) for noise in (0.002, 0.005, 0.018, 0.05) for floor in ("unknown", "known")
]


@pytest.mark.parametrize(("boots", "noise", "floor"), CASES)
def test_a_truth_inside_the_tolerance_is_rarely_refuted_and_one_far_below_rarely_confirmed(boots, noise, floor):
    seed = CASES.index((boots, noise, floor))
    floors = np.zeros(STUDIES) if floor == "unknown" else floors_of(noise, 100 + seed)
    shares = {}
    for name, truth in (("exact", PUBLISHED), ("edge", PUBLISHED - TOLERANCE), ("far", PUBLISHED - 2 * TOLERANCE)):
        states = verdicts(*simulate(truth, boots, noise, seed), floors)
        shares[name] = {state: float((states == state).mean()) for state in ("REPRODUCED", "NOT_REPRODUCED")}
    assert shares["exact"]["NOT_REPRODUCED"] <= 0.05, shares
    assert shares["edge"]["NOT_REPRODUCED"] <= 0.05, shares
    assert shares["far"]["REPRODUCED"] <= 0.05, shares
    if noise <= 0.005:
        assert shares["exact"]["REPRODUCED"] >= 0.95, "a rule that never confirms anything would pass the rest"
        assert shares["far"]["NOT_REPRODUCED"] >= 0.95, "nor one that never refutes"


@pytest.mark.parametrize("boots", [3, 6])
def test_ramps_that_only_the_whole_run_feels_never_refute_a_true_claim(boots):
    states = verdicts(*simulate(PUBLISHED, boots, 0.005, seed=boots, ramp=0.09), np.zeros(STUDIES))
    assert (states == "NOT_REPRODUCED").mean() <= 0.05
    assert (states == "INCONCLUSIVE").mean() >= 0.9


def measurement(whole: np.ndarray, steady: np.ndarray) -> Measurement:
    lists = {"whole": whole.tolist(), "steady": steady.tolist()}
    names = Measurement.__dataclass_fields__
    return Measurement(**{**dict.fromkeys(names), "boots": len(whole), **lists})


def evidence(floor: float) -> Evidence:
    noise = {
        "machine": "m", "engine": "e", "recipe": "test/base", "run": "a", "boots": 5,
        "load": load_of(recipe().benchmark), "hardware": hardware_of({}),
        "metrics": {"output_tok_s": {"relative": floor / PUBLISHED, "relative_sd": 0.0}},
    }  # fmt: skip
    engine = EngineRecord(identity="e")
    manifest = Manifest(schema=2, planned_windows=1, engine=engine, model=ModelRecord(), failure=None)
    machine = Machine.model_validate({"slug": "m", "noise_floor": noise})
    return Evidence(recipe(), manifest, machine, [], [], {}, [])


def test_the_studies_judge_as_the_verdict_does():
    rng = np.random.default_rng(1)
    truth = rng.uniform(PUBLISHED - 3 * TOLERANCE, PUBLISHED + 3 * TOLERANCE, (STUDIES, 1))
    whole, steady = simulate(truth, 4, 0.01, seed=5, ramp=0.01)
    floors = rng.uniform(1, 70, STUDIES)
    states = verdicts(whole, steady, floors)
    seen = set()
    for index in range(150):
        found = judge_boots(
            claim(), evidence(floors[index]), measurement(whole[index], steady[index]), whole[index].tolist()
        )
        assert found.state == states[index], found
        seen.add(found.state)
    assert len(seen) == 4


@pytest.mark.parametrize("boots", [3, 6])
def test_the_smallest_difference_is_seen_in_four_of_five_studies(boots):
    noise = 0.01
    rng = np.random.default_rng(boots)
    shortfall = smallest_difference(boots, noise * PUBLISHED)
    values = PUBLISHED - TOLERANCE - shortfall + noise * PUBLISHED * rng.standard_normal((20_000, boots))
    states = decide(*intervals(values), PUBLISHED - TOLERANCE, PUBLISHED + TOLERANCE)
    assert (states == "NOT_REPRODUCED").mean() == pytest.approx(0.8, abs=0.01)
    tolerance = smallest_tolerance(boots, noise * PUBLISHED)
    values = PUBLISHED + noise * PUBLISHED * rng.standard_normal((20_000, boots))
    states = decide(*intervals(values), PUBLISHED - tolerance, PUBLISHED + tolerance)
    assert (states == "REPRODUCED").mean() == pytest.approx(0.8, abs=0.01)


def test_one_more_boot_lies_within_the_noise_floor_nineteen_times_in_twenty():
    rng = np.random.default_rng(9)
    values = PUBLISHED * (1 + 0.01 * rng.standard_normal((4000, 6)))
    inside = [abs(row[5] - row[:5].mean()) <= noise_floor(row[:5].tolist()) * row[:5].mean() for row in values]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize("mean", [1000.0, 1030.0, 930.0, 1080.0])
def test_the_boots_said_to_be_needed_decide_in_four_of_five_studies_and_fewer_do_not(mean):
    count, state = boots_needed(Spread(mean, 30.0, 3), 950, 1050)
    assert count > 4
    rng = np.random.default_rng(3)
    for boots, lowest, highest in ((count, 0.79, 0.9), (count - 2, 0.0, 0.8)):
        states = decide(*intervals(mean + 30.0 * rng.standard_normal((20_000, boots))), 950, 1050)
        assert lowest <= (states == state).mean() <= highest, (boots, state)


def test_on_an_edge_no_number_of_boots_decides():
    assert boots_needed(spread([940.0, 950.0, 960.0]), 950, 1050) == (None, "REPRODUCED")
    assert boots_needed(spread([1000.0, 1000.0, 1000.0]), 950, 1050) == (3, "REPRODUCED")


def test_the_interval_over_boots_is_student_s():
    assert interval95([10.0]) is None
    low, high = interval95([10.0, 11.0, 12.0])
    assert (low, high) == pytest.approx((11 - 4.302653 / 3**0.5, 11 + 4.302653 / 3**0.5), rel=1e-5)


def test_the_readme_s_table_of_what_boots_can_see_is_the_code_s():
    readme = (Path(__file__).resolve().parent.parent.parent / "README.md").read_text()
    found = re.search(r"^\| boots \|.*?\n\n", readme, re.S | re.M)
    assert found, "README.md has no table of boots"
    assert found[0].strip() == power_table().strip()
