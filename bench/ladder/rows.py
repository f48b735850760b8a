"""Room bench: a ladder's table from its runs alone: what each rung gave, gained and cost, and its proof."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from bench.evidence import Evidence, read_evidence
from bench.floors import known_floor
from bench.guards import Guard, in_words, run_guards
from bench.ladder.combine import combine, incomparable
from bench.ladder.journal import RUNS, Boot
from bench.ladder.proof import Proof, effect, proofs
from bench.ladder.steps import Step, drift, step
from bench.measurement import Measurement, measure_evidence
from bench.quality.score import paired_difference, weakest
from bench.verdict import judge
from images.errors import RunProblem

RATE = "output_tok_s"
TIMED = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Measured:
    """One finished boot of a rung, read and looked at. `voids`: what the guards hold against it, in words."""

    boot: Boot
    evidence: Evidence
    guards: list[Guard]
    voids: list[str]
    visit: str
    figures: Measurement
    proofs: list[Proof]

    @property
    def counts(self) -> bool:
        """Whether a figure may be taken from it."""
        return not self.voids

    @property
    def sound(self) -> bool:
        """Whether what needs no clock may be taken from it: answers, and proofs."""
        return not any(guard.voids and guard.scope == "run" for guard in self.guards)


@dataclass(frozen=True)
class RungRuns:
    """A rung's boots: those measured (void ones among them), and those that failed."""

    rung: str
    measured: list[Measured]
    failed: list[Boot]

    @property
    def counting(self) -> list[Measured]:
        """The boots from which figures are taken: none where they are not of one configuration."""
        return [] if self.mixed else [each for each in self.measured if each.counts]

    @property
    def sound(self) -> list[Measured]:
        """The boots from which answers may be taken, and proofs, whether or not what was timed in them counts."""
        return [each for each in self.measured if each.sound]

    @cached_property
    def mixed(self) -> str | None:
        """Why the boots can't be taken together; None where they can."""
        try:
            combine([each.evidence for each in self.sound]) if self.sound else None
        except RunProblem as problem:
            return str(problem)
        return None

    @property
    def answering(self) -> list[Measured]:
        """The boots that the row is of: those that count, else the sound ones: they have answers and proofs."""
        return self.counting or self.sound

    def values(self, metric: str) -> dict[str, list[float]]:
        """By visit one value of a metric a boot; nothing for a boot that doesn't have it."""
        found: dict[str, list[float]] = {}
        for each in self.counting:
            value = figure(each.figures, metric)
            if value is not None and value > 0:
                found.setdefault(each.visit, []).append(value)
        return found


@dataclass(frozen=True)
class Ladder:
    """All rungs of a ladder, measured or not, in order; `deciding`: each was decided on before the next was begun."""

    rungs: Sequence[RungRuns]
    deciding: bool = False

    def known_at(self, runs: RungRuns) -> Sequence[RungRuns]:
        """The rungs by whose scatter a step to this one is judged: all; of a ladder that decides those up to it.

        No more were measured when it was decided on, and the table shows by what was decided, whatever came later.
        """
        names = [each.rung for each in self.rungs]
        return self.rungs[: names.index(runs.rung) + 1] if self.deciding else self.rungs

    @cached_property
    def visits(self) -> dict[str, str]:
        """Short names of the visits, 1, 2, …, in the order of their first runs."""
        boots = sorted((each for runs in self.rungs for each in runs.measured), key=lambda each: each.boot.run or "")
        return {visit: str(number) for number, visit in enumerate(dict.fromkeys(each.visit for each in boots), start=1)}

    @cached_property
    def cards(self) -> dict[str, list[str]]:
        """The GPUs of each visit, by its short name; UUIDs."""
        found: dict[str, set[str]] = {name: set() for name in self.visits.values()}
        for each in (each for runs in self.rungs for each in runs.measured):
            found[self.visits[each.visit]] |= {str(gpu.get("uuid")) for gpu in each.evidence.machine.gpus}
        return {name: sorted(uuids) for name, uuids in found.items()}

    def named(self, by_visit: dict[str, float] | None) -> dict[str, float] | None:
        """A figure by visit under the visits' short names."""
        return by_visit and {self.visits[visit]: value for visit, value in sorted(by_visit.items(), key=self._order)}

    def _order(self, pair: tuple[str, float]) -> int:
        return int(self.visits[pair[0]])


def same_estimate(metric: str, *rungs: RungRuns) -> str:
    """The rate to compare rungs by: the steady state's if every boot of all of them has one, else the whole run's."""
    if metric != RATE:
        return metric
    steady = all(each.figures.steady for runs in rungs for each in runs.counting)
    return "steady" if steady else "whole"


def step_between(metric: str, before: RungRuns, after: RungRuns, every: Sequence[RungRuns]) -> Step:
    """What a metric gained from one rung to another; no figure, and why, where they can't be compared.

    `every`: the ladder's rungs (Ladder.known_at); over several visits they tell how much a step scatters. The noise
    floor is the wider one of the two rungs', where it is known.
    """
    lacking = [runs.rung for runs in (before, after) if not runs.counting]
    if lacking:
        return Step(None, None, None, f"{' and '.join(lacking)} gave no figure to compare with")
    other = incomparable(before.counting[0].evidence, after.counting[0].evidence)
    if other:
        return Step(None, None, None, f"not comparable with {before.rung}: {other}")
    name = same_estimate(metric, before, after)
    values = [runs.values(name) for runs in (before, after)]
    lacking = [runs.rung for runs, found in zip((before, after), values, strict=True) if not found]
    if lacking:
        return Step(None, None, None, f"{metric} was not measured on {' and '.join(lacking)}")
    floors = [found[metric] for found in map(floors_of, (before, after)) if metric in found]
    return step(*values, max(floors, default=None), [runs.values(name) for runs in every])


def figure(figures: Measurement, metric: str) -> float | None:
    """One boot's figure; the rates are called `steady` and `whole`."""
    latency = figures.latency_ms or {}
    found = {
        "steady": (figures.steady or [None])[0],
        "whole": (figures.whole or [None])[0],
        "acceptance_length": (figures.acceptance or [None])[0],
        "energy_j_per_token": figures.gpu.energy_j_per_token,
        **{f"{name}_p95_ms": (latency.get(name) or {}).get("p95") for name in TIMED},
    }
    return found[metric]


def read_measured(folder: Path, boots: Sequence[Boot]) -> dict[str, RungRuns]:
    """Read the runs of a ladder's boots; void boots are left out. Raises RunProblem for a run that can't be read."""
    found: dict[str, RungRuns] = {}
    for boot in boots:
        runs = found.setdefault(boot.rung, RungRuns(boot.rung, [], []))
        if boot.state == "failed":
            runs.failed.append(boot)
        elif boot.state == "finished" and boot.run:
            runs.measured.append(read_boot(folder, boot))
    return found


def read_boot(folder: Path, boot: Boot) -> Measured:
    """Read one finished boot's run."""
    evidence = read_evidence(folder / RUNS / boot.run)
    if evidence.recipe.id.split("/", maxsplit=1)[1] != boot.rung:
        said = f"the journal calls {boot.run} a boot of {boot.rung}; it is one of {evidence.recipe.id}"
        raise RunProblem(f"{folder}: {said}")
    guards = run_guards(evidence)
    voids = in_words(guards) if any(guard.voids for guard in guards) else []
    figures = measure_evidence(evidence)
    return Measured(boot, evidence, guards, voids, visit_of(evidence), figures, proofs(evidence, guards))


def visit_of(evidence: Evidence) -> str:
    """What tells one visit to a machine from another: the kernel's boot and the GPUs."""
    hosts = {(window.record.host or {}).get("boot") for window in evidence.windows if window.record}
    gpus = ",".join(str(gpu.get("uuid")) for gpu in evidence.machine.gpus)
    return f"{'/'.join(sorted(str(host) for host in hosts))} {gpus or evidence.machine.slug}"


def rung_row(plan: dict, runs: RungRuns, against: RungRuns | None, ladder: Ladder) -> dict:
    """A rung's row of ladder.json. `plan`: what is known without measuring."""
    used = runs.answering
    row = {**plan, "boots": [_boot_row(each, ladder.visits) for each in runs.measured]}
    row["failed"] = [{"boot": boot.boot, "run": boot.run, "cause": boot.cause} for boot in runs.failed]
    row["run"] = [each.boot.run for each in used]
    row["windows"] = sum(len(each.evidence.windows) for each in used)
    if not runs.measured:
        return row | {"state": None, "why": _why_nothing(plan, runs)}
    if runs.mixed:
        return row | {"state": "INVALID", "why": runs.mixed}
    if not used:
        return row | {"state": "INVALID", "why": _held_against(runs.measured)} | _unproved(_effect(runs.measured))
    try:
        together = combine([each.evidence for each in used], [each.evidence for each in runs.sound])
        verdict = judge(together, _worst_of(used))
    except RunProblem as problem:
        return row | {"state": "INVALID", "why": str(problem)}
    row |= _figures(verdict, runs, used)
    row |= _gain(runs, against, ladder)
    row |= _effect(used)
    row["quality_change"] = _quality_change(against, runs)
    return row


def _worst_of(boots: list[Measured]) -> list[Guard]:
    """The guards' findings on several boots as one's: of each guard the one that voids something, if any."""
    found: dict[str, Guard] = {}
    for guard in (guard for each in boots for guard in each.guards):
        if guard.id not in found or (guard.voids and not found[guard.id].voids):
            found[guard.id] = guard
    return list(found.values())


def _held_against(boots: list[Measured]) -> str | None:
    """What the guards hold against boots, in words, each thing once."""
    return "; ".join(dict.fromkeys(void for each in boots for void in each.voids)) or None


def _boot_row(each: Measured, names: dict[str, str]) -> dict:
    record = each.evidence.manifest.boots[0] if each.evidence.manifest.boots else None
    caches = (record.caches if record else None) or {}
    return {
        "boot": each.boot.boot,
        "run": each.boot.run,
        "visit": names[each.visit],
        "voided_by": each.voids,
        "sound": each.sound,
        "steady_tok_s": figure(each.figures, "steady"),
        "whole_tok_s": figure(each.figures, "whole"),
        "boot_s": record.boot_s if record else None,
        "caches": caches.get("state"),
        "caches_sha256": caches.get("sha256"),
    }


def _why_nothing(plan: dict, runs: RungRuns) -> str:
    if plan.get("applies"):
        return plan["applies"]
    causes = [boot.cause for boot in runs.failed if boot.cause]
    return causes[0] if causes else "not measured yet"


def _figures(verdict: dict, runs: RungRuns, used: list[Measured]) -> dict:
    """What the boots together say: the combined verdict's figures under the ladder's names."""
    estimate = same_estimate(RATE, runs)
    values = [value for boots in runs.values(estimate).values() for value in boots]
    latency = verdict["latency_ms"] or {}
    conditions = verdict["conditions"] or {}
    return {
        "state": verdict["state"],
        "status": verdict["status"],
        "why": _held_against(used),
        "output_tok_s": float(np.mean(values)) if values else None,
        "whole_tok_s": verdict["output_tok_s"]["whole"],
        "estimate": estimate,
        "ci95": verdict["ci95_steady" if estimate == "steady" else "ci95"],
        "acceptance_length": verdict["acceptance_length"],
        "latency_ms": {name: {p: latency[name][p] for p in ("p50", "p95")} for name in latency},
        "gpu_memory_gb": verdict["gpu_memory_gb"],
        "power_w": conditions.get("power_w"),
        "gpu_busy_pct": conditions.get("utilisation_pct"),
        "step_ms": _step_ms(used[0].evidence, verdict["acceptance_length"], values),
        "limits": (verdict["server_cpu"] or {}).get("limits"),
        "graphs": (verdict["setting"]["cuda_graphs"] or {}).get("said"),
        "energy_j_per_token": verdict["energy_j_per_token"],
        "quality": verdict["quality"],
        "claims": [{key: claim[key] for key in ("id", "state", "measured", "reason")} for claim in verdict["claims"]],
        "reasons": verdict["reasons"],
    }


def _step_ms(evidence: Evidence, acceptance: float | None, rates: list[float]) -> float | None:
    """Mean time of a decode step (ms) with all streams in flight: streams × tokens a step ÷ rate."""
    drafts = "speculative-config" in evidence.recipe.engine.flags
    if not rates or (drafts and acceptance is None):
        return None
    return 1e3 * evidence.recipe.benchmark.concurrency * (acceptance if drafts else 1.0) / float(np.mean(rates))


def floors_of(runs: RungRuns) -> dict[str, float]:
    """The noise floors that a rung's boots, all of them, knew of this very rung, load and card; relative, by metric."""
    records = [known_floor(each.evidence)[0] for each in runs.counting]
    record = records[0] if records and all(each == records[0] for each in records) else None
    known = {name: noise.relative for name, noise in record.metrics.items()} if record else {}
    return known | ({"output_tok_s": known["output_tok_s_steady"]} if "output_tok_s_steady" in known else {})


def _gain(runs: RungRuns, against: RungRuns | None, ladder: Ladder) -> dict:
    if against is None:
        found = Step(None, None, None, "the ladder begins here")
    else:
        found = step_between(RATE, against, runs, ladder.known_at(runs))
    return {
        "against": against.rung if against else None,
        "step_gain": found.gain,
        "step_ci95": found.ci95,
        "step_by_visit": ladder.named(found.by_visit),
        "step_scatter_of": found.scatter_of,
        "below_noise": found.below_noise,
        "step_why": found.why,
    }


def _effect(boots: list[Measured]) -> dict:
    """Proved where every boot proves it; a failure on any boot is told with its reason."""
    verdicts = [effect(each.proofs) for each in boots]
    proved = False if False in verdicts else None if None in verdicts else True
    wrong = [f"{proof.subject}: {proof.said}" for each in boots for proof in each.proofs if proof.ok is not True]
    return {
        "effect_proved": proved,
        "effect_why": "; ".join(dict.fromkeys(wrong)) or None,
        "effect": [proof.as_dict() for proof in boots[0].proofs],
    }


def _unproved(found: dict) -> dict:
    """An effect as boots show it that count for nothing: they may refute it, and prove nothing."""
    return found if found["effect_proved"] is not True else {**found, "effect_proved": None}


def _quality_change(against: RungRuns | None, runs: RungRuns) -> dict | None:
    """Answers item by item, this rung's against the one's before it; None where one of them has no suite."""
    if against is None:
        return None
    before, after = answers(against), answers(runs)
    try:
        return {suite: asdict(paired_difference(before[suite], after[suite])) for suite in before.keys() & after.keys()}
    except ValueError:
        return None


def answers(runs: RungRuns) -> dict[str, list[dict]]:
    """A rung's answers by suite, of the boot that got least right, of those that count; empty where there is none."""
    return weakest(each.evidence.quality for each in runs.sound)


def whole_ladder(ladder: Ladder, chain: Sequence[RungRuns], published: Sequence[float | None]) -> dict | None:
    """The last rung of `chain` over the first, beside the ratio published of them; None unless two gave figures."""
    measured = [(runs, claimed) for runs, claimed in zip(chain, published, strict=True) if runs.counting]
    if len(measured) < 2:
        return None
    (first, below), (last, above) = measured[0], measured[-1]
    found = step_between(RATE, first, last, ladder.rungs)
    by_visit = ladder.named(found.by_visit)
    return {
        "from": first.rung,
        "to": last.rung,
        "ratio": None if found.gain is None else 1 + found.gain,
        "ci95": None if found.ci95 is None else [1 + edge for edge in found.ci95],
        "by_visit": None if by_visit is None else {name: 1 + gain for name, gain in by_visit.items()},
        "scatter_of": found.scatter_of,
        "why": found.why,
        "published": above / below if above and below else None,
        "published_status": "claimed",
    }


def rounds_drift(rungs: list[RungRuns]) -> dict | None:
    """Drift over the rounds, from boots of one visit: each boot's rate over its rung's mean there."""
    rows = []
    for runs in rungs:
        for visit, values in runs.values(same_estimate(RATE, runs)).items():
            mean = float(np.mean(values))
            boots = [each for each in runs.counting if each.visit == visit]
            if len(values) == len(boots) > 1:
                rows.append({each.boot.boot: value / mean for each, value in zip(boots, values, strict=True)})
    return drift(rows)
