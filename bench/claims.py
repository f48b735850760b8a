"""Room bench: one claim against a run's figures: comparable or not, equivalent or not, and what a gap comes from."""

from dataclasses import dataclass

import numpy as np

from bench.attribution import attribute, claimed_factors
from bench.evidence import Evidence
from bench.floors import known_floor
from bench.measurement import Measurement
from bench.statistics import (
    BOOTS_FOR_INTERVAL,
    agreed,
    boots_needed,
    decide,
    interval95,
    spread,
    too_noisy,
)
from recipes.model_files import differing_files
from recipes.schema import MOST_BOOTS, Claim

LOWER_IS_BETTER = frozenset({"ttft_p95_ms", "tpot_p95_ms", "gpu_memory_gb"})
# Figures that don't depend on how fast the machine is: one boot shows them.
MACHINE_INDEPENDENT = frozenset({"acceptance_length", "exact_match"})
MIRRORED = {"NOT_REPRODUCED": "EXCEEDED", "EXCEEDED": "NOT_REPRODUCED"}


@dataclass(frozen=True)
class Judged:
    """What the evidence says of one claim.

    `tolerance_used` and `noise_floor` are in the metric's unit; `more_boots` is how many boots more than this run a
    new one needs to decide, 4 times in 5, where this one is INCONCLUSIVE and boots scatter as these did; None where
    boots don't decide.
    """

    state: str
    reason: str
    ci95: tuple[float, float] | None = None
    tolerance_used: float | None = None
    noise_floor: float | None = None
    more_boots: int | None = None


def judge_claim(claim: Claim, evidence: Evidence, measured: Measurement, voided: list[str]) -> dict:
    """Judge one claim: its row in verdict.json. `voided`: ids of the guards that void the run."""
    boots = [] if voided else measured.boots_of(claim)
    judged = _judge(claim, evidence, measured, boots, voided)
    reason = judged.reason
    answered = set(evidence.manifest.engine.answered) - {evidence.recipe.engine.version}
    if answered and not voided:
        reason += f"; on the substitute engine {', '.join(sorted(answered))}, not {evidence.recipe.engine.version}"
    return {
        "id": claim.id,
        "metric": claim.metric,
        "scope": claim.scope,
        "published": claim.published,
        "tolerance": claim.tolerance,
        "tolerance_used": judged.tolerance_used,
        "noise_floor": judged.noise_floor,
        "status": claim.status,
        "measured": float(np.mean(boots)) if boots else None,
        "ci95": judged.ci95,
        "more_boots": judged.more_boots,
        "attribution": None if voided else attribution(claim, evidence, measured),
        "state": judged.state,
        "reason": reason,
    }


def _judge(claim: Claim, evidence: Evidence, measured: Measurement, boots: list[float], voided: list[str]) -> Judged:
    if voided:
        return Judged("INVALID", f"voided by {', '.join(voided)}")
    otherwise = incomparable(claim, evidence)
    if otherwise:
        return Judged("NOT_COMPARABLE", otherwise)
    if not boots:
        return Judged("INCONCLUSIVE", f"{claim.metric} was not measured in this run")
    if claim.metric in MACHINE_INDEPENDENT:
        return judge_band(claim, boots, _counted(evidence, claim, boots))
    return judge_boots(claim, evidence, measured, boots)


def judge_band(claim: Claim, values: list[float], said: str) -> Judged:
    """A figure that one boot shows: every boot's value has to lie within the tolerance."""
    state = _decided(claim, min(values), max(values), claim.tolerance)
    least, most = claim.published - claim.tolerance, claim.published + claim.tolerance
    if state == "REPRODUCED":
        reason = f"within: {said}"
    elif state == "INCONCLUSIVE":
        reason = f"{said}: they straddle the tolerance, {least:g} to {most:g}"
    else:
        reason = f"outside {least:g} to {most:g}: {said}" + _praise(state)
    return Judged(state, reason, tolerance_used=claim.tolerance)


def judge_boots(claim: Claim, evidence: Evidence, measured: Measurement, boots: list[float]) -> Judged:
    """A figure that scatters between boots: equivalence of its 95% interval, and for a rate of both estimates.

    The tolerance is never below the noise floor; a floor above the claim's tolerance confirms nothing.
    """
    floor = noise_floor_of(claim, evidence)
    used = max(claim.tolerance, floor or 0.0)
    known = Judged("", "", interval95(boots), used, floor)
    if len(boots) < BOOTS_FOR_INTERVAL:
        have = "one boot, no interval" if len(boots) == 1 else f"{len(boots)} boots"
        return _with(known, "INCONCLUSIVE", f"{have}: {BOOTS_FOR_INTERVAL} are needed", BOOTS_FOR_INTERVAL - len(boots))
    estimates = {"whole run": boots} if claim.metric == "output_tok_s" else {"": boots}
    if claim.metric == "output_tok_s":
        if not measured.steady:
            alone = _decided(claim, *known.ci95, used)
            said = f"{measured.no_steady}; the whole run alone, {_interval(boots)}, would say {alone}"
            return _with(known, "INCONCLUSIVE", said)
        estimates["steady state"] = measured.steady
    states = {name: _decided(claim, *interval95(values), used) for name, values in estimates.items()}
    first, *rest = states.values()
    state = str(agreed(first, rest[0])) if rest else first
    said = "; ".join(f"{name} {_interval(values)}".strip() for name, values in estimates.items())
    said = f"{said}, over {len(boots)} boots; {_tolerances(claim, used, floor)}"
    if str(too_noisy(state, claim.tolerance, floor or 0.0)) != state:
        return _with(known, "INCONCLUSIVE", f"{_too_noisy(claim, floor)}; {said}")
    if state == "REPRODUCED":
        return _with(known, state, f"within: {said}")
    if state != "INCONCLUSIVE":
        return _with(known, state, f"outside {_band(claim, used)}: {said}{_praise(state)}")
    more, how = _more_boots(claim, estimates, used)
    return _with(known, state, f"{how}; {said}", more)


def _more_boots(claim: Claim, estimates: dict[str, list[float]], used: float) -> tuple[int | None, str]:
    """How many boots more a run would need to decide, 4 times in 5, and the sentence that says so.

    A run is never extended: looking at the figures before asking for more boots makes an interval too narrow.
    """
    least, most = claim.published - used, claim.published + used
    found = {name: boots_needed(spread(values), least, most) for name, values in estimates.items()}
    leaning = {name: _seen(claim, state) for name, (_, state) in found.items()}
    if len(set(leaning.values())) > 1:
        pair = " and ".join(f"the {name} to {state}" for name, state in leaning.items())
        why = (
            "the end, where streams fall idle, makes the difference: more prompts a window would decide, not more boots"
        )
        return None, f"the estimates point apart, {pair}; {why}"
    if any(count is None for count, _ in found.values()):
        return None, f"the mean lies on the edge of the tolerance, {_band(claim, used)}: no number of boots decides"
    edge = f"an interval straddles the tolerance, {_band(claim, used)}"
    if used > claim.tolerance and "REPRODUCED" in leaning.values():
        return None, f"{edge}; {_too_noisy(claim, used)}"
    have = len(next(iter(estimates.values())))
    total = max(have + 1, *(count for count, _ in found.values()))
    how = f"a new run with --boots {total} would decide, 4 times in 5"
    if total > MOST_BOOTS:
        how = f"{total} boots would decide, 4 times in 5: more than the {MOST_BOOTS} of one run"
    return total - have, f"{edge}; if mean and scatter stay, {how}"


def _too_noisy(claim: Claim, floor: float) -> str:
    times = f", {floor / claim.tolerance:.1f} times as wide" if claim.tolerance else ""
    return f"the machine's noise floor is above the tolerance{times}: no number of boots on it confirms this claim"


def _with(known: Judged, state: str, reason: str, more: int | None = None) -> Judged:
    return Judged(state, reason, known.ci95, known.tolerance_used, known.noise_floor, more)


def _seen(claim: Claim, state: str) -> str:
    """The state as a reader means it: for a latency, higher than claimed is the bad side."""
    return MIRRORED.get(state, state) if claim.metric in LOWER_IS_BETTER else state


def _decided(claim: Claim, low: float, high: float, tolerance: float) -> str:
    return _seen(claim, str(decide(low, high, claim.published - tolerance, claim.published + tolerance)))


def _praise(state: str) -> str:
    return "; better than claimed, a finding to explain and not a pass" if state == "EXCEEDED" else ""


def _band(claim: Claim, used: float) -> str:
    return f"{claim.published - used:,.6g} to {claim.published + used:,.6g}"


def _interval(values: list[float]) -> str:
    low, high = interval95(values)
    return f"95% {low:,.5g} to {high:,.5g}"


def _tolerances(claim: Claim, used: float, floor: float | None) -> str:
    """The tolerance and the noise floor, both."""
    if floor is None:
        return f"tolerance {claim.tolerance:g}, noise floor not measured"
    wider = f", so {used:.4g} is used" if used > claim.tolerance else ""
    return f"tolerance {claim.tolerance:g}, noise floor {floor:.4g}{wider}"


def noise_floor_of(claim: Claim, evidence: Evidence) -> float | None:
    """The noise floor for a claim, in its unit; None where the run knew none of this very recipe, load and machine.

    For a rate it is the greater of both estimates' floors.
    """
    record, _ = known_floor(evidence)
    if record is None:
        return None
    names = (claim.metric, f"{claim.metric}_steady")
    floors = [record.metrics[name].relative for name in names if name in record.metrics]
    return max(floors) * abs(claim.published) if floors else None


def _counted(evidence: Evidence, claim: Claim, boots: list[float]) -> str:
    if claim.metric == "exact_match":
        apart = f", {min(boots):.4g} to {max(boots):.4g} over {len(boots)} boots" if min(boots) < max(boots) else ""
        return f"the claim's own items{apart}"
    return (
        f"{'one boot' if len(boots) == 1 else f'{len(boots)} boots'}, {evidence.recipe.benchmark.prompt_source} prompts"
    )


def incomparable(claim: Claim, evidence: Evidence) -> str | None:
    """Why this run can't be set against the claim: another machine, model or engine; else None."""
    slug, manifest = evidence.machine.slug, evidence.manifest
    if manifest.url:
        return "somebody else's server: its weights, types, flags, environment and machine were not seen"
    if manifest.imported:
        differs = "".join(f"; {said}" for said in manifest.imported.differs)
        return f"a file of somebody's client names no machine, engine build, weights or settings{differs}"
    if claim.machine not in {"any", slug}:
        return f"the claim is of {claim.machine}, this machine is {slug}"
    model, observed = evidence.recipe.model, manifest.model.files
    if observed is None:
        return "the model's files were not recorded"
    if not model.files and not model.revision:
        return "which weights were served was not recorded: the recipe names neither their files nor a commit"
    differing = differing_files(evidence.recipe.model.files, observed)
    return f"not the claim's model: {', '.join(differing)} differ" if differing else None


def attribution(claim: Claim, evidence: Evidence, measured: Measurement) -> dict | None:
    """What a rate's difference from the claim comes from; None within the tolerance or without a rate.

    The steady rate is split where there is one: streams that fall idle at the end belong to no factor.
    """
    rates = measured.steady or measured.whole
    if claim.metric != "output_tok_s" or not rates or measured.factors is None or not measured.factors.streams:
        return None
    rate = float(np.mean(rates))
    if abs(rate - claim.published) <= claim.tolerance:
        return None
    claimed = claimed_factors(evidence.recipe, claim.published)
    return attribute(claimed, measured.factors, claim.published, rate, measured.gpu.conditions)
