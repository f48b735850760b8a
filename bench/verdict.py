"""Room bench: the verdict: what a run's evidence says about the recipe's claims. Pure, and the same everywhere."""

import re
from dataclasses import asdict
from pathlib import Path

import numpy as np

from bench.analyse import rounded
from bench.claims import judge_claim
from bench.evidence import Evidence, judging, read_evidence
from bench.floors import known_floor
from bench.guards import Guard, run_guards
from bench.measurement import Measurement, measure_evidence
from bench.runfolder import dump_json, write_text
from bench.server_load import mean_load
from bench.statistics import interval95
from images.console import note
from recipes.graphs import graph_fit
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
LARGEST_GRAPH = re.compile(r"'max_cudagraph_capture_size': (\d{1,9})\b")  # of the configuration that vLLM logs
WORST_FIRST = ("INVALID", "NOT_REPRODUCED", "INCONCLUSIVE", "NOT_COMPARABLE", "EXCEEDED", "REPRODUCED")


def judge(evidence: Evidence, guards: list[Guard] | None = None) -> dict:
    """Judge a run: the mapping of verdict.json (contracts.md), figures rounded to six digits.

    `guards`: their findings where they are known already, of runs that were put together; else they are asked.
    Raises RunProblem for numbers that no real run holds.
    """
    with judging(f"a run of {evidence.recipe.id}"):
        return _judge(evidence, guards)


def judged(run: Path) -> tuple[Evidence, dict]:
    """A run folder read and judged. Raises RunProblem, naming the folder, when either can't be done."""
    evidence = read_evidence(run)
    with judging(str(run)):
        return evidence, _judge(evidence, None)


def _judge(evidence: Evidence, guards: list[Guard] | None) -> dict:
    guards = run_guards(evidence) if guards is None else guards
    voided = [guard for guard in guards if guard.voids]
    measured = measure_evidence(evidence)
    claims = [
        judge_claim(claim, evidence, measured, [guard.id for guard in voided if guard.voids_metric(claim.metric)])
        for claim in evidence.recipe.claims
    ]
    figures, reasons = _figures(evidence, measured, voided)
    verdict = {
        "schema": SCHEMA,
        "recipe": evidence.recipe.id,
        "machine": evidence.machine.slug,
        "setting": _setting(evidence),
        "state": overall_state(evidence.recipe.claims, claims, voided),
        "status": figures_status(evidence),
        "boots": len({window.boot for window in evidence.windows}),
        "windows": len(evidence.windows),
        "claims": claims,
        "guards": [guard.as_dict(evidence.manifest.schema_) for guard in guards],
        **figures,
        "reasons": reasons,
    }
    return rounded(verdict)


def figures_status(evidence: Evidence) -> str:
    """What the figures are: the recipe's status; a file that somebody made elsewhere claims what it says."""
    status = evidence.recipe.status
    return "claimed" if evidence.manifest.imported and status == "measured" else status


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
            "patches": [str(patch.get("file") or "?") for patch in manifest.engine.patches],
        },
        "machine": {
            "cpu": machine.cpu.get("model"),
            "cores": machine.cpu.get("cores"),
            "memory_gb": machine.memory_gb,
            "gpus": [str(gpu.get("name") or "?") for gpu in machine.gpus],
        },
        "model_files_that_differ": differing,
        "cuda_graphs": _cuda_graphs(evidence),
        "url": manifest.url,
        "imported": manifest.imported.model_dump() if manifest.imported else None,
    }


def _cuda_graphs(evidence: Evidence) -> dict | None:
    """Tokens of the engine's largest CUDA graph and of a decode step, and what is wrong; None where no log tells."""
    told = {int(size) for boot in evidence.boots for size in LARGEST_GRAPH.findall(boot.log or "")}
    fit = graph_fit(evidence.recipe, told.pop() if len(told) == 1 else None)
    return fit and {"largest": fit.largest, "step": fit.step, "said": fit.said}


def overall_state(claims: list[Claim], judged: list[dict], voided: list[Guard]) -> str:
    """The worst state over the claims that judge; MEASURED where none does.

    A guard that voids only what was timed leaves claims that need no clock; with none of those it voids the run.
    """
    states = {row["state"] for claim, row in zip(claims, judged, strict=True) if claim.judge}
    if any(guard.scope == "run" for guard in voided) or (voided and not states):
        return "INVALID"
    return next((state for state in WORST_FIRST if state in states), "MEASURED")


def _figures(evidence: Evidence, measured: Measurement, voided: list[Guard]) -> tuple[dict, dict]:
    """The measured part of verdict.json, and for every null in it the reason."""
    rates = {name: _mean(getattr(measured, name)) for name in ("whole", "steady", "little")}
    figures = {
        "output_tok_s": rates,
        "ci95": interval95(measured.whole),
        "ci95_steady": interval95(measured.steady),
        "per_user_tok_s": _mean(measured.per_user),
        "streams": {
            "asked": evidence.recipe.benchmark.concurrency,
            "n_eff": measured.n_eff,
            "peak": measured.peak,
        },
        "little_gap": measured.little_gap,
        "latency_ms": measured.latency_ms,
        "acceptance_length": _mean(measured.acceptance),
        "gpu_memory_gb": max(measured.gpu.memory_gb, default=None),
        "energy_j_per_token": measured.gpu.energy_j_per_token,
        "energy_scope": measured.gpu.energy_scope,
        "conditions": measured.gpu.conditions,
        "server_cpu": _server_cpu(measured),
        "quality": measured.quality or None,
    }
    reasons = measured.gpu.reasons | _why_missing(figures, measured)
    lost = [name for name in figures if any(guard.voids_metric(name) for guard in voided)]
    if lost:
        names = ", ".join(guard.id for guard in voided)
        whole = any(guard.scope == "run" for guard in voided)
        why = f"the run is invalid ({names}): it gives no figure" if whole else f"nothing timed counts ({names})"
        reasons = {key: said for key, said in reasons.items() if key.partition(".")[0] not in lost}
        reasons |= dict.fromkeys(lost, why)
        emptied = {
            "output_tok_s": dict.fromkeys(rates),
            "streams": {**dict.fromkeys(figures["streams"]), "asked": figures["streams"]["asked"]},
        }
        figures |= dict.fromkeys(lost) | {name: value for name, value in emptied.items() if name in lost}
    known = {"noise_floor": _noise_floor(evidence), "client_ceiling": _client_ceiling(evidence)}
    told, other = evidence.machine.reasons or {}, known_floor(evidence)[1]
    told = told | ({"noise_floor": other} if other else {})
    unknown = {name: told.get(name, "not recorded in this run") for name, value in known.items() if value is None}
    return {**figures, **known}, reasons | unknown | _unread(evidence)


def _unread(evidence: Evidence) -> dict:
    """Of the suites whose answers lie in a run that its recipe doesn't ask: that they say nothing."""
    asked = evidence.recipe.quality.suites if evidence.recipe.quality else ()
    files = evidence.answered_in.items()
    return {
        f"quality.{suite}": f"{file} was not read: the recipe asks no such suite"
        for suite, file in files
        if suite not in asked
    }


def _server_cpu(measured: Measurement) -> dict | None:
    """Shares of a core of the server's own processes, and whether they set the rate; None where nobody looked."""
    if not measured.server:
        return None
    known = asdict(mean_load(measured.server))
    del known["gpu_busy_pct"]  # it stands among the conditions
    return {**known, "limits": measured.limits}


def _noise_floor(evidence: Evidence) -> dict | None:
    """The noise floor of this very recipe, load and machine that the run knew when it began: relative, by metric."""
    record = known_floor(evidence)[0]
    if record is None:
        return None
    floors = {name: noise.relative for name, noise in sorted(record.metrics.items())}
    return {"run": record.run, "boots": record.boots, "relative": floors}


def _client_ceiling(evidence: Evidence) -> dict | None:
    """What a client process could do here, and how many applied the load."""
    ceiling = evidence.machine.client_ceiling
    if ceiling is None:
        return None
    clients = max((load.clients for load in evidence.manifest.load), default=1)
    return {"chunks_per_s": ceiling.chunks_per_s, "limited_by": ceiling.limited_by, "clients": clients}


def _why_missing(figures: dict, measured: Measurement) -> dict:
    missing = {}
    if figures["output_tok_s"]["whole"] is None:
        names = [name for name in figures if name != "quality" and figures[name] is None]
        missing |= dict.fromkeys(("output_tok_s", "streams", *names), "no load was applied")
        return missing if figures["quality"] else {**missing, "quality": "no quality suite was run"}
    if figures["output_tok_s"]["steady"] is None:
        missing |= dict.fromkeys(("output_tok_s.steady", "ci95_steady", "little_gap"), measured.no_steady)
        missing |= {"streams.n_eff": measured.no_steady} if measured.n_eff is None else {}
    if figures["ci95"] is None:
        missing |= dict.fromkeys(("ci95", "ci95_steady"), "one boot, no interval")
    if figures["acceptance_length"] is None:
        missing["acceptance_length"] = "the engine drafted no tokens"
    if figures["energy_scope"] is None and "energy_j_per_token" in measured.gpu.reasons:
        missing["energy_scope"] = measured.gpu.reasons["energy_j_per_token"]
    if figures["server_cpu"] is None:
        missing["server_cpu"] = "no telemetry of processes known as the server's in a steady window"
    if figures["quality"] is None:
        missing["quality"] = "no quality suite was run"
    return missing


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def write_verdict(run: Path) -> dict:
    """Judge a run folder and write its verdict.json; where it can't be written, a note says so.

    Raises RunProblem when the folder can't be read. The same folder gives the same bytes, anywhere.
    """
    _, verdict = judged(run)
    with judging(str(run)):
        text = dump_json(verdict)
    try:
        write_text(run / "verdict.json", text)
    except OSError as error:
        note(f"The verdict could not be stored in {run}: {error.strerror}.")
    return verdict
