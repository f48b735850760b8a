"""Room recipes: the catalogue: recipes of the library, adopted ones, and those of registries and git repositories."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from images.command import run
from images.console import emit_json, note, out, table
from images.engine import find_engine
from images.errors import BundleProblem, ImageProblem, Problem, UsageProblem
from images.registry import Reference, Wire, cause, parse_reference, require_skopeo, said_by
from images.staging import workspace
from recipes.adopted import Adopted, adopted
from recipes.bundle.git import GIT, clone, read_index
from recipes.bundle.oci import describe
from recipes.bundle.source import OCI
from recipes.load import Loaded, first_choice, load_adopted, load_recipe, recipe_ids
from recipes.machine import machine_facts, why_not
from recipes.schema import Recipe
from recipes.serving import platform_of
from recipes.site import OwnSite, site_for_a_look

MAX_TAGS = 50
WHOLE = 20  # letters of a name that stay on one line


class Verdict(NamedTuple):
    """The newest verdict that is known of a recipe: its state, the run's machine, and the run's name.

    `invalid_since`: a newer run there that proves nothing, a cut-off one for example; it hides no verdict.
    """

    state: str
    machine: str
    run: str | None = None
    invalid_since: str | None = None


@dataclass(frozen=True)
class Row:
    """One recipe of the catalogue. `where`: library, adopted, git or registry; `id` is what a command takes."""

    where: str
    id: str
    title: str | None
    change: str
    status: str | None
    here: str
    verdict: Verdict | None = None

    def as_json(self) -> dict:
        """For scripts."""
        return {**asdict(self), "verdict": self.verdict._asdict() if self.verdict else None}


def list_recipes(verdicts: Mapping[str, Verdict], sources: Sequence[str], wire: Wire, as_json: bool) -> int:
    """Print the catalogue; returns 0, or 1 where a source could not be asked.

    `verdicts`: the newest of each recipe by id, of an adopted one by its bundle's content.
    """
    machine = machine_facts()
    chosen, why = first_choice(machine["slug"])
    own = site_for_a_look()
    rows = [*_library(machine, verdicts, own), *_adopted(machine, verdicts, own)]
    failed = []
    for source in sources:
        try:
            rows += rows_of(source, machine, wire)
        except Problem as problem:
            failed.append(f"{source}: {problem}")
    if as_json:
        told = {"machine": machine["slug"], "first_choice": chosen, "recipes": [row.as_json() for row in rows]}
        emit_json({**told, "failed": failed})
        return 1 if failed else 0
    console = out()
    for heading, group in _groups(rows):
        lines = [
            (("→ " if row.id == chosen else "  ") + name, row.here, _said(row.verdict), row.status or "–")
            for name, row in group
        ]
        console.print(table(heading, ("", "on this machine", "newest verdict", "figures"), lines, whole=WHOLE), "")
    console.print(f"→ what `./inv reproduce` runs here: {why}.", markup=False)
    console.print(
        "A recipe's name is FAMILY/RUNG. What a rung changes: ./inv ladder --show --recipe FAMILY.", markup=False
    )
    for line in failed:
        note(f"✘ {line}")
    return 1 if failed else 0


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[tuple[str, Row]]]]:
    """The rows under headings, each with its name there: a family's recipes by what follows its name."""
    groups: dict[str, list[tuple[str, Row]]] = {}
    for row in rows:
        family, _, rung = row.id.partition("/")
        heading, name = (family, rung) if row.where == "library" else (row.where, row.id)
        groups.setdefault(heading, []).append((name, row))
    return list(groups.items())


def _said(verdict: Verdict | None) -> str:
    if verdict is None:
        return "–"
    return f"{verdict.state} on {verdict.machine}" + (", then INVALID" if verdict.invalid_since else "")


def _library(machine: dict, verdicts: Mapping[str, Verdict], own: OwnSite) -> list[Row]:
    rows = []
    for recipe_id in recipe_ids():
        try:
            loaded = load_recipe(recipe_id, own=own)
        except UsageProblem as problem:
            rows.append(Row("library", recipe_id, None, "–", None, f"broken: {str(problem).splitlines()[0]}"))
            continue
        rows.append(_row("library", recipe_id, loaded, machine, verdicts.get(recipe_id)))
    return rows


def _row(where: str, name: str, loaded: Loaded, machine: dict, verdict: Verdict | None) -> Row:
    recipe = loaded.recipe
    change = _change(recipe) if recipe.delta else recipe.title
    return Row(where, name, recipe.title, change, _figures(recipe), _here(loaded, machine), verdict)


def _change(recipe: Recipe) -> str:
    """What a rung changes of what it extends; how that is proved is no news here."""
    names = [key.removeprefix("engine.flags.").removeprefix("engine.env.") for key in recipe.delta.changes]
    changed = [name for name in names if not name.startswith("proof.")]
    return f"{', '.join(changed or names)} (on {recipe.extends.rpartition('/')[2]})"


def _figures(recipe: Recipe) -> str | None:
    """What the figures that a recipe claims are; None where it claims none."""
    kinds = {claim.status for claim in recipe.claims}
    if recipe.status != "measured" or not kinds:
        return recipe.status if recipe.status != "measured" else None
    return "claimed" if "claimed" in kinds else "measured"


def _here(loaded: Loaded, machine: dict) -> str:
    engine = loaded.recipe.engine
    reason = why_not(loaded.recipe, machine)
    if reason:
        return reason
    if find_engine(engine.image):
        how = "installed"
    else:
        how = "comes with its bundle" if loaded.wheels else "installed on first use"
    return f"runs here; engine {engine.image} {engine.version} {how}"


def _adopted(machine: dict, verdicts: Mapping[str, Verdict], own: OwnSite) -> list[Row]:
    try:
        there = adopted()
    except UsageProblem as problem:
        note(f"✘ {problem}")
        return []
    rows = []
    for each in there:
        try:
            loaded = load_adopted(each, own)
        except Problem as problem:
            rows.append(Row("adopted", each.reference, None, "–", None, f"broken: {str(problem).splitlines()[0]}"))
            continue
        verdict = verdicts.get(each.record.content) or _carried(each)
        rows.append(_row("adopted", each.reference, loaded, machine, verdict))
    return rows


def _carried(each: Adopted) -> Verdict | None:
    """The newest run that came with a bundle."""
    runs = sorted(each.info.get("runs") or [], key=lambda run: run["name"])
    return Verdict(runs[-1]["state"], f"{runs[-1]['machine']} (theirs)", runs[-1]["name"]) if runs else None


def rows_of(source: str, machine: dict, wire: Wire) -> list[Row]:
    """The bundles of a registry's repository or of a git repository; nothing but what they say of themselves is read.

    Raises UsageProblem for another kind of source, BundleProblem or ImageProblem where it can't be asked.
    """
    if source.startswith(OCI):
        return _registry(source.partition("://")[2], machine, wire)
    if source.startswith(GIT) or source.endswith(".git"):
        return _git(source, machine)
    raise UsageProblem("wanted docker://HOST/NAME of a registry, or git+URL of a repository of recipes")


def _git(source: str, machine: dict) -> list[Row]:
    with workspace() as folder:
        index = read_index(clone(source.removeprefix(GIT), folder, None))
    rows = []
    for each in index.bundles:
        here = _told_here(each.device, "any", machine)
        verdict = _told_verdict(each.runs)
        name = f"{source} --recipe {each.recipe} --version {each.version}"
        rows.append(Row("git", name, each.title, each.title, each.status, here, verdict))
    return rows


def _registry(name: str, machine: dict, wire: Wire) -> list[Row]:
    reference = parse_reference(name)
    wire.require_use([reference])
    tags = [reference.tag] if reference.tag else tags_of(reference, wire)
    rows = []
    for tag in tags[-MAX_TAGS:]:
        at = Reference(reference.name, tag)
        try:
            told = describe(at, wire)[0].annotations
        except BundleProblem:
            continue  # another kind of artifact, or an image, under the same name
        here = _told_here(told.get("device", ""), told.get("platform", "any"), machine)
        verdict = _told_verdict(told.get("runs", "").split(","))
        title = told.get("title", "–")
        rows.append(Row("registry", f"docker://{at}", title, title, told.get("status"), here, verdict))
    return rows


def tags_of(reference: Reference, wire: Wire) -> list[str]:
    """The tags of a registry's repository. Raises ImageProblem where it gives none."""
    require_skopeo()
    asked = ["skopeo", "--command-timeout=10s", "list-tags", *wire.options(reference), f"docker://{reference.name}"]
    answer = run(asked)
    if answer.returncode != 0:
        raise ImageProblem(f"{reference.name}: {cause(answer.stderr)[1]} ({said_by(answer.stderr)})")
    try:
        return [str(tag) for tag in json.loads(answer.stdout)["Tags"]]
    except (ValueError, KeyError, TypeError):
        raise ImageProblem(f"{reference.name}: the registry's list of tags can't be read") from None


def _told_here(device: str, platform: str, machine: dict) -> str:
    """What a bundle's own words say of this machine; whether it is so, adopting checks."""
    if platform not in {"any", platform_of(machine)}:
        return f"its engine is for {platform}"
    if device == "cuda" and not machine["gpus"]:
        return "needs an NVIDIA GPU"
    return "may run here: ./inv adopt --check"


def _told_verdict(runs: Sequence[str]) -> Verdict | None:
    words = [run.rpartition(" ") for run in runs if " " in run]
    return Verdict(words[-1][2], f"{words[-1][0]} (as told)") if words else None
