"""Room bench: two runs of one recipe, mine and theirs: the same claims judged on both, and what a gap comes from. Pure.

The claims are theirs, and so are the model and the load they are about: a claim says nothing about others.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from bench.analyse import rounded
from bench.attribution import THROTTLED_SHARE, Wording, attribute
from bench.claims import MACHINE_INDEPENDENT, judge_claim
from bench.evidence import Evidence
from bench.guards import Guard, run_guards
from bench.measurement import Measurement, measure_evidence
from bench.statistics import BOOTS_FOR_INTERVAL
from bench.verdict import figures_status, judge
from recipes.load import as_data, changes, leaves
from recipes.model_files import differing_files
from recipes.schema import Claim, Recipe

SCHEMA = 1
# Of a rate that nobody claimed: less is not worth a cause. With fewer boots than three, how they scatter isn't known.
SMALL_GAP, SMALL_GAP_OF_FEW_BOOTS = 0.02, 0.05
# What differs, in the order in which it explains a gap: what changes the answers first, what changes only speed then.
# Last what takes a rate away: it explains that there is none, and no gap.
ORDER = ("validity", "model", "settings", "load", "engine", "prompts", "host", "machine", "conditions", "timing")
ONLY_SPEED = frozenset({"host", "machine", "conditions", "timing"})
LATENCIES = frozenset({"ttft_p95_ms", "tpot_p95_ms"})
# The factor of a rate that each kind of difference acts on; any, where it isn't named.
ACTS_ON = {kind: frozenset({"step_time_ms", "tok_s_per_stream"}) for kind in ONLY_SPEED}
ACTS_ON |= {"prompts": frozenset({"acceptance", "tok_s_per_stream"})}
WORDS = {
    "validity": "one of the runs proves nothing",
    "model": "other weights or another tokenizer",
    "settings": "other settings of the engine",
    "load": "another load",
    "engine": "another build of the engine",
    "prompts": "other prompts",
    "host": "the host, not the GPU, set a rate",
    "machine": "another machine",
    "conditions": "what the GPU did meanwhile",
    "timing": "what was timed counts for nothing in one of the runs",
}
OF_A_RUN = Wording("the same", "the other run has no")
# Keys that change nothing of what is measured; boots and windows are how often it is.
OURS = frozenset({"runtime.port", "runtime.ready_timeout_s", "runtime.stop_timeout_s"})
OURS |= {"benchmark.boots", "benchmark.windows"}

SAME_LOAD = {"boots", "windows", "seed"}  # how often it is sent, and which of texts of one kind
SAME_ITEMS = {"concurrency"}  # of a quality suite


@dataclass(frozen=True)
class Difference:
    """One thing in which two runs differ. `kind`: one of ORDER."""

    kind: str
    what: str
    mine: object
    theirs: object


@dataclass(frozen=True)
class Side:
    """One of the two runs, reduced. `prompts`: sha256 of each window's prompts."""

    evidence: Evidence
    guards: list[Guard]
    measured: Measurement
    verdict: dict
    prompts: dict[str, str]


def side(evidence: Evidence, prompts: dict[str, str]) -> Side:
    """Reduce a run once for everything below."""
    guards = run_guards(evidence)
    return Side(evidence, guards, measure_evidence(evidence), judge(evidence, guards), prompts)


def compare(mine: Side, theirs: Side) -> dict:
    """Compare two runs: {claims, rate, fingerprint, cause, agree}, figures rounded to six digits.

    A claim's `gap` is mine − theirs in its unit; `apart` says that it is more than the tolerance, None where one side
    has no figure.
    """
    fingerprint = differences(mine, theirs)
    claims = [_claim(claim, mine, theirs) for claim in theirs.evidence.recipe.claims]
    rate = _rate(mine, theirs)
    apart = [row for row in claims if row["apart"] or row["mine"]["state"] != row["theirs"]["state"]]
    return rounded(
        {
            "schema": SCHEMA,
            "mine": _named(mine),
            "theirs": _named(theirs),
            "claims": claims,
            "rate": rate,
            "fingerprint": [vars(each) for each in fingerprint],
            "cause": likeliest(apart, rate, fingerprint, mine, theirs),
            "agree": not apart,
        }
    )


def _named(one: Side) -> dict:
    return {
        "recipe": one.evidence.recipe.id,
        "machine": one.evidence.machine.slug,
        "state": one.verdict["state"],
        "status": figures_status(one.evidence),
        "boots": one.measured.boots,
    }


def _claim(claim: Claim, mine: Side, theirs: Side) -> dict:
    rows = {}
    for name, each in (("mine", mine), ("theirs", theirs)):
        model = theirs.evidence.recipe.model
        evidence = replace(each.evidence, recipe=each.evidence.recipe.model_copy(update={"model": model}))
        voided = [guard.id for guard in each.guards if guard.voids and guard.voids_metric(claim.metric)]
        rows[name] = judge_claim(claim, evidence, each.measured, voided)
        other = _other_load(claim, each.evidence.recipe, theirs.evidence.recipe)
        if other and not voided:
            rows[name] |= {"state": "NOT_COMPARABLE", "reason": f"the claim is of another load: {other}"}
    values = [rows[name]["measured"] for name in ("mine", "theirs")]
    gap = None if None in values else values[0] - values[1]
    used = max(rows[name]["tolerance_used"] or claim.tolerance for name in rows)
    kept = ("state", "measured", "ci95", "reason")
    return {
        "id": claim.id,
        "metric": claim.metric,
        "published": claim.published,
        "tolerance": used,
        "status": claim.status,
        **{name: {key: row[key] for key in kept} for name, row in rows.items()},
        "gap": gap,
        "apart": None if gap is None else abs(gap) > used * (1 + 1e-9),
    }


def _other_load(claim: Claim, ran: Recipe, claimed: Recipe) -> str | None:
    """In what the load differs that a claim is about, in words: for exact answers the items, else what was sent."""
    exact = claim.metric == "exact_match"
    parts = [recipe.quality if exact else recipe.benchmark for recipe in (ran, claimed)]
    here, there = (part.model_dump(exclude=SAME_ITEMS if exact else SAME_LOAD) if part else {} for part in parts)
    keys = [key for key in here | there if here.get(key) != there.get(key)]
    return ", ".join(f"{key} {_said(here.get(key))}, theirs {_said(there.get(key))}" for key in keys) or None


def _rate(mine: Side, theirs: Side) -> dict | None:
    """The two rates, and what their difference is made of; None where a run has none that counts.

    Both are the steady state's where both have one, else both the whole run's: the end of a run, in which streams
    fall idle, is in the one and not in the other.
    """
    told = [each.verdict["output_tok_s"] or {} for each in (mine, theirs)]
    estimate = "steady" if all(each.get("steady") for each in told) else "whole"
    rates = [each.get(estimate) for each in told]
    if None in rates:
        return None
    found = {"mine": rates[0], "theirs": rates[1], "gap": rates[0] / rates[1] - 1, "estimate": estimate}
    limits = {name: _server(each).get("limits") for name, each in (("mine", mine), ("theirs", theirs))}
    found |= {"text": None, "factors": [], "limits": limits}
    ours, other = mine.measured.factors, theirs.measured.factors
    if ours is None or other is None or not ours.streams or not other.streams:
        return found
    split = attribute(other, ours, rates[1], rates[0], mine.measured.gpu.conditions, OF_A_RUN)
    return {**found, "text": split["text"], "factors": split["factors"]}


def differences(mine: Side, theirs: Side) -> list[Difference]:
    """Everything in which two runs' fingerprints differ, what explains most first."""
    found = [*_validity(mine, theirs), *_model(mine, theirs), *_recipe(mine, theirs), *_engine(mine, theirs)]
    common = mine.prompts.keys() & theirs.prompts.keys()
    other = sorted(name for name in common if mine.prompts[name] != theirs.prompts[name])
    if other:
        name = other[0]
        found.append(Difference("prompts", f"prompts of {name}", mine.prompts[name][:16], theirs.prompts[name][:16]))
    found += [*_host(mine, theirs), *_machine(mine, theirs), *_conditions(mine, theirs)]
    return sorted(found, key=lambda each: ORDER.index(each.kind))


def _validity(mine: Side, theirs: Side) -> list[Difference]:
    """What guards void: the run, so that it proves nothing, or only what was timed in it."""
    found = []
    for kind, scope, what in (
        ("validity", "run", "guards that void it"),
        ("timing", "timing", "guards that void what was timed"),
    ):
        said = [_void(each, scope) for each in (mine, theirs)]
        found += [Difference(kind, what, *said)] if any(said) else []
    return found


def _void(one: Side, scope: str) -> str | None:
    return ", ".join(guard.id for guard in one.guards if guard.voids and guard.scope == scope) or None


def _model(mine: Side, theirs: Side) -> list[Difference]:
    ours, other = (each.evidence.manifest.model.files for each in (mine, theirs))
    if ours is None or other is None:
        return [Difference("model", "files", ours and "recorded", other and "recorded")] if ours != other else []
    told, said = (each.evidence.manifest.model.told for each in (mine, theirs))
    # A hub's cache tells a small file's sha1, what `provision` brought its sha256: those can't be compared.
    known = {name for name in told.keys() & said.keys() - ours.keys() if len(told[name]) == len(said[name])}
    ours, other = ours | {name: told[name] for name in known}, other | {name: said[name] for name in known}
    return [
        Difference("model", name, _short(ours.get(name)), _short(other.get(name)))
        for name in differing_files(other, ours)
    ]


def _short(digest: str | None) -> str | None:
    return digest and digest[:16]


def _recipe(mine: Side, theirs: Side) -> list[Difference]:
    ours, other = mine.evidence.recipe, theirs.evidence.recipe
    old, new = dict(leaves(as_data(other))), dict(leaves(as_data(ours)))
    paths = {".".join(path): path for path in old.keys() | new.keys()}
    found = []
    for key in changes(other, ours):
        if key in OURS or key.startswith(("model.files", "proof.")):
            continue
        kind = {"model": "model", "benchmark": "load", "quality": "load"}.get(key.split(".")[0], "settings")
        found.append(Difference(kind, key, new.get(paths[key]), old.get(paths[key])))
    return found


def _engine(mine: Side, theirs: Side) -> list[Difference]:
    rows = []
    ours, other = mine.evidence.manifest, theirs.evidence.manifest

    def patches(manifest) -> list:
        return sorted(str(patch.get("file")) for patch in manifest.engine.patches)

    for what, told in (
        ("engine", lambda manifest: manifest.engine.name),
        ("version", lambda manifest: sorted(set(manifest.engine.answered))),
        ("build", lambda manifest: manifest.engine.identity),
        ("patches", patches),
        ("image", lambda manifest: manifest.engine.image and manifest.engine.image.id),
    ):
        if told(ours) != told(other):
            rows.append(Difference("engine", what, told(ours), told(other)))
    return rows


def _host(mine: Side, theirs: Side) -> list[Difference]:
    """How busy the server's processes were, where one side was host-bound."""
    loads = (_server(mine), _server(theirs))
    if not any(load.get("limits") for load in loads):
        return []
    api, core = ([_core(load.get(name)) for load in loads] for name in ("api_server", "engine_core"))
    return [Difference("host", "API server", *api), Difference("host", "engine core", *core)]


def _server(one: Side) -> dict:
    """What the verdict says of the server's processes; nothing where a guard voids what was timed."""
    return one.verdict["server_cpu"] or {}


def _core(share: float | None) -> str | None:
    return None if share is None else f"at {share:.2f} of a core"


def _machine(mine: Side, theirs: Side) -> list[Difference]:
    ours, other = mine.evidence.machine, theirs.evidence.machine
    told = {
        "machine": lambda machine: machine.slug,
        "cpu": lambda machine: machine.cpu.get("model"),
        "cores": lambda machine: machine.cpu.get("cores"),
        "gpus": lambda machine: [gpu.get("name") for gpu in machine.gpus],
        "card": lambda machine: sorted(str(gpu.get("uuid")) for gpu in machine.gpus if gpu.get("uuid")),
        "driver": lambda machine: sorted({str(gpu.get("driver")) for gpu in machine.gpus if gpu.get("driver")}),
    }
    return [Difference("machine", key, say(ours), say(other)) for key, say in told.items() if say(ours) != say(other)]


def _conditions(mine: Side, theirs: Side) -> list[Difference]:
    """Clocks that differ by more than 2%, power limits, and throttling by more than 5% of the time."""
    ours, other = mine.measured.gpu.conditions or {}, theirs.measured.gpu.conditions or {}
    found = []
    shares = [each.get("throttle") or {} for each in (ours, other)]
    reasons = sorted(shares[0].keys() | shares[1].keys())
    throttled = any(abs(shares[0].get(name, 0) - shares[1].get(name, 0)) > THROTTLED_SHARE for name in reasons)
    for key in ("sm_clock_mhz", "power_limits_w", *(["throttle"] if throttled else [])):
        first, second = ours.get(key), other.get(key)
        numbers = isinstance(first, float) and isinstance(second, float)
        if first != second and not (numbers and math.isclose(first, second, rel_tol=0.02)) and ours and other:
            found.append(Difference("conditions", key, first, second))
    return found


def likeliest(apart: list[dict], rate: dict | None, found: list[Difference], mine: Side, theirs: Side) -> dict:
    """The likeliest cause of a gap: {kind, text}. The first difference, in ORDER, that can act on what lies apart.

    Nothing apart: none is needed. Speed alone is never laid to weights that are the same, nor answers to a machine,
    and where a guard takes one side's figure away, there is no gap: then that guard is the cause.
    """
    kinds = [kind for kind in ORDER if any(each.kind == kind for each in found)]
    measured = [row for row in apart if "INVALID" not in (row["mine"]["state"], row["theirs"]["state"])]
    counted = [row for row in measured if row["metric"] in MACHINE_INDEPENDENT]
    boots = min(mine.measured.boots, theirs.measured.boots)
    small = SMALL_GAP if boots >= BOOTS_FOR_INTERVAL else SMALL_GAP_OF_FEW_BOOTS
    moved = rate is not None and abs(rate["gap"]) >= small
    if not measured and not moved and "validity" not in kinds:
        if "timing" in kinds and (apart or "INVALID" in (mine.verdict["state"], theirs.verdict["state"])):
            return _named_cause("timing", found)
        return {"kind": None, "text": "No gap to explain."}
    late = any(row["metric"] in LATENCIES for row in measured)
    rate = None if late and not moved else rate  # one that is the same tells nothing of latencies
    factor = _strongest(rate)
    kinds = [
        kind for kind in kinds if kind != "timing" and (kind != "host" or _host_slows(measured, rate, mine, theirs))
    ]
    if counted:
        kinds = [kind for kind in kinds if kind not in ONLY_SPEED]
    else:
        kinds = [kind for kind in kinds if factor is None or factor in ACTS_ON.get(kind, {factor})]
    if kinds:
        return _named_cause(kinds[0], found)
    if not counted and boots < BOOTS_FOR_INTERVAL:
        text = (
            f"nothing recorded differs that could: with {boots} boot(s) it may be how boots scatter; three each tell."
        )
        return {"kind": "noise", "text": text}
    return {"kind": None, "text": "nothing that was recorded differs in a way that could: what it is was not recorded."}


def _named_cause(kind: str, found: list[Difference]) -> dict:
    named = [each for each in found if each.kind == kind]
    what = ", ".join(_pair(each) for each in named[:4])
    more = f" and {len(named) - 4} more" if len(named) > 4 else ""
    return {"kind": kind, "text": f"{WORDS[kind]}: {what}{more}."}


def _host_slows(apart: list[dict], rate: dict | None, mine: Side, theirs: Side) -> bool:
    """Whether a side that is host-bound is the slower one, by its rate or by a latency that lies apart."""
    slow = {"mine" if rate["gap"] < 0 else "theirs"} if rate else set()
    slow |= {"mine" if row["gap"] > 0 else "theirs" for row in apart if row["metric"] in LATENCIES and row["gap"]}
    return any(_server(each).get("limits") for name, each in (("mine", mine), ("theirs", theirs)) if name in slow)


def _strongest(rate: dict | None) -> str | None:
    """The factor that moved the rate most, the way it went."""
    if rate is None or not rate["factors"]:
        return None
    way = np.sign(rate["gap"])
    return max(rate["factors"], key=lambda row: way * row["change"])["factor"]


def _pair(each: Difference) -> str:
    return f"{each.what} is {_said(each.mine)}, theirs {_said(each.theirs)}"


def _said(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(str(part) for part in value) or "none"
    return "none" if value is None else str(value)
