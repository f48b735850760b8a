"""Room bench: did a rung's change take effect? Against what the engine resolved, logged and counted. Pure."""

import json
import re
from dataclasses import asdict, dataclass

from bench.evidence import Evidence, Settings
from bench.guards import Guard
from images.declaration import declaration
from recipes.compare import RESOLVED, overridden
from recipes.spec import ENGINE_READS

MAMBA_LOG = re.compile(r"Using (\w+) Mamba SSU backend")
API_SERVER = re.compile(r"\((APIServer|ApiServer_\d+) pid=")  # how the only one begins its lines, and each of several
STATE_RESET = "Reset SSM cache type to float32"
UNKNOWN_VARIABLE = "Unknown vLLM environment variable detected: "
LIVE_GUARDS = ("live_argv", "live_env", "log_proof", "engine_version", "image_digest")
AUTO = "auto"  # the engine is to choose: whatever it chooses is no override
UNTOLD = "the engine's configuration doesn't tell of it"
NAME_A_LINE = "let the rung name a line of the log that only its change brings (proof.must_log)"
DRAFTS_OFF = 0.02  # drafts may be cut short at the end of a request


@dataclass(frozen=True)
class Proof:
    """One thing that shows a change's effect, or fails to. `ok` is None where nothing at hand can show it."""

    subject: str
    ok: bool | None
    said: str

    def as_dict(self) -> dict:
        """The entry in ladder.json."""
        return asdict(self)


def proofs(evidence: Evidence, guards: list[Guard]) -> list[Proof]:
    """Everything that shows whether a rung did what it declares; `guards` are the run's findings."""
    found = [_live(guard) for guard in guards if guard.id in LIVE_GUARDS and guard.ok is not None]
    record = evidence.resolved
    if record is None:
        return [*found, Proof("settings", None, "nobody asked the engine what it makes of the settings")]
    if record.after.resolved is None:
        found.append(Proof("settings", None, f"the engine gave no answer: {record.after.why or 'no reason'}"[:300]))
    else:
        said = overridden(evidence.recipe.engine.flags, record.after.resolved)
        found.append(Proof("settings", not said, "; ".join(said) or "every declared flag resolves to its value"))
    if record.before is not None:
        if not record.changes:
            found.append(Proof("change", False, "the rung changes nothing that the engine is given"))
        found += [_change(key, evidence, record.before, record.after) for key in record.changes]
    return found


def effect(found: list[Proof]) -> bool | None:
    """Whether the effect is proved: no proof fails and none is missing; None where one can't be had."""
    if any(proof.ok is False for proof in found):
        return False
    return None if not found or any(proof.ok is None for proof in found) else True


def _live(guard: Guard) -> Proof:
    return Proof(guard.id, guard.ok, f"{guard.observed}; wanted {guard.limit}")


def _change(key: str, evidence: Evidence, before: Settings, after: Settings) -> Proof:
    if key.startswith("engine.env."):
        return _variable(key, evidence, before, after)
    if key.startswith("engine.flags."):
        return _flag(key.removeprefix("engine.flags."), evidence, before, after)
    if key == "model.dtype":
        return _resolved(key, "dtype", evidence.recipe.model.dtype, before, after)
    if key in {"engine.image", "engine.version"}:
        return _engine(key, evidence)
    differs = before.argv != after.argv or before.env != after.env
    return Proof(key, None if differs else False, "its arguments differ" if differs else "the engine is given the same")


def _engine(key: str, evidence: Evidence) -> Proof:
    """Another engine: a version is what it answers; an image is a container's, since any interpreter may stand in."""
    record, wanted = evidence.manifest.engine, evidence.recipe.engine
    answered = sorted(set(record.answered))
    said = f"the engine answers {', '.join(answered) or 'nothing'}"
    if key == "engine.version":
        return Proof(key, True if answered == [wanted.version] else None, f"{said}, declared {wanted.version}")
    if record.image is None:
        return Proof(key, None, f"{said}; an interpreter of this machine stands in for the image {wanted.image}")
    return Proof(key, record.name == wanted.image, f"a container of the image {record.name}; {said}")


def _variable(key: str, evidence: Evidence, before: Settings, after: Settings) -> Proof:
    name = key.removeprefix("engine.env.")
    was, wanted = before.env.get(name), after.env.get(name)
    live = [boot.env.live.get(name) for boot in evidence.boots if boot.env and isinstance(boot.env.live, dict)]
    ok = None if not live else was != wanted and set(live) == {wanted}
    said = f"{was} → {wanted}; the engine's process has {', '.join(sorted({str(each) for each in live})) or 'not told'}"
    if ok and _logged(evidence, UNKNOWN_VARIABLE + name):
        return Proof(key, False, f"{said}; but the log says: {UNKNOWN_VARIABLE}{name}")
    if ok and not ENGINE_READS.fullmatch(name) and not _line_named(evidence):
        return Proof(key, None, f"{said}; nothing shows that it reads it: {NAME_A_LINE}")
    return Proof(key, ok, said)


def _flag(name: str, evidence: Evidence, before: Settings, after: Settings) -> Proof:
    value = evidence.recipe.engine.flags.get(name)
    if name == "speculative-config":
        return _drafts(value, evidence, before, after)
    found = _resolved(name, RESOLVED.get(name), value, before, after)
    if found.said == UNTOLD:
        asked = _api_servers if name == "api-server-count" else _by_its_line
        found = asked(name, evidence, before, after)
    if found.ok and name == "mamba-backend":
        return _mamba_backend(value, evidence, found)
    if found.ok and name == "mamba-ssm-cache-dtype" and _logged(evidence, STATE_RESET) and value != "float32":
        return Proof(name, False, f"the log says: {STATE_RESET}")
    if found.ok and name in {"enable-mamba-cache-stochastic-rounding", "mamba-cache-philox-rounds"} and value:
        if declaration(evidence.recipe.engine.image).device != "cuda":
            return Proof(name, False, f"{found.said}; but this engine ignores it: no CPU rounds stochastically")
        if not (after.resolved or {}).get("stochastic_rounding"):
            return Proof(name, False, f"{found.said}; but stochastic rounding is off")
    return found


def _resolved(subject: str, name: str | None, wanted: object, before: Settings, after: Settings) -> Proof:
    """A value of the resolved configuration: it has to be the declared one, and another than before."""
    if before.resolved is None or after.resolved is None:
        why = before.why or after.why or "the engine was not asked"
        return Proof(subject, None, f"not known: {why}"[:300])
    if name is None or name not in after.resolved:
        return Proof(subject, None, UNTOLD)
    was, now = before.resolved.get(name), after.resolved[name]
    said = f"{name}: {json.dumps(was)} → {json.dumps(now)}"
    if was == now:
        return Proof(subject, False, f"{said}: the engine makes the same of both, so the rung changes nothing")
    if wanted not in {None, AUTO} and now != wanted:
        return Proof(subject, False, f"{said}, declared {json.dumps(wanted)}: the engine overrides it")
    return Proof(subject, True, said)


def _mamba_backend(value: object, evidence: Evidence, found: Proof) -> Proof:
    logged = {match for boot in evidence.boots for match in MAMBA_LOG.findall(boot.log or "")}
    ok = logged == {value} if logged else None
    return Proof("mamba-backend", ok, f"{found.said}; the log says: {', '.join(sorted(logged)) or 'nothing'}")


def _drafts(value: object, evidence: Evidence, before: Settings, after: Settings) -> Proof:
    """Draft tokens a step as the server counted them: what was asked, and another number than before."""
    wanted = value.get("num_speculative_tokens") if isinstance(value, dict) else None
    was = (before.resolved or {}).get("num_speculative_tokens")
    counted = [window.counted for window in evidence.windows]
    if not counted or None in counted:
        lacking = "a window's counters could not be read" if counted else "no window"
        return Proof("speculative-config", None, f"{lacking}, so no draft was counted")
    if before.resolved is None:
        return Proof("speculative-config", None, f"not known what it was before: {before.why or 'not asked'}"[:300])
    drafts = sum(each.get("spec_decode_num_drafts_total", 0) for each in counted)
    tokens = sum(each.get("spec_decode_num_draft_tokens_total", 0) for each in counted)
    rate = tokens / drafts if drafts else 0
    said = f"draft tokens a step: {was or 0} → {rate:.3g} counted, {wanted or 0} asked"
    same = before.argv == after.argv
    ok = abs(rate - (wanted or 0)) <= DRAFTS_OFF * max(1, wanted or 0) and not same
    if ok and was == wanted:
        ok = None  # another change of the drafting than their number: the counters don't tell
    return Proof("speculative-config", ok, said)


def _api_servers(name: str, evidence: Evidence, before: Settings, after: Settings) -> Proof:
    """How many API servers said something in each boot's log; the configuration doesn't tell."""
    value = evidence.recipe.engine.flags.get(name)
    named = [set(API_SERVER.findall(boot.log)) for boot in evidence.boots if boot.log is not None]
    counted = {len(each - {"APIServer"}) or len(each) for each in named}
    said = f"API servers in the log: {', '.join(map(str, sorted(counted))) or 'no log'}; asked: {value}"
    told = bool(counted) and 0 not in counted
    return Proof(name, counted == {value} and before.argv != after.argv if told else None, said)


def _by_its_line(name: str, evidence: Evidence, before: Settings, after: Settings) -> Proof:
    """A flag of which the configuration tells nothing: only a log line that the rung names can show it."""
    if not _line_named(evidence):
        return Proof(name, None, f"{UNTOLD}: {NAME_A_LINE}")
    return Proof(name, before.argv != after.argv, "the log says what this rung's proof names")


def _line_named(evidence: Evidence) -> bool:
    """Whether this rung names log lines of its own as proof, and the logs have them."""
    declared = evidence.recipe.delta.changes if evidence.recipe.delta else []
    logs = [boot.log for boot in evidence.boots if boot.log is not None]
    texts = evidence.recipe.proof.must_log
    return "proof.must_log" in declared and bool(logs and texts) and all(text in log for log in logs for text in texts)


def _logged(evidence: Evidence, text: str) -> bool:
    return any(text in (boot.log or "") for boot in evidence.boots)
