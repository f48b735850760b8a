"""Room bench: the verdict: what a run's evidence says about the recipe's claims. Pure, and the same everywhere."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.analyse import analyse_window, latencies_ms, rounded, succeeded
from bench.counters import acceptance_length
from bench.evidence import Evidence, read_evidence
from bench.guards import Guard, run_guards
from bench.quality.score import score_suite
from bench.runfolder import dump_json, write_text
from bench.statistics import interval95
from images.console import note
from images.errors import RunProblem
from recipes.model_files import differing_files
from recipes.schema import Claim

SCHEMA = 1
EXIT_CODES = {
    "REPRODUCED": 0,
    "MEASURED": 0,
    "NOT_REPRODUCED": 3,
    "INCONCLUSIVE": 4,
    "NOT_COMPARABLE": 5,
    "EXCEEDED": 6,
    "INVALID": 7,
}
WORST_FIRST = ("INVALID", "NOT_REPRODUCED", "INCONCLUSIVE", "NOT_COMPARABLE", "EXCEEDED", "REPRODUCED")
BOOTS_FOR_INTERVAL = 3
LOWER_IS_BETTER = frozenset({"ttft_p95_ms", "tpot_p95_ms", "gpu_memory_gb"})
# Figures that don't depend on how fast the machine is: one boot shows them.
MACHINE_INDEPENDENT = frozenset({"acceptance_length", "exact_match"})


@dataclass(frozen=True)
class Measurement:
    """A run's figures, boot by boot. Lists hold one value a boot (mean over its windows)."""

    whole: list[float]
    steady: list[float]
    little: list[float]
    acceptance: list[float]
    latency_ms: dict[str, dict[str, float | None]] | None
    quality: dict[str, dict[str, dict]]

    def boots_of(self, claim: Claim) -> list[float]:
        """The values of a claim's metric, one a boot; empty where it wasn't measured."""
        metric = claim.metric
        if metric == "exact_match":
            suite, _, task = (claim.scope or "").partition("/")
            found = self.quality.get(suite, {}).get(task or "all")
            return [found["share"]] if found else []
        if metric == "output_tok_s":
            return self.whole
        if metric == "acceptance_length":
            return self.acceptance
        if metric in {"ttft_p95_ms", "tpot_p95_ms"} and self.latency_ms:
            value = self.latency_ms[metric[:4]]["p95"]
            return [] if value is None else [value]
        return []


def measure_evidence(evidence: Evidence) -> Measurement:
    """Reduce a run's windows to figures."""
    usable = [window for window in evidence.windows if succeeded(window.arrays).any()]
    numbers = sorted({window.boot for window in usable})
    results = {id(window): analyse_window(window.arrays, evidence.recipe.benchmark.concurrency) for window in usable}

    def a_boot(pick) -> list[float]:
        rows = [[pick(window) for window in usable if window.boot == number] for number in numbers]
        return [float(np.mean(row)) for row in rows if all(value is not None for value in row)]

    return Measurement(
        whole=a_boot(lambda window: results[id(window)].whole),
        steady=a_boot(lambda window: results[id(window)].steady),
        little=a_boot(lambda window: results[id(window)].little),
        acceptance=a_boot(lambda window: acceptance_length(window.counted) if window.counted else None),
        latency_ms=latencies_ms([window.arrays for window in usable]) if usable else None,
        quality={suite: score_suite(answers) for suite, answers in evidence.quality.items() if answers},
    )


def judge(evidence: Evidence) -> dict:
    """Judge a run: the mapping of verdict.json (contracts.md), figures rounded to six digits."""
    guards = run_guards(evidence)
    voided = [guard for guard in guards if guard.voids]
    measured = measure_evidence(evidence)
    claims = [judge_claim(claim, evidence, measured, voided) for claim in evidence.recipe.claims]
    figures, reasons = _figures(evidence, measured, voided)
    verdict = {
        "schema": SCHEMA,
        "recipe": evidence.recipe.id,
        "machine": evidence.machine.slug,
        "setting": _setting(evidence),
        "state": overall_state(evidence.recipe.claims, claims, voided),
        "status": evidence.recipe.status,
        "boots": len({window.boot for window in evidence.windows}),
        "windows": len(evidence.windows),
        "claims": claims,
        "guards": [asdict(guard) for guard in guards],
        **figures,
        "reasons": reasons,
    }
    return rounded(verdict)


def _setting(evidence: Evidence) -> dict:
    """What was measured on what, for a reader of the figures."""
    load, machine, manifest = evidence.recipe.benchmark, evidence.machine, evidence.manifest
    observed = manifest.model.files
    differing = differing_files(evidence.recipe.model.files, observed) if observed is not None else None
    return {
        "load": {
            "prompts": load.prompt_source,
            "requests": load.prompts,
            "input_len": load.input_len,
            "output_len": load.output_len,
            "concurrency": load.concurrency,
            "temperature": load.temperature,
            "seed": load.seed,
        },
        "engine": {
            "name": manifest.engine.name,
            "answered": sorted(set(manifest.engine.answered)),
            "patches": [patch.get("file") for patch in manifest.engine.patches],
        },
        "machine": {
            "cpu": machine.cpu.get("model"),
            "cores": machine.cpu.get("cores"),
            "memory_gb": machine.memory_gb,
            "gpus": [gpu.get("name") for gpu in machine.gpus],
        },
        "model_files_that_differ": differing,
        "url": manifest.url,
    }


def overall_state(claims: list[Claim], judged: list[dict], voided: list[Guard]) -> str:
    """The worst state over the claims that judge; MEASURED where none does."""
    if voided:
        return "INVALID"
    states = {row["state"] for claim, row in zip(claims, judged, strict=True) if claim.judge}
    return next((state for state in WORST_FIRST if state in states), "MEASURED")


def _figures(evidence: Evidence, measured: Measurement, voided: list[Guard]) -> tuple[dict, dict]:
    """The measured part of verdict.json, and for every null in it the reason."""
    reasons = {
        "gpu_memory_gb": "no GPU telemetry in this run",
        "energy_j_per_token": "no power telemetry in this run",
    }
    rates = {name: _mean(getattr(measured, name)) for name in ("whole", "steady", "little")}
    interval = interval95(measured.whole)
    acceptance = _mean(measured.acceptance)
    latency, quality = measured.latency_ms, measured.quality or None
    if voided:
        rates, interval, acceptance, latency, quality = dict.fromkeys(rates), None, None, None, None
        why = f"the run is invalid ({', '.join(guard.id for guard in voided)}): it gives no figure"
        reasons |= dict.fromkeys(("output_tok_s", "ci95", "latency_ms", "acceptance_length", "quality"), why)
    else:
        reasons |= _why_missing(rates, interval, acceptance, quality)
    figures = {
        "output_tok_s": rates,
        "ci95": interval,
        "latency_ms": latency,
        "acceptance_length": acceptance,
        "gpu_memory_gb": None,
        "energy_j_per_token": None,
        "quality": quality,
    }
    return figures, reasons


def _why_missing(rates: dict, interval: tuple | None, acceptance: float | None, quality: dict | None) -> dict:
    missing = {}
    if rates["whole"] is None:
        missing |= dict.fromkeys(("output_tok_s", "ci95", "latency_ms", "acceptance_length"), "no load was applied")
        return missing if quality else {**missing, "quality": "no quality suite was run"}
    if rates["steady"] is None:
        missing["output_tok_s.steady"] = "the plateau is shorter than three mean request times"
    if interval is None:
        missing["ci95"] = "one boot, no interval"
    if acceptance is None:
        missing["acceptance_length"] = "the engine drafted no tokens"
    if quality is None:
        missing["quality"] = "no quality suite was run"
    return missing


def judge_claim(claim: Claim, evidence: Evidence, measured: Measurement, voided: list[Guard]) -> dict:
    """Judge one claim: state, and the reason in words."""
    boots = [] if voided else measured.boots_of(claim)
    state, reason = _state(claim, evidence, boots, voided)
    answered = set(evidence.manifest.engine.answered) - {evidence.recipe.engine.version}
    if answered and not voided:
        reason += f"; on the substitute engine {', '.join(sorted(answered))}, not {evidence.recipe.engine.version}"
    return {
        "id": claim.id,
        "metric": claim.metric,
        "scope": claim.scope,
        "published": claim.published,
        "tolerance": claim.tolerance,
        "status": claim.status,
        "measured": _mean(boots),
        "state": state,
        "reason": reason,
    }


def _state(claim: Claim, evidence: Evidence, boots: list[float], voided: list[Guard]) -> tuple[str, str]:
    if voided:
        return "INVALID", f"voided by {', '.join(guard.id for guard in voided)}"
    otherwise = incomparable(claim, evidence)
    if otherwise:
        return "NOT_COMPARABLE", otherwise
    if not boots:
        return "INCONCLUSIVE", f"{claim.metric} was not measured in this run"
    if claim.metric in MACHINE_INDEPENDENT:
        return _compare(claim, min(boots), max(boots), f"{_counted(evidence, claim, len(boots))}")
    interval = interval95(boots)
    if interval is None or len(boots) < BOOTS_FOR_INTERVAL:
        return "INCONCLUSIVE", f"{len(boots)} boot(s), no interval; {BOOTS_FOR_INTERVAL} boots are needed"
    return _compare(claim, *interval, f"95% interval {interval[0]:.5g} to {interval[1]:.5g} over {len(boots)} boots")


def _counted(evidence: Evidence, claim: Claim, boots: int) -> str:
    if claim.metric == "exact_match":
        return "the claim's own items"
    return f"{'one boot' if boots == 1 else f'{boots} boots'}, {evidence.recipe.benchmark.prompt_source} prompts"


def incomparable(claim: Claim, evidence: Evidence) -> str | None:
    """Why this run can't be set against the claim: another machine or another model; else None."""
    slug = evidence.machine.slug
    if evidence.manifest.url:
        return "somebody else's server: its weights, types, flags, environment and machine were not seen"
    if claim.machine not in {"any", slug}:
        return f"the claim is of {claim.machine}, this machine is {slug}"
    observed = evidence.manifest.model.files
    if observed is None:
        return "the model's files were not recorded"
    differing = differing_files(evidence.recipe.model.files, observed)
    return f"not the claim's model: {', '.join(differing)} differ" if differing else None


def _compare(claim: Claim, low: float, high: float, said: str) -> tuple[str, str]:
    """Equivalence: the whole interval inside the tolerance, wholly outside on one side, or straddling."""
    least, most = claim.published - claim.tolerance, claim.published + claim.tolerance
    if least <= low and high <= most:
        return "REPRODUCED", f"within: {said}"
    band = f"outside {least:g} to {most:g}: {said}"
    below, above = high < least, low > most
    if claim.metric in LOWER_IS_BETTER:
        below, above = above, below
    if below:
        return "NOT_REPRODUCED", band
    if above:
        return "EXCEEDED", f"{band}: better than claimed, a finding to explain and not a pass"
    return "INCONCLUSIVE", f"{said}: the interval straddles the tolerance, {least:g} to {most:g}"


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def write_verdict(run: Path) -> dict:
    """Judge a run folder and write its verdict.json; where it can't be written, a note says so.

    Raises RunProblem when the folder can't be read. The same folder gives the same bytes, anywhere.
    """
    evidence = read_evidence(run)
    try:
        verdict = judge(evidence)
        text = dump_json(verdict)
    except (ValueError, OverflowError, IndexError) as error:  # numbers that no real run holds
        raise RunProblem(f"{run}: can't be judged: {error}") from error
    try:
        write_text(run / "verdict.json", text)
    except OSError as error:
        note(f"The verdict could not be stored in {run}: {error.strerror}.")
    return verdict
