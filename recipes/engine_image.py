"""Room recipes: a recipe's engine image for people and for scripts: built or pulled, proved, locked."""

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from images.build import Built, Order, build_image
from images.command import run
from images.console import emit_json, note, out, table
from images.declaration import declaration
from images.docker_engine import docker_engine, engine_host, is_local
from images.errors import UsageProblem
from images.verify import verify_image
from images.verify_checks import Finding
from images.yaml_source import shown
from recipes.check import save_lock
from recipes.load import load_recipe
from recipes.lock import Images
from recipes.machine import machine_facts
from recipes.site import accept_image, own_site

CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
ARCH = re.compile(r"[1-9][0-9]?\.[0-9][af]?")


def build_engine(
    order: Order, recipe: str | None, lock_file: Path | None, prove: str, lock: bool, as_json: bool
) -> None:
    """Build or pull an image, prove it, write the recipe's lock, and print what is there now.

    `prove`: "once", "again" although it was proved, or "not". Raises Problem when any of these fails; an image that
    isn't proved is never locked.
    """
    started = time.monotonic()
    built = build_image(order)
    findings = []
    if prove != "not":
        findings = verify_image(built, prove == "again" or built.fresh, proof_device(built.name))
    _accept(built, prove)
    locked = _locked(recipe, built, lock_file) if lock and recipe and prove != "not" else None
    if as_json:
        emit_json(
            {
                **asdict(built),
                "reference": built.reference,
                "findings": [asdict(finding) for finding in findings],
                "lock": None if locked is None else shown(locked),
            }
        )
        return
    _print(built, findings, time.monotonic() - started)
    if locked:
        out().print(shown(locked), markup=False)


def proof_device(name: str) -> str | None:
    """The CDI name of the GPU on which an image's engine is proved: the site's, or this machine's only one.

    None for a CPU engine, and where there is no such GPU, or none that the Docker engine could give; that is said.
    """
    if declaration(name).device != "cuda":
        return None
    if not is_local(engine_host()):
        note("The Docker engine is another machine's: the image isn't proved on its GPU before a run there needs it")
        return None
    here = [gpu["uuid"] for gpu in machine_facts()["gpus"] if gpu.get("uuid")]
    chosen = [uuid for uuid in here if own_site().gpu in {None, uuid}]
    if here and len(chosen) != 1:
        note(f"This machine has {len(here)} GPUs: the image isn't proved on one. Name it: ./inv site --gpu UUID")
    elif here and not docker_engine().devices_by_cdi:
        note("The Docker engine is older than 25, so it gives a container no GPU by CDI: the image isn't proved on one")
    elif here and (why := _not_free(chosen[0])):
        note(f"{why}: the image isn't proved on it now; what runs it next proves it first")
    elif here:
        return f"nvidia.com/gpu={chosen[0]}"
    return None


def _not_free(uuid: str) -> str | None:
    """Why a GPU can't be had for a proof now: no CDI file names one yet, or somebody computes on it; else None."""
    if not any(file for folder in CDI_FOLDERS for file in folder.glob("*.*")):
        return "No CDI file names this machine's GPU yet (./inv provision writes it)"
    asked = run(["nvidia-smi", f"--id={uuid}", "--query-compute-apps=pid", "--format=csv,noheader"])
    return f"The GPU {uuid} is in use" if asked.returncode == 0 and asked.stdout.strip() else None


def order_for(recipe: str | None, image: str | None, **options: object) -> Order:
    """The order of a recipe's image, or of a named one.

    Raises UsageProblem unless exactly one is named, and for an option that could do nothing; SiteProblem where this
    machine's site can't be read.
    """
    if bool(recipe) == bool(image):
        raise UsageProblem("build needs either --recipe NAME or --image NAME")
    own_site()  # where it can't be read, an image can't be accepted: said before an hour's build
    order = Order(load_recipe(recipe).recipe.engine.image if recipe else image, **options)
    _refuse_idle(order)
    return order


def _refuse_idle(order: Order) -> None:
    """Raise UsageProblem for an option of a build that the ordered image has no use for, or can't have."""
    facts = declaration(order.image)
    given = {"--base": order.base, "--archs": order.cuda_archs, "--again": order.again}
    idle = [name for name, value in given.items() if value]
    if idle and (order.source or facts.source) == "pull":
        way = ": --source build" if facts.sources.build else ""
        raise UsageProblem(f"{', '.join(idle)}: {facts.name} is pulled as it is; only a build takes that{way}")
    if order.cuda_archs and facts.device != "cuda":
        raise UsageProblem(f"--archs: the {facts.name} image has no GPU kernels that could be compiled for one")
    strange = [arch for arch in order.cuda_archs if not ARCH.fullmatch(arch)]
    if strange:
        raise UsageProblem(f"--archs {', '.join(strange)}: wanted GPU architectures such as 9.0a,10.3a")


def refuse_unwritten(recipe: str | None, out: str | None, lock: bool, proof: bool, verify: bool) -> None:
    """Raise UsageProblem where a build is told to prove and not to, or to write a lock where none will be written."""
    if verify and not proof:
        raise UsageProblem("--verify proves the image again and --no-proof doesn't prove it: take one of them")
    if out and not (recipe and lock and proof):
        raise UsageProblem("--out is the file of a recipe's lock: it needs --recipe, without --no-lock and --no-proof")


def _accept(built: Built, prove: str) -> None:
    """An image that stands for the declared one is used here from now on: it was asked for, and is said."""
    facts = declaration(built.name)
    if built.source == facts.source or prove == "not":
        return
    accept_image(built.name, built.id)
    note(f"It stands for {facts.sources.build.stands_for or facts.version}")
    note(
        f"From now on recipes of the engine {built.name} run in it on this machine: ./inv site shows it, "
        f"./inv site --forget images.{built.name} takes it back"
    )


def _locked(recipe: str, built: Built, lock_file: Path | None) -> Path | None:
    """Write the lock; a recipe that can't be locked yet is said, and the image stays."""
    try:
        return save_lock(recipe, Images({built.platform: built.reference}), None, lock_file)
    except UsageProblem as problem:
        note(f"No lock was written: {problem}")
        return None


def _print(built: Built, findings: Sequence[Finding], seconds: float) -> None:
    console = out()
    marks = {True: "✔", False: "✘", None: "–"}
    rows = [(marks[each.ok], each.id, each.found, "" if each.ok else each.wanted) for each in findings]
    console.print(table("Proved from within and from outside", ("", "check", "found", "wanted"), rows))
    state = "made" if built.fresh else "there already"
    how = f"{state} ({built.source}), {built.size_bytes / 1e9:.2f} GB, {seconds:.0f} s"
    console.print(f"\n{built.name} {built.version} for {built.platform}: {how}", markup=False)
    console.print(f"image id  {built.id}", markup=False)
    console.print(f"digest    {built.digest or 'none: it was built here and is in no registry'}", markup=False)


def parse_archs(text: str | None) -> tuple[str, ...]:
    """GPU architectures, separated by commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
