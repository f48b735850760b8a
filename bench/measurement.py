"""Room bench: a run's figures, boot by boot, from its evidence. Pure."""

from dataclasses import dataclass

import numpy as np

from bench.analyse import WindowResult, analyse_window, latencies_ms, succeeded
from bench.attribution import Factors, mean_factors, speculates, window_factors
from bench.conditions import GpuMeans, gpu_means
from bench.counters import acceptance_length
from bench.evidence import Evidence, Window, judging
from bench.quality.score import score_suite
from bench.server_load import ServerLoad, limits_of, server_loads
from recipes.schema import Claim

LATENCY_CLAIMS = {"ttft_p95_ms": "ttft", "tpot_p95_ms": "tpot"}


@dataclass(frozen=True)
class Several(Evidence):
    """Runs of one boot each as one body of evidence. `asked`: what each of them answered, by suite; `quality` is the
    weakest one's.
    """

    asked: tuple[dict[str, list[dict]], ...] = ()


@dataclass(frozen=True)
class Measurement:
    """A run's figures. Lists hold one value a boot, the mean over its windows, or are empty.

    `steady` is empty unless every window has a steady state; `no_steady` says which hasn't and why.
    `n_eff` is the mean and `peak` the most streams in flight, `little_gap` the worst window's. `server` has one entry a
    window in which the server was watched. `exact` has, of each boot that was asked suites, the scores by suite and
    task, `quality` those of the weakest.
    """

    boots: int
    whole: list[float]
    steady: list[float]
    no_steady: str | None
    little: list[float]
    per_user: list[float]
    n_eff: float | None
    peak: int | None
    little_gap: float | None
    acceptance: list[float]
    latency_ms: dict[str, dict[str, float | None]] | None
    latency_p95_ms: dict[str, list[float]]
    factors: Factors | None
    gpu: GpuMeans
    server: list[ServerLoad]
    quality: dict[str, dict[str, dict]]
    exact: list[dict[str, dict[str, dict]]]

    @property
    def limits(self) -> str | None:
        """Why the host, not the GPU, set the rate, in words; None where nothing shows that."""
        return limits_of(self.server)

    def boots_of(self, claim: Claim) -> list[float]:
        """The values of a claim's metric, one a boot; empty where it wasn't measured."""
        metric = claim.metric
        if metric == "exact_match":
            suite, _, task = (claim.scope or "").partition("/")
            found = [boot.get(suite, {}).get(task or "all") for boot in self.exact]
            return [scored["share"] for scored in found if scored]
        if metric in LATENCY_CLAIMS:
            return self.latency_p95_ms[metric]
        lists = {
            "output_tok_s": self.whole,
            "acceptance_length": self.acceptance,
            "gpu_memory_gb": self.gpu.memory_gb,
        }
        return lists.get(metric, [])


def measure_evidence(evidence: Evidence) -> Measurement:
    """Reduce a run's windows to figures; windows in which nothing succeeded give none.

    Raises RunProblem for numbers that no real run holds.
    """
    with judging(f"a run of {evidence.recipe.id}"):
        return _measure(evidence)


def _measure(evidence: Evidence) -> Measurement:
    load = evidence.recipe.benchmark
    usable = [window for window in evidence.windows if succeeded(window.arrays).any()]
    numbers = sorted({window.boot for window in usable})
    results = [analyse_window(window.arrays, load.concurrency) for window in usable]
    pairs = list(zip(usable, results, strict=True))

    def a_boot(pick) -> list[float]:
        rows = [[pick(window, result) for window, result in pairs if window.boot == boot] for boot in numbers]
        if any(value is None for row in rows for value in row):
            return []
        return [float(np.mean(row)) for row in rows]

    latencies = [latencies_ms([window.arrays for window in usable if window.boot == boot]) for boot in numbers]
    p95 = {name: [boot[key]["p95"] for boot in latencies] for name, key in LATENCY_CLAIMS.items()}
    n_eff = [result.n_eff for result in results]
    gaps = [result.little_gap for result in results if result.little_gap is not None]
    return Measurement(
        boots=len(numbers),
        whole=a_boot(lambda _, result: result.whole),
        steady=a_boot(lambda _, result: result.steady),
        no_steady=_no_steady(pairs),
        little=a_boot(lambda _, result: result.little),
        per_user=a_boot(lambda _, result: result.per_user),
        n_eff=None if not n_eff or None in n_eff else float(np.mean(n_eff)),
        peak=max((result.peak_in_flight for result in results), default=None),
        little_gap=max(gaps, default=None),
        acceptance=a_boot(lambda window, _: acceptance_length(window.counted) if window.counted else None),
        latency_ms=latencies_ms([window.arrays for window in usable]) if usable else None,
        latency_p95_ms={name: [] if None in values else values for name, values in p95.items()},
        factors=_factors(evidence, pairs),
        gpu=gpu_means(pairs),
        server=server_loads(pairs),
        quality=_scored(evidence.quality),
        exact=[_scored(asked) for asked in (evidence.asked if isinstance(evidence, Several) else [evidence.quality])],
    )


def _scored(asked: dict[str, list[dict]]) -> dict[str, dict[str, dict]]:
    return {suite: score_suite(answers) for suite, answers in asked.items() if answers}


def _no_steady(pairs: list[tuple[Window, WindowResult]]) -> str | None:
    """Which window has no steady state, and why."""
    found = [(window, result.no_steady) for window, result in pairs if result.no_steady]
    if not found:
        return None
    window, why = found[0]
    where = f"boot {window.boot} window {window.number}: " if len(pairs) > 1 else ""
    more = f" (and {len(found) - 1} more of {len(pairs)} windows)" if len(found) > 1 else ""
    return f"no steady window: {where}{why}{more}"


def _factors(evidence: Evidence, pairs: list[tuple[Window, WindowResult]]) -> Factors | None:
    drafting = speculates(evidence.recipe)
    return mean_factors([window_factors(result, window.counted, drafting) for window, result in pairs])
