"""Room bench: `./inv adopt`: brings a bundle, checks it, judges its runs again, shows it, and keeps it as it came."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.evidence import read_evidence
from bench.handover.runs import items_of, judged_for
from bench.handover.text import MARKS
from bench.plan import choose_runtime
from images.console import emit_json, note, out, stage, table
from images.errors import BundleProblem, Problem
from images.registry import Wire
from images.staging import disk
from images.transport import load_image
from images.yaml_source import shown
from recipes.adopted import Adopted, Site, from_options
from recipes.bundle.adopt import Candidate, Wishes, candidate, keep, would_change
from recipes.bundle.carry import ARCHIVE, own_kernels, place_caches
from recipes.bundle.fits import Finding, preflight_findings
from recipes.bundle.layout import GB, CarriedRun
from recipes.bundle.read import Limits
from recipes.bundle.sign import read_public_key
from recipes.bundle.source import Choice, brought
from recipes.machine import machine_facts
from recipes.schema import Recipe

PROBLEMS_FOUND = 8
MEASURED = frozenset({"run", "ladder"})  # findings about what was measured


@dataclass(frozen=True)
class Taken:
    """What a person asked of `./inv adopt`."""

    source: str
    recipe: str | None = None
    version: str | None = None
    ref: str | None = None
    check: bool = False
    pubkey: str | None = None
    label: str | None = None
    site: dict = field(default_factory=dict)
    without_engine: bool = False
    allow_code: bool = False
    max_gb: int = 2
    doctor: bool = True
    wire: Wire = field(default_factory=Wire)


def take(asked: Taken, as_json: bool) -> int:
    """Adopt a bundle, or with `check` only look at it; returns 0, or 8 where a check found something wrong.

    What is wrong with this machine (the recipe can't run here, preflight) is told and keeps nothing out; a bundle
    whose quality suite asks other items than this version does is kept, and 8 is returned. Raises BundleProblem for
    a bundle that is refused, such as one whose carried runs don't show what it says: nothing of it is kept, and
    nothing was written elsewhere.
    """
    site = from_options(Site, asked.site)
    limits = Limits(total_bytes=asked.max_gb * GB)
    public = read_public_key(asked.pubkey) if asked.pubkey else None
    wishes = Wishes(asked.label, public, asked.allow_code, asked.without_engine, site, limits)
    facts = machine_facts()
    choice = Choice(asked.recipe, asked.version, asked.ref, asked.wire)
    with brought(asked.source, choice, limits) as local, stage(f"Checking {asked.source}") as update:
        done = 0

        def progress(count: int) -> None:
            nonlocal done
            done += count
            update(f"{done / 1e6:,.0f} MB", done)

        with candidate(local, asked.source, wishes, facts, progress) as found:
            proof = _proof_findings(found)
            if not asked.check:
                _require_true(proof)
            findings = [*found.findings, *proof]
            findings += preflight_findings(found.loaded) if asked.doctor else []
            wrong = [each for each in (findings if asked.check else proof) if each.ok is False]
            kept = None if asked.check else _keep(found, asked, facts)
            _say(found, findings, kept, asked, as_json)
    return PROBLEMS_FOUND if wrong else 0


def _require_true(proof: Sequence[Finding]) -> None:
    """Raise BundleProblem where a run or a ladder that is carried as proof isn't what the bundle says."""
    false = [each for each in proof if each.ok is False and each.id in MEASURED]
    if false:
        raise BundleProblem(
            f"what it carries as proof is not what it says, so nothing of it is kept: {false[0].found}. "
            "Ask who sent it for another; --check shows all that was looked at"
        )


def _keep(found: Candidate, asked: Taken, facts: dict) -> Adopted:
    carry = not asked.without_engine
    archive = found.bundle.folder / ARCHIVE
    if carry and archive.is_file() and not found.already:
        image = load_image(archive, None, None, any_platform=False)
        if image.image_id != found.bundle.info.archive.image_id:
            raise BundleProblem(f"the image inside is {image.image_id}, bundle.json says another")
        found = replace(found, site=found.site.model_copy(update={"image": image.image_id}))
    kept = keep(found, carry)
    if carry and found.bundle.info.caches:
        _place_kernels(kept, found, facts)
    return kept


def _place_kernels(kept: Adopted, found: Candidate, facts: dict) -> None:
    """Put carried kernels where the engine looks: in containers the site's cache folder, else the engine's own."""
    contained = choose_runtime(found.loaded, None) == "docker"
    if contained and not kept.site.cache:
        note("The kernels it carries were not put anywhere: name the engine's cache folder with --cache.")
        return
    into = Path(kept.site.cache) if contained else own_kernels(found.loaded)
    uid = found.loaded.recipe.runtime.user if contained else os.geteuid()
    with disk(into):
        count = place_caches(kept.bundle, found.bundle.info.caches, into, uid, facts)
    note(f"{count} files of compiled kernels were put into {shown(into)}.")


def _proof_findings(found: Candidate) -> list[Finding]:
    """The runs it carries, judged again here, and the quality items, made again here."""
    rows = []
    folder, info = found.bundle.folder, found.bundle.info
    names = {name.split("/")[1] for name in found.bundle.files if name.startswith("results/")}
    hidden = sorted(names - {run.name for run in info.runs} - set(info.ladders))
    if hidden:
        raise BundleProblem(f"results/{hidden[0]} is in the bundle, and bundle.json doesn't name it")
    for run in info.runs:
        rows.append(_run_finding(folder / "results" / run.name, run, found.loaded.recipe))
    rows += [ladder_finding(folder / "results" / name) for name in info.ladders]
    try:
        mine = items_of(found.loaded.recipe)
    except Problem as problem:
        return [*rows, Finding("quality", False, str(problem))]
    for suite, text in mine.items():
        file = folder / "quality" / f"{suite}.jsonl"
        same = file.is_file() and file.read_bytes() == text
        said = "the items asked here are the bundle's" if same else "this version asks other items than the bundle's"
        rows.append(Finding(f"quality {suite}", same, said))
    return rows


def ladder_finding(ladder: Path) -> Finding:
    """Whether every run of a carried ladder can be read, and is what was sealed; its table isn't judged again."""
    runs, wrong = sorted(file.parent for file in ladder.glob("runs/*/recipe.yaml")), []
    for run in runs:
        try:
            faults = read_evidence(run).seal_faults
        except Problem as problem:
            faults = [str(problem)]
        wrong += [f"{run.name}: {faults[0]}"] if faults else []
    if wrong:
        return Finding(
            "ladder", False, f"{ladder.name}: {len(wrong)} of {len(runs)} runs are not whole: {wrong[0][:200]}"
        )
    return Finding("ladder", True if runs else None, f"{ladder.name}: {len(runs)} runs, each as it was sealed")


def _run_finding(run: Path, told: CarriedRun, recipe: Recipe) -> Finding:
    """Whether a carried run shows what the bundle says of it: of its recipe as it is, by its claims."""
    try:
        evidence, verdict = judged_for(run, recipe)
    except Problem as problem:
        return Finding("run", False, f"{run.name}: can't be judged: {str(problem)[:200]}")
    wrong, judged = evidence.seal_faults[:1], (verdict["state"], evidence.machine.slug)
    if wrong or judged != (told.state, told.machine):
        said = f"told {told.state} on {told.machine}, judged here {' on '.join(judged)} {wrong or ''}"
        return Finding("run", False, f"{run.name}: {said.strip()}")
    return Finding("run", True, f"{run.name}: {told.state} on {told.machine}, judged again here")


def _say(found: Candidate, findings: Sequence[Finding], kept: Adopted | None, asked: Taken, as_json: bool) -> None:
    info = found.bundle.info
    changes = would_change(found, not asked.without_engine)
    if as_json:
        emit_json(
            {
                "reference": kept.reference if kept else None,
                "folder": str(kept.folder) if kept else None,
                "already": found.already is not None,
                "content": found.bundle.content,
                "signer": found.bundle.signer,
                "info": info.model_dump(by_alias=True),
                "findings": [{"id": each.id, "ok": each.ok, "found": each.found} for each in findings],
                "changes": [list(row) for row in changes],
            }
        )
        return
    console = out()
    claims = ", ".join(f"{claim.id} {claim.published:g} ± {claim.tolerance:g}" for claim in found.loaded.recipe.claims)
    rows = [
        ("recipe", f"{info.recipe}, version {info.version}: {info.title}"),
        ("chain", " → ".join(info.chain)),
        ("claims", claims or "none"),
        ("engine", f"{info.engine.image} {info.engine.version}, made for {', '.join(info.machines)}"),
        ("content", f"sha256:{found.bundle.content}"),
    ]
    console.print(table("What it is", ("", ""), rows))
    console.print(table("\nWhat it changes here", ("", ""), changes))
    console.print(table("\nChecks", ("", "", ""), [(MARKS[each.ok], each.id, each.found) for each in findings]))
    if kept is None:
        console.print("\nNothing was kept (--check).")
        return
    note(f"Kept as it came in {shown(kept.bundle)}; what this site says of it: {shown(kept.folder / 'site.yaml')}")
    console.print(f"\nAdopted as {kept.reference}. To prove it here:", markup=False)
    console.print(f"./inv reproduce --recipe {kept.reference}", markup=False)
