"""Room bench: `./inv check --publish`: whether others would accept a recipe, by docs/contributing-recipes.md."""

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.guards.server import RATE_METRICS
from bench.handover.runs import items_of, judged_for, published_runs
from bench.handover.text import MARKS
from bench.statistics import BOOTS_FOR_INTERVAL
from images.console import emit_json, out, table
from images.errors import Problem
from recipes.bundle.code import code_in
from recipes.bundle.read import Limits, unpacked
from recipes.bundle.write import Carried, Written, bundle_entries, write_bundle
from recipes.load import Loaded, load_recipe
from recipes.lock import Images
from recipes.model_files import differing_files, observed_files
from recipes.rules import broken_rules
from recipes.site import site_for_a_look

MAX_BUNDLE_MB = 20
LICENCE = re.compile(r"^\W*licen[cs]e\W", re.I | re.M)
OWN = frozenset({"measured", "synthetic"})  # figures a contributor measured, and so has to show


@dataclass(frozen=True)
class Rule:
    """One thing that a recipe needs. `says` returns what is missing, None when it is kept, or NOT_APPLICABLE."""

    id: str
    wants: str
    says: Callable[["Subject"], str | None]


@dataclass(frozen=True)
class Subject:
    """A recipe under examination: its published runs with their verdicts, and what a bundle of it came to."""

    loaded: Loaded
    runs: Sequence[tuple[Path, dict]]
    bundle: Written | str


NOT_APPLICABLE = "–"


def _valid(subject: Subject) -> str | None:
    return "; ".join(broken_rules(subject.loaded)) or None


def _sourced(subject: Subject) -> str | None:
    recipe = subject.loaded.recipe
    vague = [claim.id for claim in recipe.claims if len(claim.source) < 12]
    if vague:
        return f"the source of {', '.join(vague)} is too short to be looked up"
    twice = [claim.id for claim in recipe.claims if [other.id for other in recipe.claims].count(claim.id) > 1]
    return f"two claims are called {twice[0]!r}" if twice else None


def _model(subject: Subject) -> str | None:
    model = subject.loaded.recipe.model
    if model.repo:
        return None if model.revision else f"the revision of {model.repo} is not confirmed (model.revision)"
    differing = differing_files(model.files, observed_files(subject.loaded))
    return f"{', '.join(differing)} differ from model.files" if differing else None


def _licence(subject: Subject) -> str | None:
    if subject.loaded.recipe.model.repo:
        return NOT_APPLICABLE
    card = subject.loaded.folder / "MODEL_CARD.md"
    if not card.is_file():
        return "its files are handed on, and no MODEL_CARD.md beside the recipe says under which licence"
    return None if LICENCE.search(card.read_text(errors="replace")) else "MODEL_CARD.md has no line `Licence: …`"


def _no_code(subject: Subject) -> str | None:
    found = code_in(subject.loaded.recipe, subject.loaded.recipe.model.files)
    return f"serving it would run code that comes with it: {', '.join(found)}" if found else None


def _locked(subject: Subject) -> str | None:
    if isinstance(subject.bundle, str):
        return NOT_APPLICABLE
    return None if subject.bundle.info.lock else subject.bundle.info.why_no_lock


def _proved(subject: Subject) -> str | None:
    own = [claim for claim in subject.loaded.recipe.claims if claim.status in OWN and claim.judge]
    if not own:
        return NOT_APPLICABLE
    if not subject.runs:
        return "results/ has no sealed run of this recipe as it is now"
    for claim in own:
        rows = [row for _, verdict in subject.runs for row in verdict["claims"] if row["id"] == claim.id]
        if not any(row["state"] == "REPRODUCED" for row in rows):
            found = ", ".join(sorted({row["state"] for row in rows})) or "nothing"
            return f"no published run reproduces {claim.id!r}: {found}"
    return None


def _replicated(subject: Subject) -> str | None:
    rates = [claim.id for claim in subject.loaded.recipe.claims if claim.metric in RATE_METRICS and claim.status in OWN]
    if not rates:
        return NOT_APPLICABLE
    most = max((verdict["boots"] for _, verdict in subject.runs), default=0)
    few = most < BOOTS_FOR_INTERVAL
    return f"{', '.join(rates)}: {most} boot(s), {BOOTS_FOR_INTERVAL} are needed" if few else None


def _bundled(subject: Subject) -> str | None:
    if isinstance(subject.bundle, str):
        return subject.bundle
    size = subject.bundle.size / 1e6
    said = f"its bundle has {size:.1f} MB, {MAX_BUNDLE_MB} are the most: name the weights by repo and revision"
    return said if size > MAX_BUNDLE_MB else None


RULES = (
    Rule("valid", "it keeps the schema, declares its changes, and breaks no known rule of the engine", _valid),
    Rule("sourced", "every claim says where it comes from, and has a name of its own", _sourced),
    Rule("model", "its model is fixed: files with hashes, or a repository at a confirmed commit", _model),
    Rule("licence", "model files that are handed on have a model card with their licence", _licence),
    Rule(
        "no-code", "nothing that comes with it is run: no plugins, no code or pickles in the model's folder", _no_code
    ),
    Rule("locked", "it can be locked: whatever decides what is run is fixed", _locked),
    Rule("proved", "its own claims are reproduced by a sealed run in results/", _proved),
    Rule("replicated", "rates rest on three boots at least", _replicated),
    Rule("bundled", f"its bundle is under {MAX_BUNDLE_MB} MB, holds no secret, and reads back", _bundled),
)


def check_publish(name: str, as_json: bool) -> int:
    """Hold a recipe against every rule; print, and return 0, or 2 where one isn't kept.

    Raises UsageProblem for a recipe that can't be loaded.
    """
    subject = examine(load_recipe(name, own=site_for_a_look()))
    rows = [(rule, rule.says(subject)) for rule in RULES]
    marks = {NOT_APPLICABLE: None, None: True}
    told = [(marks.get(said, False), rule.id, rule.wants if said in marks else said) for rule, said in rows]
    wrong = [row for row in told if row[0] is False]
    if as_json:
        emit_json({"recipe": subject.loaded.recipe.id, "rules": [{"ok": o, "id": i, "found": f} for o, i, f in told]})
    else:
        lines = [(MARKS[ok], rule_id, found) for ok, rule_id, found in told]
        out().print(table(f"{subject.loaded.recipe.id}: what others need", ("", "rule", ""), lines))
        ready = f"{len(wrong)} rule(s) not kept: docs/contributing-recipes.md" if wrong else "It can be published."
        out().print(f"\n{ready}", markup=False)
    return 2 if wrong else 0


def examine(loaded: Loaded) -> Subject:
    """Gather what the rules ask about: the published runs, by the claims as they are, and a bundle, read back."""
    found = published_runs(loaded.recipe)
    runs = [(run, judged_for(run, loaded.recipe)[1]) for _, run in found]
    try:
        carried = Carried(runs=tuple(found), quality=items_of(loaded.recipe))
        entries, info = bundle_entries(loaded, "1", Images({}), None, carried, None)
        with tempfile.TemporaryDirectory(prefix="station-recipes-") as folder:
            written = write_bundle(entries, info, None, Path(folder) / "bundle.tar", False)
            with unpacked(Path(written.file), Path(folder) / "read", Limits()):
                pass
    except Problem as problem:
        return Subject(loaded, runs, str(problem))
    return Subject(loaded, runs, written)
