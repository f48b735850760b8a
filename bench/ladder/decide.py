"""Room bench: the field's rule: keep a change only if what the team needs gets better, and nothing else worse. Pure."""

from dataclasses import dataclass

from bench.ladder.proof import effect
from bench.ladder.rows import RungRuns, answers, step_between
from bench.ladder.setting import HIGHER, Setting
from bench.ladder.steps import Step
from bench.quality.score import paired_difference


@dataclass(frozen=True)
class Decision:
    """What becomes of a rung's change, and each reason for it."""

    rung: str
    against: str
    kept: bool
    reasons: list[str]


def decide(setting: Setting, kept: RungRuns, tried: RungRuns, floors: dict[str, float]) -> Decision:
    """Decide on a rung whose boots are all done. `floors`: the machine's noise floors by metric, relative."""
    reasons = []
    if not tried.counting:
        causes = [tried.mixed] if tried.mixed else [boot.cause or "" for boot in tried.failed]
        causes += [void for each in tried.measured for void in each.voids]
        reasons.append(f"it gave no figure: {(causes[0].splitlines() or [''])[0][:300] if causes else 'no boot'}")
        return Decision(tried.rung, kept.rung, False, reasons)
    if not kept.counting:
        return Decision(tried.rung, kept.rung, False, [f"{kept.rung} gave no figure to compare with"])
    gained, said = _gained(setting.keep, kept, tried, floors)
    watched = [_guarded(metric, kept, tried, floors) for metric in setting.guards if metric != setting.keep]
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


def _gained(metric: str, kept: RungRuns, tried: RungRuns, floors: dict[str, float]) -> tuple[bool, str]:
    better, said = _better(metric, step_between(metric, kept, tried, floors.get(metric)))
    return better is True, said if better is not False else f"{said}: worse"


def _guarded(metric: str, kept: RungRuns, tried: RungRuns, floors: dict[str, float]) -> tuple[bool, str]:
    """Whether a guard metric got no worse beyond noise. One that wasn't measured, or can't be told, hasn't passed."""
    found = step_between(metric, kept, tried, floors.get(metric))
    better, said = _better(metric, found)
    if better is None and found.below_noise is None:
        return False, f"guard metric not known to be no worse: {said}"
    return better is not False, f"guard metric {'worse' if better is False else 'no worse'}: {said}"


def _quality(setting: Setting, kept: RungRuns, tried: RungRuns) -> tuple[bool, str]:
    """Whether quality passes: no worse, item by item, by McNemar's test at 5%."""
    before, after = answers(kept), answers(tried)
    suites = sorted(before.keys() & after.keys())
    if not suites:
        return not setting.quality, "no quality suite was asked" + ("" if setting.quality else ", as you chose")
    for suite in suites:
        try:
            found = paired_difference(before[suite], after[suite])
        except ValueError as error:
            return False, f"quality can't be compared: {error}"
        if found.difference < 0 and found.p < 0.05:
            return False, f"quality is worse: {suite} {found.difference:+.2%}, McNemar p {found.p:.3g}"
    return True, f"quality passes: {', '.join(suites)} not worse, item by item"
