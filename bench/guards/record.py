"""Room bench: guards on the record: is it whole, and is what ran what was meant to run."""

import re
from collections.abc import Iterator
from dataclasses import astuple, fields
from pathlib import Path

from bench.evidence import Evidence
from bench.guards.guard import Guard
from bench.quality.suites import Item, suite_items
from recipes.load import Loaded
from recipes.schema import Recipe
from recipes.spec import MACHINE_S, serving_spec

# How a record names a folder of the machine it was made on.
FOLDER = re.compile(r"\{(?:model|hub|engine|repository|cache|home)\}")


def seal(evidence: Evidence) -> Iterator[Guard]:
    """Nothing was changed since the run ended."""
    faults = evidence.seal_faults
    yield Guard("seal", not faults, "; ".join(faults[:5]) or "intact", "intact", "", "SHA256SUMS of the run")


def finished(evidence: Evidence) -> Iterator[Guard]:
    """Every planned window was measured and nothing ended the run early."""
    wanted = evidence.manifest.planned_windows
    failure = evidence.manifest.failure
    got = len(evidence.windows)
    said = f"{failure.stage}: {failure.cause}" if failure else f"{got} of {wanted} windows"
    ok = failure is None and got == wanted
    yield Guard("finished", ok, said, f"{wanted} of {wanted} windows", "", "manifest.json")


def engine_version(evidence: Evidence) -> Iterator[Guard]:
    """One engine answered, of the recipe's version or a substitute it names."""
    engine = evidence.recipe.engine
    allowed = [engine.version, *engine.substitutes]
    seen = sorted(set(evidence.manifest.engine.answered))
    ok = None if not seen else len(seen) == 1 and seen[0] in allowed
    yield Guard("engine_version", ok, ", ".join(seen) or None, " or ".join(allowed), "", "/version")


def live_settings(evidence: Evidence) -> Iterator[Guard]:
    """The engine's process had the arguments and the environment that the recipe renders to."""
    measured = _measured(evidence)
    for name, pick in (("live_argv", lambda boot: boot.argv), ("live_env", lambda boot: boot.env)):
        states = [(boot.number, pick(boot)) for boot in evidence.boots if pick(boot) and pick(boot).live]
        unrecorded = sorted(measured - {number for number, _ in states})
        if unrecorded:
            yield Guard(name, False, f"not recorded on boot {unrecorded}", "equal", "", "boots/<n> of the run")
            continue
        differing = [number for number, state in states if state.live != state.rendered]
        beside = sorted({variable for _, state in states for variable in state.undeclared or []})
        wrong = [f"differs on boot {differing}"] if differing else []
        others = [number for number, state in states if not _rendered_from(evidence.recipe, state.rendered)]
        wrong += [f"rendered from another recipe on boot {others}"] if others else []
        wrong += [f"set, but declared nowhere: {', '.join(beside)}"] if beside else []
        whole = name == "live_argv" or all(state.undeclared is not None for _, state in states)
        ok = not wrong if states else None
        said = "; ".join(wrong) or (("equal" if whole else "declared variables equal") if states else None)
        yield Guard(name, ok, said, "equal", "", "/proc of the engine's process against the rendered spec")


def _measured(evidence: Evidence) -> set[int]:
    """The boots that figures or answers are of; none where somebody else ran the server."""
    if evidence.manifest.foreign:
        return set()
    return {window.boot for window in evidence.windows} | {boot.boot for boot in evidence.manifest.boots}


def _rendered_from(recipe: Recipe, rendered: list[str] | dict[str, str | None]) -> bool:
    """Whether a recorded command line or environment is this recipe's; folders of a machine stand there by name."""
    if isinstance(rendered, dict):
        wanted = {name: text for name, text in recipe.engine.env.items() if name not in MACHINE_S}
        return all(rendered.get(name) == text or _renamed(rendered.get(name) or "") for name, text in wanted.items())
    own = _beside_place(list(serving_spec(Loaded(recipe, Path(), {})).argv))
    theirs = _beside_place(rendered[rendered.index("serve") :] if "serve" in rendered else [])
    return len(own) == len(theirs) and all(a == b or _renamed(b) for a, b in zip(own, theirs, strict=True))


def _beside_place(argv: list[str]) -> list[str]:
    """The arguments of `serve` but for the model's folder, the address and the port, which are a machine's matter."""
    places = {place + 1 for place, word in enumerate(argv) if word in {"serve", "--host", "--port"}}
    return [word for place, word in enumerate(argv) if place not in places]


def _renamed(text: str) -> bool:
    return bool(FOLDER.search(text))


def log_proof(evidence: Evidence) -> Iterator[Guard]:
    """Every measured boot's log says what the recipe's proof wants, and nothing it forbids."""
    proof = evidence.recipe.proof
    if not proof.must_log and not proof.must_not_log:
        return
    wrong = []
    logs = [boot for boot in evidence.boots if boot.log is not None]
    for boot in logs:
        wrong += [f"boot {boot.number} lacks {text!r}" for text in proof.must_log if text not in boot.log]
        wrong += [f"boot {boot.number} says {text!r}" for text in proof.must_not_log if text in boot.log]
    without = [f"boot {number} has no log" for number in sorted(_measured(evidence) - {boot.number for boot in logs})]
    ok = False if wrong or without else True if logs else None
    said = "; ".join([*wrong, *without]) or ("as declared" if ok else None)
    yield Guard("log_proof", ok, said, "as declared", "", "server log, recipe's proof")


def quality_complete(evidence: Evidence) -> Iterator[Guard]:
    """Every item of every suite was asked, with the prompt and the right answer that follow from the recipe's seed."""
    quality = evidence.recipe.quality
    if quality is None:
        return
    for suite in quality.suites:
        wanted = [astuple(item) for item in suite_items(suite, quality.seed, quality.items)]
        answers = evidence.quality.get(suite, [])
        got = [tuple(answer[field.name] for field in fields(Item)) for answer in answers]
        others = sum(a != b for a, b in zip(got, wanted, strict=False))
        ok = None if evidence.manifest.imported else got == wanted
        said = f"{len(got)}, {others} of them other than the recipe's" if others else len(got)
        source = evidence.answered_in.get(suite, f"quality/{suite}.jsonl")
        yield Guard("quality_complete", ok, said, len(wanted), "items", source)


def image_digest(evidence: Evidence) -> Iterator[Guard]:
    """Every boot's container had the image that is pinned. An engine that runs as a process has none: not asked."""
    image = evidence.manifest.engine.image
    if image is None:
        return
    running = {boot.boot: boot.image for boot in evidence.manifest.boots}
    known = {each for each in running.values() if each is not None}
    measured = {window.boot for window in evidence.windows}
    whole = bool(known) and None not in running.values() and measured <= running.keys()
    other = image.id is not None and bool(known - {image.id})
    ok = False if other else True if whole and image.id is not None else None
    said = ", ".join(sorted(known)) if ok is not None else None
    source = f"the containers' image against {image.reference or 'the record'}"
    yield Guard("image_digest", ok, said, image.id or "the pinned image", "", source)


def uninterrupted(evidence: Evidence) -> Iterator[Guard]:
    """Neither the machine nor its Docker engine was restarted between the run's windows."""
    hosts = [window.record.host if window.record else None for window in evidence.windows]
    known = [host for host in hosts if host and host.get("boot") is not None]
    named = {"boot": "the machine", "dockerd": "dockerd"}
    changed = [label for name, label in named.items() if len({host.get(name) for host in known}) > 1]
    ok = False if changed else True if hosts and len(known) == len(hosts) else None
    said = f"restarted: {', '.join(changed)}" if changed else "no restart" if ok else None
    yield Guard("uninterrupted", ok, said, "no restart", "", "boot id of the kernel, start of dockerd, a window")
