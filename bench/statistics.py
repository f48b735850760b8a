"""Room bench: what boots can show: intervals, equivalence, noise floor, how many boots decide, what n boots can see."""

from dataclasses import dataclass

import numpy as np
from scipy import integrate, optimize, stats

CONFIDENCE = 0.95
POWER = 0.8
BOOTS_FOR_INTERVAL = 3
MOST_BOOTS = 1000
# A floor wider than this many tolerances confirms nothing: what lies further off than was claimed would pass.
FLOOR_TOO_WIDE = 1.0


@dataclass(frozen=True)
class Spread:
    """How values scatter over boots: their mean, standard deviation (n - 1) and number."""

    mean: float
    sd: float
    boots: int


def spread(values: list[float]) -> Spread:
    """Mean and standard deviation over at least two boots."""
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)), len(values))


def t_factor(boots: float | np.ndarray) -> np.ndarray:
    """Student's t for a two-sided 95% interval over `boots` (≥ 2) values; of Welch's interval, its freedom + 1."""
    return stats.t.ppf(1 - (1 - CONFIDENCE) / 2, np.asarray(boots) - 1)


def interval95(values: list[float]) -> tuple[float, float] | None:
    """The 95% t interval of the mean over boots; None for fewer than two, which have no interval."""
    if len(values) < 2:
        return None
    found = spread(values)
    half = float(t_factor(found.boots)) * found.sd / found.boots**0.5
    return found.mean - half, found.mean + half


def decide(low: np.ndarray, high: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Equivalence: where intervals [low, high] lie against the bands [least, most], as verdict states.

    All arguments broadcast. Wholly inside is REPRODUCED, wholly below NOT_REPRODUCED, wholly above EXCEEDED,
    else INCONCLUSIVE. With a 95% interval each of the first three is wrong in at most 2.5% of runs when
    the truth lies on the other side of the edge (two one-sided tests; Schuirmann 1987).
    """
    inside = (least <= low) & (high <= most)
    return np.select(
        [inside, high < least, low > most], ["REPRODUCED", "NOT_REPRODUCED", "EXCEEDED"], default="INCONCLUSIVE"
    )


def agreed(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The state two estimates of one figure agree on, else INCONCLUSIVE."""
    return np.where(first == second, first, "INCONCLUSIVE")


def too_noisy(states: np.ndarray, tolerance: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Take back REPRODUCED where the noise floor is wider than the claim's tolerance (same unit)."""
    return np.where((states == "REPRODUCED") & (floor > FLOOR_TOO_WIDE * tolerance), "INCONCLUSIVE", states)


def noise_floor(values: list[float]) -> float:
    """What one more boot of the same thing may differ from these boots' mean: half the 95% prediction interval.

    Relative to the mean: t × sd × √(1 + 1/n) ÷ mean (Hahn & Meeker, Statistical Intervals). A published
    figure is such a boot on somebody's machine, so a smaller difference from it shows nothing. More boots
    make it smaller, since the noise is known better. Raises ValueError for fewer than two boots.
    """
    if len(values) < 2:
        raise ValueError("a noise floor needs at least two boots")
    found = spread(values)
    return float(t_factor(found.boots)) * found.sd * (1 + 1 / found.boots) ** 0.5 / found.mean


def boots_needed(found: Spread, least: float, most: float, power: float = POWER) -> tuple[int | None, str]:
    """Of how many boots a run would decide, 4 times in 5, if mean and scatter are those found; and which state.

    Outside [least, most]: P(t' > t.975) with noncentrality distance × √n ÷ sd. Inside: the chance that the whole
    interval is, integrated over the scatter of the boots, as in smallest_tolerance. None where no number up to 1,000
    would: the mean lies on an edge.
    """
    inside = least <= found.mean <= most
    room = sorted((found.mean - least, most - found.mean)) if inside else [max(least - found.mean, found.mean - most)]
    state = "REPRODUCED" if inside else "NOT_REPRODUCED" if found.mean < least else "EXCEEDED"
    fewest = max(found.boots, BOOTS_FOR_INTERVAL)
    chance = _chance_inside if inside else _chance_beyond
    if found.sd == 0:
        return (fewest if room[0] > 0 or inside else None), state
    scaled = [each / found.sd for each in room]
    if chance(MOST_BOOTS, scaled) < power:
        return None, state
    few, many = fewest - 1, MOST_BOOTS  # few doesn't do or isn't asked, many does: the chance grows with the boots
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if chance(middle, scaled) >= power else (middle, many)
    return many, state


def _chance_beyond(boots: int, room: list[float]) -> float:
    """The chance that `boots` boots put their interval wholly beyond an edge that is room[0] scatters away."""
    return float(stats.nct.sf(float(t_factor(boots)), boots - 1, room[0] * boots**0.5))


def _chance_inside(boots: int, room: list[float]) -> float:
    """The chance that `boots` boots put their interval wholly between edges that are `room` scatters away."""
    near, far = (each * boots**0.5 for each in room)
    critical = float(t_factor(boots))
    chi = stats.chi(boots - 1, scale=(boots - 1) ** -0.5)  # how the scatter of some boots varies, relative
    low, high = chi.ppf(1e-9), min(chi.ppf(1 - 1e-9), (near + far) / 2 / critical)
    if high <= low:
        return 0.0
    scatter = np.linspace(low, high, 2001)
    half = critical * scatter
    within = stats.norm.cdf(near - half) - stats.norm.cdf(half - far)
    return float(integrate.trapezoid(np.maximum(within, 0) * chi.pdf(scatter), scatter))


def smallest_difference(boots: int, noise: float, power: float = POWER) -> float:
    """The shortfall beyond the tolerance that `boots` boots call NOT_REPRODUCED in 80% of runs.

    `noise`: standard deviation between boots, in any unit; the result is in the same one. From the
    noncentral t distribution: P(t' > t.975) = power with noncentrality shortfall × √n ÷ noise.
    """
    critical = float(t_factor(boots))

    def lacking(shift: float) -> float:
        return float(stats.nct.sf(critical, boots - 1, shift)) - power

    return optimize.brentq(lacking, 0.01, 50) * noise / boots**0.5


def smallest_tolerance(boots: int, noise: float, power: float = POWER) -> float:
    """The tolerance within which `boots` boots call a claim that is exactly true REPRODUCED in 80% of runs.

    Unit as `noise`. P(|mean| + t s/√n ≤ tolerance), integrated over the scatter s of the boots (chi).
    """
    root, critical = boots**0.5, float(t_factor(boots))

    def lacking(width: float) -> float:
        def density(chi: float) -> float:
            room = width - critical * chi / (boots - 1) ** 0.5
            return (2 * stats.norm.cdf(room) - 1) * stats.chi.pdf(chi, boots - 1)

        most = width * (boots - 1) ** 0.5 / critical
        return integrate.quad(density, 0, most)[0] - power

    return optimize.brentq(lacking, 0.5, 100) * noise / root


def power_table(boots: tuple[int, ...] = (3, 4, 5, 6, 8, 10, 20), noises: tuple[float, ...] = (0.5, 1.8, 9)) -> str:
    """What a number of boots can see, as the Markdown table of the README. Noises in percent."""
    heads = [f"{noise:g}%" for noise in noises]
    head = ["boots", *[f"seen at {name}" for name in heads], *[f"confirmed at {name}" for name in heads]]
    rows = [head, ["---:"] * len(head)]
    for count in boots:
        seen = [smallest_difference(count, noise) for noise in noises]
        confirmed = [smallest_tolerance(count, noise) for noise in noises]
        rows.append([str(count), *[f"{value:.1f}%" for value in (*seen, *confirmed)]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
