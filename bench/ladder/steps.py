"""Room bench: what a rung gained over another: a ratio with its interval, taken within one visit to a machine. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.statistics import interval95, t_factor


@dataclass(frozen=True)
class Step:
    """`gain` is the relative change of a rate (0.05: five percent more); `ci95` its 95% interval, None with `why`.

    `below_noise`: whether the interval, or the machine's noise floor where that is wider, holds no change at all;
    None where neither is known. `scatter`: without an interval, by how much (relative) such a step comes out of
    nothing, from the noise floor; None where that isn't known either. `by_visit`: the gain in each visit, where there
    are several; `scatter_of`: the number of rungs from whose scatter over them the interval is.
    """

    gain: float | None
    ci95: tuple[float, float] | None
    below_noise: bool | None
    why: str | None = None
    scatter: float | None = None
    by_visit: dict[str, float] | None = None
    scatter_of: int | None = None


Values = Mapping[str, list[float]]


def step(before: Values, after: Values, floor: float | None, every: Sequence[Values] = ()) -> Step:
    """The gain of `after` over `before`: by visit one value a boot, all above 0. `floor`: the noise floor, relative.

    Only visits that saw both count, since another visit may be another card. With one such visit the interval is
    Welch's over boots, of the logarithms. With several it is of the visits' ratios; `every` rung of the ladder that
    was measured in all of them, by no more boots, helps to tell how much a ratio scatters: see _over_visits. A step of
    single boots in one visit takes its interval from those rungs alone. Where there are none, the floor stands in: it
    is of one boot against the mean of many, and two boots differ by √2 of it.
    """
    common = [visit for visit in before if before[visit] and after.get(visit)]
    if not common:
        return Step(None, None, None, "the two were never measured in one visit to one machine")
    shifts = {visit: float(np.log(after[visit]).mean() - np.log(before[visit]).mean()) for visit in common}
    shift = float(np.mean(list(shifts.values())))
    gain = float(np.expm1(shift))
    if len(common) > 1:
        half, rungs = _over_visits(_scattering(before, after, every, common), common)
        found = Step(gain, _as_gains(shift - half, shift + half), None)
        found = replace(found, by_visit={visit: float(np.expm1(each)) for visit, each in shifts.items()})
        return _against_noise(replace(found, scatter_of=rungs), floor)
    interval = _welch(np.log(before[common[0]]), np.log(after[common[0]]))
    if interval is None and (told := _of_others(every)):
        half, rungs = told
        return _against_noise(Step(gain, _as_gains(shift - half, shift + half), None, scatter_of=rungs), floor)
    if interval is None:
        scatter = None if floor is None else floor * 2**0.5
        noisy = None if scatter is None else abs(gain) <= scatter
        held = "" if scatter is None else f"; by the noise floor ±{scatter:.1%}"
        return Step(gain, None, noisy, f"one boot, no interval{held}", scatter)
    return _against_noise(Step(gain, _as_gains(*interval), None), floor)


def _as_gains(low: float, high: float) -> tuple[float, float]:
    return float(np.expm1(low)), float(np.expm1(high))


def _against_noise(found: Step, floor: float | None) -> Step:
    low, high = found.ci95
    return replace(found, below_noise=low <= 0 <= high or (floor is not None and abs(found.gain) <= floor))


def _scattering(before: Values, after: Values, every: Sequence[Values], visits: Sequence[str]) -> Sequence[Values]:
    """The rungs that tell how much a step from `before` to `after` scatters: those two, and of `every` those that
    have no more boots in any visit than the scantiest of the two: a mean of more boots scatters less than theirs.
    """
    if before not in every or after not in every:
        return [before, after]
    fewest = min(len(rung[visit]) for rung in (before, after) for visit in visits)
    others = [each for each in every if each not in (before, after)]
    return [before, after, *(each for each in others if max(len(each.get(visit, [])) for visit in visits) <= fewest)]


def _over_visits(rungs: Sequence[Values], visits: Sequence[str]) -> tuple[float, int]:
    """Half the 95% interval of a step's mean logarithm over visits, and of how many rungs' scatter it is."""
    whole = [rung for rung in rungs if all(rung.get(visit) for visit in visits)]
    variance, freedom = _rest(whole, visits)
    return float(t_factor(freedom + 1)) * (2 * variance / len(visits)) ** 0.5, len(whole)


def _of_others(every: Sequence[Values]) -> tuple[float, int] | None:
    """The same of a step of one boot each in one visit, by rungs that several visits saw; None where there are none."""
    visits = sorted({visit for rung in every for visit in rung if rung[visit]})
    whole = [rung for rung in every if all(len(rung.get(visit, [])) == 1 for visit in visits)]
    if len(visits) < 2 or len(whole) < 2:
        return None
    variance, freedom = _rest(whole, visits)
    return float(t_factor(freedom + 1)) * (2 * variance) ** 0.5, len(whole)


def _rest(rungs: Sequence[Values], visits: Sequence[str]) -> tuple[float, int]:
    """The variance of what is left of a rate's logarithm, and its degrees of freedom.

    An additive model: a rung's part, a visit's part and a rest, which is taken to scatter alike on every rung. Of two
    rungs alone a step has the paired t interval, which says next to nothing for two visits; six rungs have five times
    its degrees of freedom. A rung that scatters more than the others has an interval that is too narrow.
    """
    cells = np.array([[np.log(rung[visit]).mean() for visit in visits] for rung in rungs])
    rest = cells - cells.mean(axis=0) - cells.mean(axis=1, keepdims=True) + cells.mean()
    freedom = (len(rungs) - 1) * (len(visits) - 1)
    return float((rest**2).sum()) / freedom, freedom


def _welch(old: np.ndarray, new: np.ndarray) -> tuple[float, float] | None:
    """The 95% interval of the difference of two means with unequal scatter (Welch 1947); None for single boots."""
    if len(old) < 2 or len(new) < 2:
        return None
    parts = [values.var(ddof=1) / len(values) for values in (old, new)]
    error = sum(parts)
    shift = float(new.mean() - old.mean())
    if error == 0:
        return shift, shift
    freedom = error**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (old, new), strict=True))
    half = float(t_factor(freedom + 1)) * error**0.5
    return shift - half, shift + half


def drift(rungs: list[dict[int, float]]) -> dict | None:
    """How rates moved from round to round of an interleaved ladder: for each rung, rate ÷ the rung's mean by round.

    {rounds: {number: mean}, change: last − first round, relative, ci95: its interval or None}. Only rungs that were
    measured in both of these rounds count, each against itself; None where there is none, or just one round.
    """
    numbers = sorted({number for rung in rungs for number in rung})
    if len(numbers) < 2:
        return None
    first, last = numbers[0], numbers[-1]
    whole = [rung for rung in rungs if first in rung and last in rung]
    if not whole:
        return None
    means = {number: float(np.mean([rung[number] for rung in rungs if number in rung])) for number in numbers}
    moved = [rung[last] - rung[first] for rung in whole]
    return {"rounds": means, "change": float(np.mean(moved)), "ci95": interval95(moved)}
