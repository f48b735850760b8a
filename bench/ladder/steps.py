"""Room bench: what a rung gained over another: a ratio with its interval, taken within one visit to a machine. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from bench.statistics import interval95, t_factor

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Step:
    """`gain` is the relative change of a rate (0.05: five percent more); `ci95` its 95% interval, None with `why`.

    `below_noise`: whether the interval, or the machine's noise floor where that is wider, holds no change at all;
    None where neither is known.
    """

    gain: float | None
    ci95: tuple[float, float] | None
    below_noise: bool | None
    why: str | None = None


Values = Mapping[str, list[float]]


def step(before: Values, after: Values, floor: float | None) -> Step:
    """The gain of `after` over `before`: by visit one value a boot, all above 0. `floor`: the noise floor, relative.

    Only visits that saw both count, since another visit may be another card. With one such visit the interval is
    Welch's over boots, of the logarithms; with several it is the t interval over the visits' ratios.
    """
    common = [visit for visit in before if before[visit] and after.get(visit)]
    if not common:
        return Step(None, None, None, "the two were never measured in one visit to one machine")
    pairs = [(np.log(before[visit]), np.log(after[visit])) for visit in common]
    shifts = [float(new.mean() - old.mean()) for old, new in pairs]
    shift = float(np.mean(shifts))
    interval = interval95(shifts) if len(shifts) > 1 else _welch(*pairs[0])
    gain = float(np.expm1(shift))
    if interval is None:
        noisy = None if floor is None else abs(gain) <= floor
        return Step(gain, None, noisy, "one boot, no interval")
    low, high = (float(np.expm1(edge)) for edge in interval)
    noisy = low <= 0 <= high or (floor is not None and abs(gain) <= floor)
    return Step(gain, (low, high), noisy)


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
    half = float(stats.t.ppf(1 - (1 - CONFIDENCE) / 2, freedom)) * error**0.5
    return shift - half, shift + half


def drift(rounds: list[tuple[int, float]]) -> dict | None:
    """How rates moved from round to round of an interleaved ladder: (round, rate ÷ its rung's mean) of every boot.

    {rounds: {number: mean}, change: last − first round, relative, ci95: its interval or None}; None for one round.
    """
    numbers = sorted({number for number, _ in rounds})
    if len(numbers) < 2:
        return None
    means = {number: float(np.mean([value for at, value in rounds if at == number])) for number in numbers}
    first, last = ([value for at, value in rounds if at == number] for number in (numbers[0], numbers[-1]))
    paired = [new - old for old, new in zip(first, last, strict=False)] if len(first) == len(last) else []
    half = None
    if len(paired) > 1:
        half = float(t_factor(len(paired))) * float(np.std(paired, ddof=1)) / len(paired) ** 0.5
    change = means[numbers[-1]] - means[numbers[0]]
    return {"rounds": means, "change": change, "ci95": None if half is None else (change - half, change + half)}
