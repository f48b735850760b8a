"""Room recipes: whether an adopted recipe can run on this machine: device, engine, image, preflight; only asked."""

import sys
from dataclasses import dataclass

from images.declaration import declaration
from images.declared import pull_references
from images.engine import engine_identity, find_engine
from images.errors import Problem, UsageProblem
from images.registry import Wire, reachable, retention
from recipes.adopted import Site
from recipes.bundle.carry import fits_kernels, kernel_device
from recipes.bundle.layout import LOCK
from recipes.bundle.read import Bundle
from recipes.hosts import run_playbook
from recipes.load import Loaded
from recipes.lock import read_lock
from recipes.machine import gpu_device, load_machines, machine_profile, why_not
from recipes.serving import platform_of
from recipes.spec import IMAGE


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `ok`: True, False, or None where it is for a person to know."""

    id: str
    ok: bool | None
    found: str


def machine_findings(loaded: Loaded, facts: dict, site: Site) -> list[Finding]:
    """Whether this machine is one that the recipe can run on, and which GPU it would get."""
    recipe = loaded.recipe
    reason = why_not(recipe, facts)
    found = [Finding("machine", reason is None, f"{facts['slug']}: {reason or 'the recipe can run here'}")]
    claimed = sorted({claim.machine for claim in recipe.claims} - {"any", facts["slug"]})
    if claimed:
        found.append(Finding("claims", None, f"of {', '.join(claimed)}: a run here is NOT_COMPARABLE to those"))
    if declaration(recipe.engine.image).device == "cuda" and reason is None:
        try:
            device = gpu_device(recipe, facts, machine_profile(facts, load_machines()), site.gpu, "Name it: --gpu UUID")
            found.append(Finding("gpu", True, device))
        except UsageProblem as problem:
            found.append(Finding("gpu", False, str(problem)))
    return found


def kernel_findings(bundle: Bundle, facts: dict) -> list[Finding]:
    """Whether carried kernels are for a device of this machine and for the recipe's engine."""
    engine = f"{bundle.info.engine.image} {bundle.info.engine.version}"
    return [
        Finding(
            "kernels",
            fits_kernels(each, facts) and each.engine == engine,
            f"for {each.device} and {each.engine}; here: {', '.join(sorted(kernel_device(facts)))} and {engine}",
        )
        for each in bundle.info.caches
    ]


def engine_findings(loaded: Loaded, bundle: Bundle | None, facts: dict, site: Site) -> list[Finding]:
    """Whether the engine is here, comes with the bundle, or can be had. `bundle`: None when its engine is left out."""
    return [
        *_engine_findings(loaded, bundle, facts, site),
        *(kernel_findings(bundle, facts) if bundle else []),
    ]


def _engine_findings(loaded: Loaded, bundle: Bundle | None, facts: dict, site: Site) -> list[Finding]:
    facts_of = declaration(loaded.recipe.engine.image)
    if facts_of.disk_gb is None or loaded.recipe.runtime.kind == "docker":
        return _image_findings(loaded, bundle, facts, site)
    return _environment_findings(loaded, bundle, facts)


def _environment_findings(loaded: Loaded, bundle: Bundle | None, facts: dict) -> list[Finding]:
    name, here = loaded.recipe.engine.image, engine_identity(loaded.recipe.engine.image)
    wheels = bundle.info.wheels if bundle else None
    if find_engine(name):
        found = [Finding("engine", True, f"{name}, installed")]
    elif wheels and wheels.identity == here:
        found = [Finding("engine", True, f"{name}: its wheels come with the bundle, no network is needed")]
    elif wheels:
        said = f"its wheels are for Python {wheels.python} and other pins than here ({wheels.identity}, here {here})"
        found = [Finding("engine", False, said)]
    else:
        found = [Finding("engine", None, f"{name}: installed on first use, from the package index")]
    if bundle:
        key = f"{platform_of(facts)} cpython-{sys.version_info.major}{sys.version_info.minor}"
        theirs = bundle.info.engine.identities.get(key)
        same = theirs == here
        said = "the same pins and patches as theirs" if same else f"other pins or patches: theirs {theirs}, here {here}"
        found.append(Finding("engine build", True if same else None, said))
    return found


def _image_findings(loaded: Loaded, bundle: Bundle | None, facts: dict, site: Site) -> list[Finding]:
    name, platform = loaded.recipe.engine.image, platform_of(facts)
    if bundle and bundle.info.archive:
        return [Finding("image", True, f"{name} for {bundle.info.archive.platform} comes with the bundle")]
    sources = declaration(name).sources
    locked = _locked_image(bundle, platform) if bundle else None
    if locked:
        mirrors = [f"{mirror}@{locked.rpartition('@')[2]}" for mirror in site.mirrors]
        states = reachable([locked, *mirrors], Wire(plain_http=True))
        said = f"the lock names {locked}: {retention(states)}"
        return [Finding("image", any(state.state == "ok" for state in states), said)]
    try:
        references = pull_references(name, platform) if sources.pull else []
        digest = references[0].rpartition("@")[2] if references else None
        asked = [*references, *(f"{mirror}@{digest}" for mirror in site.mirrors if digest)]
        states = reachable(asked, Wire(plain_http=True)) if asked else []
    except Problem as problem:
        return [Finding("image", False, str(problem).splitlines()[0])]
    if states:
        ok = any(state.state == "ok" for state in states)
        return [Finding("image", ok, f"{name} for {platform}: {retention(states)}")]
    return [Finding("image", None, f"{name} for {platform}: built here on first use, from pinned wheels")]


def _locked_image(bundle: Bundle, platform: str) -> str | None:
    """The image of a registry that the bundle's lock names for a platform."""
    if not bundle.info.lock:
        return None
    named = read_lock(bundle.folder / LOCK)["engine"]["images"].get(platform)
    return named if isinstance(named, str) and IMAGE.fullmatch(named) else None


def preflight_findings(loaded: Loaded) -> list[Finding]:
    """What `./inv doctor` finds wrong with this machine; for a recipe that runs as a process it is for information."""
    try:
        (host,) = run_playbook("preflight.yml", "", None, (), "Looking at this machine")
    except (Problem, ValueError) as problem:
        return [Finding("preflight", None, f"could not look: {str(problem).splitlines()[0]}")]
    contained = loaded.recipe.runtime.kind == "docker" or declaration(loaded.recipe.engine.image).disk_gb is None
    if host.problem:
        return [Finding("preflight", None, f"could not look: {host.problem}")]
    if not host.wrong:
        return [Finding("preflight", True, "nothing is wrong with this machine")]
    said = ", ".join(str(finding.get("id", "?")) for finding in host.wrong[:6])
    how = "./inv doctor tells more" if contained else "none of it is needed by a process run; ./inv doctor tells more"
    return [Finding("preflight", False if contained else None, f"{len(host.wrong)} to mend: {said}; {how}")]
