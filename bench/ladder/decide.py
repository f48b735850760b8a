"""Room bench: the field's rule: keep a change only if what the team needs gets better, and nothing else worse. Pure."""

from dataclasses import dataclass

from bench.ladder.proof import effect
from bench.ladder.rows import Ladder, RungRuns, answers, step_between
from bench.ladder.setting import HIGHER, Setting
from bench.ladder.steps import Step
from bench.quality.score import paired_difference

# How much worse a guard metric (relative), or the share of right answers, may be and still count as no worse: the bad
# end of the 95% interval has to lie inside. That no difference was seen shows nothing by itself.
MARGIN = 0.05
QUALITY_MARGIN = 0.03


@dataclass(frozen=True)
class Decision:
    """What becomes of a rung's change, and each reason for it."""

    rung: str
    against: str
    kept: bool
    reasons: list[str]


def decide(setting: Setting, kept: RungRuns, tried: RungRuns, ladder: Ladder) -> Decision:
    """Decide on a rung whose boots are all done, by the steps that the ladder's table shows.

    Whenever it is asked again, with however many rungs measured since, it decides the same.
    """
    reasons = []
    if not tried.counting:
        causes = [tried.mixed] if tried.mixed else [boot.cause or "" for boot in tried.failed]
        causes += [void for each in tried.measured for void in each.voids]
        reasons.append(f"it gave no figure: {(causes[0].splitlines() or [''])[0][:300] if causes else 'no boot'}")
        return Decision(tried.rung, kept.rung, False, reasons)
    if not kept.counting:
        return Decision(tried.rung, kept.rung, False, [f"{kept.rung} gave no figure to compare with"])
    gained, said = _gained(setting.keep, kept, tried, ladder)
    watched = [_guarded(metric, kept, tried, ladder) for metric in setting.guards if metric != setting.keep]
    harmless, quality = _quality(setting, kept, tried)
    proved = effect([proof for each in tried.counting for proof in each.proofs])
    shown = [] if proved else ["its effect is not proved, so a difference can't be this change's"]
    reasons = [said, *(text for _, text in watched), quality, *shown]
    unharmed = all(passed for passed, _ in watched)
    return Decision(tried.rung, kept.rung, gained and unharmed and harmless and proved is True, reasons)


def _better(metric: str, found: Step) -> tuple[bool | None, str]:
    """Whether a step is for the better beyond noise (True), for the worse (False), or neither (None)."""
    if found.gain is None:
        return None, f"{metric}: {found.why}"
    interval = f", 95% {found.ci95[0]:+.1%} to {found.ci95[1]:+.1%}" if found.ci95 else f" ({found.why})"
    said = f"{metric} {found.gain:+.1%}{interval}"
    if found.below_noise is not False:
        known = "below noise" if found.below_noise else "no interval and no noise floor to tell it from noise"
        return None, f"{said}: {known}"
    return (found.gain > 0) == (metric in HIGHER), said


def _gained(metric: str, kept: RungRuns, tried: RungRuns, ladder: Ladder) -> tuple[bool, str]:
    better, said = _better(metric, step_between(metric, kept, tried, ladder.known_at(tried)))
    return better is True, said if better is not False else f"{said}: worse"


def _guarded(metric: str, kept: RungRuns, tried: RungRuns, ladder: Ladder) -> tuple[bool, str]:
    """Whether a guard metric is shown to be no worse: not beyond noise, nor by MARGIN at the interval's bad end.

    One that wasn't measured, or of which nobody knows how it scatters, hasn't passed.
    """
    found = step_between(metric, kept, tried, ladder.known_at(tried))
    better, said = _better(metric, found)
    bad = _bad_end(metric, found)
    if bad is None:
        return False, f"guard metric not known to be no worse: {said}"
    if better is False:
        return False, f"guard metric worse: {said}"
    if bad > MARGIN:
        return (
            False,
            f"guard metric not shown to be no worse: {said}; it may be {bad:.1%} worse, more than {MARGIN:.0%}",
        )
    return True, f"guard metric no worse, or by less than {MARGIN:.0%}: {said}"


def _bad_end(metric: str, found: Step) -> float | None:
    """By how much (relative) a metric may have got worse, at the bad end of what is known; None where nothing is."""
    if found.gain is None:
        return None
    if found.ci95 is not None:
        low, high = found.ci95
    elif found.scatter is not None:
        low, high = found.gain - found.scatter, found.gain + found.scatter
    else:
        return None
    return max(0.0, -low if metric in HIGHER else high)


def _quality(setting: Setting, kept: RungRuns, tried: RungRuns) -> tuple[bool, str]:
    """Whether quality is shown to be no worse, item by item: by the interval that a comparison of two runs prints too.

    It may not lie below no difference at all, nor reach further down than QUALITY_MARGIN.
    """
    before, after = answers(kept), answers(tried)
    suites = sorted(before.keys() & after.keys())
    if not suites:
        return not setting.quality, "no quality suite was asked" + ("" if setting.quality else ", as you chose")
    passed = []
    for suite in suites:
        try:
            found = paired_difference(before[suite], after[suite])
        except ValueError as error:
            return False, f"quality can't be compared: {error}"
        low, high = found.interval95
        said = f"{suite} {found.difference:+.2%}, 95% {low:+.2%} to {high:+.2%}, McNemar p {found.p:.3g}"
        if high < 0:
            return False, f"quality is worse: {said}"
        if low < -QUALITY_MARGIN:
            return False, f"quality not shown to be no worse: {said}; more than {QUALITY_MARGIN:.0%} may be lost"
        passed.append(said)
    return True, f"quality passes, no worse or by less than {QUALITY_MARGIN:.0%}: {'; '.join(passed)}"
