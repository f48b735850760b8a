"""Room recipes: a bundle adopted: what it is, what it would change, whether it can run here; then kept, as it came."""

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import ValidationError

from images.errors import BundleProblem, Problem, UsageProblem
from images.staging import disk
from images.yaml_source import shown
from recipes.adopted import BUNDLE, LABEL, RECORD, SITE, Adopted, Site, adopted, adopted_root, read_adopted
from recipes.bundle.code import code_in
from recipes.bundle.fits import Finding, engine_findings, machine_findings
from recipes.bundle.layout import CLAIMS, LOCK, SUMS
from recipes.bundle.read import Bundle, Limits, Progress, unpacked
from recipes.bundle.write import rendered
from recipes.load import LADDER_FILE, Loaded, changes, load_recipe
from recipes.lock import as_text, locked_recipe, read_lock
from recipes.model_files import differing_files, observed_files
from recipes.rules import TABLE_VERSION, broken_rules
from recipes.schema import Claim, Model
from recipes.serving import platform_of
from recipes.site import site_for_a_look

STAGING, STALE_S = ".staging-", 86_400
SITE_HEAD = """\
# What this machine says of {recipe}, adopted as {label}. The bundle beside it is never edited.
# port: on 127.0.0.1 · gpu: UUID of the one GPU · cache: host folder for rendered files
# mirrors: repositories asked first for the engine's image
"""


@dataclass(frozen=True)
class Wishes:
    """What a person said about adopting. `public_key` in base64; `label` instead of the content's own."""

    label: str | None = None
    public_key: str | None = None
    allow_code: bool = False
    without_engine: bool = False
    site: Site = field(default_factory=Site)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Candidate:
    """A bundle that was read and checked, not yet adopted. `findings` say what fits this machine and what doesn't."""

    bundle: Bundle
    loaded: Loaded
    label: str
    source: str
    trusted: bool
    findings: list[Finding]
    site: Site
    already: Adopted | None = None


@contextmanager
def candidate(
    local: Path, source: str, wishes: Wishes, facts: dict, progress: Progress = lambda _: None
) -> Iterator[Candidate]:
    """Read a tar or folder into a folder below the adopted ones, and check it; it is gone at the end unless kept.

    `source` is how a person named it. Raises BundleProblem for whatever is wrong with it, UsageProblem for a label or
    an option that can't be.
    """
    root = adopted_root()
    with disk(root):
        root.mkdir(parents=True, exist_ok=True)
        _clear(root)
        staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=root))
    try:
        with unpacked(local, staging / BUNDLE, wishes.limits, progress, source) as bundle:
            _require_signer(bundle, wishes, source)
            loaded = _load(bundle)
            _require_platform(bundle, wishes, facts)
            _refuse_code(bundle, loaded, wishes)
            label = wishes.label or bundle.label
            findings = [*_said(bundle, loaded, wishes), *_fits(bundle, loaded, wishes, facts)]
            trusted = wishes.public_key is not None
            found = Candidate(bundle, loaded, label, source, trusted, findings, wishes.site, _already(label, bundle))
            yield found
    except Problem as problem:  # the folder that it names is gone in a moment; inside the bundle the name stays
        said = str(problem).replace(f"{shown(staging / BUNDLE)}/", "")
        if said == str(problem):
            raise
        raise BundleProblem(f"{source}: {said}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _clear(root: Path) -> None:
    """Remove what an adopt that was killed by force left, a day later."""
    for path in root.glob(f"{STAGING}*"):
        if time.time() - path.stat().st_mtime > STALE_S:
            shutil.rmtree(path, ignore_errors=True)


def _require_signer(bundle: Bundle, wishes: Wishes, source: str) -> None:
    wanted = wishes.public_key
    if wanted and bundle.signer is None:
        raise BundleProblem(f"{source} is not signed, and --pubkey asks for a signature")
    if wanted and bundle.signer != wanted:
        raise BundleProblem(f"{source} is signed by {bundle.signer}, and not by {wanted}, which --pubkey asks for")


def _load(bundle: Bundle) -> Loaded:
    """The recipe of a bundle, which has to be what bundle.json, the lock and the claims say."""
    info, library = bundle.info, bundle.folder / "recipes"
    _require_only_recipes(bundle)
    loaded = load_recipe(info.recipe, library)
    chain = [loaded.recipe.id]
    while (parent := load_recipe(chain[0], library).recipe.extends) is not None:
        chain.insert(0, parent)
    said = {
        "chain": (info.chain, chain),
        "title": (info.title, loaded.recipe.title),
        "status": (info.status, loaded.recipe.status),
        "engine": (
            (info.engine.image, info.engine.version),
            (loaded.recipe.engine.image, loaded.recipe.engine.version),
        ),
        "model": (info.model, "carried" if loaded.recipe.model.path else "named"),
    }
    for key, (told, found) in said.items():
        if told != found:
            raise BundleProblem(f"bundle.json says {key} {told!r}, the recipe says {found!r}")
    if loaded.recipe.model.path:
        differing = differing_files(loaded.recipe.model.files, observed_files(loaded))
        if differing:
            raise BundleProblem(f"the model isn't the recipe's: {', '.join(differing)} differ")
    told = _json_of(bundle, CLAIMS)
    if not isinstance(told, list) or [_claim(each) for each in told] != loaded.recipe.claims:
        raise BundleProblem(f"{CLAIMS} is not what the recipe claims")
    if info.lock:
        _require_lock(bundle, loaded)
    return loaded


def _claim(told: object) -> Claim | None:
    try:
        return Claim.model_validate(told)
    except ValidationError:
        return None


def _json_of(bundle: Bundle, name: str) -> object:
    try:
        return json.loads((bundle.folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise BundleProblem(f"{name} is missing, or is not JSON") from None


def _require_only_recipes(bundle: Bundle) -> None:
    """recipes/ holds the chain's files, their ladders, model cards and one model's folder, and nothing else."""
    wanted = {f"recipes/{each}.yaml" for each in bundle.info.chain}
    families = {each.split("/")[0] for each in bundle.info.chain}
    wanted |= {f"recipes/{family}/{name}" for family in families for name in (LADDER_FILE, "MODEL_CARD.md")}
    for name in bundle.files:
        depth = name.count("/")
        if name.startswith("recipes/") and name not in wanted and depth < 3:
            raise BundleProblem(f"{name} is no recipe that {bundle.info.recipe} extends")
        if name.startswith("recipes/") and depth >= 3 and name.split("/")[1] not in families:
            raise BundleProblem(f"{name} belongs to no recipe of this bundle")


def _require_lock(bundle: Bundle, loaded: Loaded) -> None:
    """The lock is of this recipe. Compared as recipes, so that keys which are newer than the bundle don't matter."""
    file = bundle.folder / LOCK
    locked = locked_recipe(file).recipe
    model = loaded.recipe.model.model_copy(update={"revision": locked.model.revision})  # confirmed when it was bundled
    same = locked == loaded.recipe.model_copy(update={"model": model}) and _whole_lock(read_lock(file), model)
    if not same or as_text(read_lock(file)) != file.read_text(encoding="utf-8"):
        raise BundleProblem(f"{LOCK} is not of the recipe beside it")


def _whole_lock(lock: dict, model: Model) -> bool:
    """Whether the parts of a lock that are read later are there, and say what its recipe says."""
    engine, told = lock.get("engine"), lock.get("model")
    images = engine.get("images") if isinstance(engine, dict) else None
    if not isinstance(told, dict) or not isinstance(images, dict):
        return False
    return (told.get("repo"), told.get("revision"), told.get("files")) == (model.repo, model.revision, model.files)


def _require_platform(bundle: Bundle, wishes: Wishes, facts: dict) -> None:
    here, there = platform_of(facts), bundle.info.platform
    if there and there != here and not wishes.without_engine:
        raise BundleProblem(
            f"the bundle carries an engine for {there}, this machine is {here}: it can't run here. Ask for a bundle "
            f"for {here}, or adopt the recipe alone: --without-engine"
        )


def _refuse_code(bundle: Bundle, loaded: Loaded, wishes: Wishes) -> None:
    """Refuse what would make the engine run a stranger's code when the recipe is served, unless it is allowed."""
    inside = [name.split("/", 3)[3] for name in bundle.files if name.startswith("recipes/") and name.count("/") >= 3]
    found = code_in(loaded.recipe, inside)
    if found and not wishes.allow_code:
        raise BundleProblem(
            f"serving this recipe would run code that comes with it: {', '.join(found)}. If you have read it and trust "
            "it: --allow-code"
        )
    if bundle.info.caches and not wishes.allow_code and not wishes.without_engine:
        raise BundleProblem(
            "the bundle carries compiled kernels, which nothing here can check and the engine would run. If you trust "
            "who made them: --allow-code; else --without-engine"
        )


def _said(bundle: Bundle, loaded: Loaded, wishes: Wishes) -> list[Finding]:
    """What was checked of the bundle itself."""
    info = bundle.info
    found = [Finding("whole", True, f"{len(bundle.files)} files, each as {SUMS} says")]
    if bundle.signer is None:
        found.append(Finding("signed", None, "not signed: whole, but by whom nobody can say"))
    elif wishes.public_key:
        found.append(Finding("signed", True, f"by {bundle.signer}, as asked for"))
    else:
        said = f"by {bundle.signer}; whether that is theirs, ask them: --pubkey"
        found.append(Finding("signed", None, said))
    try:
        mine = load_recipe(info.recipe, own=site_for_a_look()) if "@" not in info.recipe else None
    except UsageProblem:
        mine = None
    if mine is not None and mine.origin is None:
        differing = changes(mine.recipe, loaded.recipe)
        same = "your library's is the same" if not differing else f"your library's differs: {', '.join(differing[:6])}"
        found.append(Finding("here already", None, same))
    return [*found, _rendered_finding(bundle, loaded), _rules_finding(bundle)]


def _rendered_finding(bundle: Bundle, loaded: Loaded) -> Finding:
    """Whether the scripts inside are what this version makes of the recipe: a person might run one."""
    there = {name for name in bundle.files if name.startswith("rendered/")}
    try:
        made = {each.name: each.content for each in rendered(loaded, bundle.info.image)}
    except Problem as problem:
        return Finding("rendered", None, f"can't be rendered here: {str(problem).splitlines()[0]}")
    same = {name for name in there & made.keys() if (bundle.folder / name).read_bytes() == made[name]}
    other = sorted((there | made.keys()) - same)
    if other:
        return Finding(
            "rendered", False, f"{', '.join(other)}: not what this version renders; don't run it, render anew"
        )
    return Finding("rendered", True, "the files are what this version makes of the recipe")


def _rules_finding(bundle: Bundle) -> Finding:
    theirs = bundle.info.rules
    said = f"they checked it by table {theirs}, here it is table {TABLE_VERSION}"
    return Finding("rule table", None if theirs != TABLE_VERSION else True, said)


def _fits(bundle: Bundle, loaded: Loaded, wishes: Wishes, facts: dict) -> list[Finding]:
    try:
        broken = broken_rules(loaded)
    except Problem as problem:
        broken = str(problem).splitlines()
    rules = [Finding("rules", not broken, "; ".join(broken[:3]) or "it keeps every known rule of the engine")]
    port = wishes.site.port or loaded.recipe.runtime.port
    taken = _taken(port)
    rules.append(Finding("port", not taken, f"{port} on 127.0.0.1 is {'taken: --port' if taken else 'free'}"))
    carried = None if wishes.without_engine else bundle
    return [
        *rules,
        *machine_findings(loaded, facts, wishes.site),
        *engine_findings(loaded, carried, facts, wishes.site),
    ]


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _already(label: str, bundle: Bundle) -> Adopted | None:
    """The same bundle, adopted before under this label. Raises UsageProblem for a label that can't be, or is taken."""
    if not LABEL.fullmatch(label):
        raise UsageProblem(f"--as {label!r}: wanted lower-case letters, digits, dots and dashes, 40 at most")
    there = next((each for each in adopted() if each.label == label), None)
    if there and there.record.content != bundle.content:
        raise UsageProblem(
            f"{label} is another bundle here already: {there.reference}, version {there.record.version}. Choose "
            f"another name with --as, or remove {shown(there.folder)}"
        )
    return there


def keep(found: Candidate, carry_engine: bool) -> Adopted:
    """Adopt a candidate: its folder appears whole, under its label; one that is there gets a new overlay."""
    home = adopted_root() / found.label
    if found.already:
        _write_site(home, found)
        return read_adopted(home)
    staging = found.bundle.folder.parent
    record = {
        "recipe": found.bundle.info.recipe,
        "version": found.bundle.info.version,
        "content": found.bundle.content,
        "source": found.source,
        "signer": found.bundle.signer,
        "trusted": found.trusted,
    }
    with disk(home.parent):
        if not carry_engine:
            shutil.rmtree(found.bundle.folder / "engine", ignore_errors=True)
        (staging / RECORD).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _write_site(staging, found)
        try:
            staging.chmod(0o755)
            os.rename(staging, home)
        except OSError:
            if home.exists():
                raise UsageProblem(f"{found.label} was adopted by another command meanwhile") from None
            raise
    return read_adopted(home)


def _write_site(folder: Path, found: Candidate) -> None:
    said = {key: value for key, value in found.site.model_dump().items() if value not in (None, [])}
    head = SITE_HEAD.format(recipe=found.bundle.info.recipe, label=found.label)
    text = yaml.safe_dump(said, sort_keys=False) if said else "{}\n"
    partial = folder / f".{SITE}.partial"
    partial.write_text(head + text, encoding="utf-8")
    partial.replace(folder / SITE)


def would_change(found: Candidate, carry_engine: bool) -> Sequence[tuple[str, str]]:
    """What adopting and then reproducing changes on this machine: place, what."""
    home = adopted_root() / found.label
    rows = [(str(home), "nothing: it is there already, only its overlay" if found.already else f"{_mb(found)} MB")]
    rows.append((f"{home.name}/{SITE}", _site_said(found.site)))
    if found.bundle.info.archive and carry_engine:
        rows.append(("the Docker engine", f"the image {found.bundle.info.archive.image_id[:19]}…"))
    port = found.site.port or found.loaded.recipe.runtime.port
    rows.append((f"port {port} on 127.0.0.1", "the engine, while the recipe is served"))
    return rows


def _mb(found: Candidate) -> str:
    return f"{found.bundle.size_bytes / 1e6:,.1f}"


def _site_said(site: Site) -> str:
    said = [f"{key} {value}" for key, value in site.model_dump().items() if value not in (None, [])]
    return ", ".join(said) or "nothing beside the recipe's own"
