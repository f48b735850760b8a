"""Room bench: what a suite's answers are worth: shares with Wilson intervals, and paired differences."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
from scipy import stats

from bench.evidence import Evidence
from bench.guards import run_guards
from images.errors import RunProblem


@dataclass(frozen=True)
class Score:
    """Exact answers of one task: `wilson95` is the 95% Wilson score interval of the share."""

    n: int
    exact: int
    share: float
    wilson95: tuple[float, float]


@dataclass(frozen=True)
class PairedDifference:
    """Two engines on the same items: `only_first` and `only_second` were right in just one of them.

    `difference` is second minus first as a share of n, with Agresti and Min's 95% interval (Statistics in
    Medicine 24, 2005: a Wald interval after half an item is added to each of the four cells); `p` is
    McNemar's exact two-sided test.
    """

    n: int
    only_first: int
    only_second: int
    difference: float
    interval95: tuple[float, float]
    p: float


def score(exact: list[bool]) -> Score:
    """Score one task's answers; at least one is needed."""
    return _score(len(exact), sum(exact))


@lru_cache(maxsize=4096)  # tasks have few sizes: a stranger's hundred thousand tasks of one item are two scores
def _score(n: int, right: int) -> Score:
    low, high = stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    return Score(n, right, right / n, (float(low), float(high)))


def score_suite(answers: list[dict]) -> dict[str, dict]:
    """Score a suite by task, and all of it under 'all'."""
    exact: dict[str, list[bool]] = {}
    for answer in answers:
        exact.setdefault(answer["task"], []).append(answer["exact"])
    exact["all"] = [answer["exact"] for answer in answers]
    return {name: asdict(score(each)) for name, each in exact.items()}


def weakest(asked: Iterable[dict[str, list[dict]]]) -> dict[str, list[dict]]:
    """Of boots that were asked suites (answers by suite), for each suite the answers of the one that got least right.

    Of several that got as little right the first one's; a suite without answers is left out.
    """
    found: dict[str, list[dict]] = {}
    for suite, answers in (pair for boot in asked for pair in boot.items()):
        if answers and (suite not in found or _right(answers) < _right(found[suite])):
            found[suite] = answers
    return found


def _right(answers: list[dict]) -> float:
    return sum(answer["exact"] for answer in answers) / len(answers)


def paired_differences(first: Evidence, second: Evidence) -> dict[str, dict]:
    """Compare two runs suite by suite, second minus first.

    Raises RunProblem when they have no suite in common or answered different items, or when one of them is void: a
    guard on what was timed takes nothing from answers.
    """
    for run in (first, second):
        voided = [guard.id for guard in run_guards(run) if guard.voids_metric("quality")]
        if voided:
            raise RunProblem(f"a run of {run.recipe.id} is INVALID ({', '.join(voided)}): it proves nothing")
    suites = sorted(first.quality.keys() & second.quality.keys())
    if not suites:
        raise RunProblem(f"{first.recipe.id} and {second.recipe.id}: the two runs have no quality suite in common")
    try:
        return {suite: asdict(paired_difference(first.quality[suite], second.quality[suite])) for suite in suites}
    except ValueError as error:
        raise RunProblem(str(error)) from None


def paired_difference(first: list[dict], second: list[dict]) -> PairedDifference:
    """Compare two sets of answers to the same items.

    Raises ValueError when the items aren't the same.
    """
    before = {(answer["id"], answer["prompt"]): answer["exact"] for answer in first}
    after = {(answer["id"], answer["prompt"]): answer["exact"] for answer in second}
    if before.keys() != after.keys() or not before:
        raise ValueError("the two runs answered different items")
    n = len(before)
    only_first = sum(before[key] and not after[key] for key in before)
    only_second = sum(after[key] and not before[key] for key in before)
    b, c, total = only_first + 0.5, only_second + 0.5, n + 2
    half = stats.norm.ppf(0.975) * np.sqrt(b + c - (c - b) ** 2 / total) / total
    centre = (c - b) / total
    discordant = only_first + only_second
    p = stats.binomtest(only_second, discordant).pvalue if discordant else 1.0
    interval = (float(centre - half), float(centre + half))
    return PairedDifference(n, only_first, only_second, (only_second - only_first) / n, interval, float(p))
