"""Room recipes: from a recipe to its bundle's files, and from those to a tar or a folder: the same bytes every time."""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import minisign
import yaml

from images.declaration import MACHINES, declaration
from images.engine import engine_identity
from images.errors import BundleProblem, UsageProblem
from images.packed import gunzipped
from images.secrets import kinds
from images.staging import disk
from images.yaml_source import shown
from recipes.bundle.layout import (
    INFO,
    LOCK,
    README,
    SIGNATURE,
    SUMS,
    BundleInfo,
    CarriedCaches,
    CarriedImage,
    CarriedRun,
    CarriedWheels,
    EngineNamed,
    refuse_file_as_folder,
    require_parts,
    sort_key,
    sums_text,
    why_bad_name,
)
from recipes.bundle.readme import readme
from recipes.bundle.sign import sign, trusted_comment
from recipes.bundle.tar import Entry, write_tar
from recipes.load import LADDER_FILE, Loaded, as_data, load_ladder, load_recipe
from recipes.lock import Images, as_text, lock_for, with_revision
from recipes.machine import load_machines
from recipes.model_files import differing_files, observed_files
from recipes.render import TEMPLATES, render
from recipes.rules import RULES, TABLE_VERSION, require_rules
from recipes.schema import Machine
from recipes.serving import hosted
from recipes.spec import HOST_CACHE, container, serving_spec

PYTHONS = ("311", "312", "313", "314")
NO_DIGEST = "sha256:" + "0" * 64
NO_GPU = "nvidia.com/gpu=GPU-00000000-0000-0000-0000-000000000000"
FILE_NAMES = {"docker": "docker.sh", "compose": "compose.yaml", "systemd": "station-recipes.service"}
SECRET_BYTES = 1 << 20


@dataclass(frozen=True)
class Carried:
    """What a bundle carries beside the recipe, gathered before. Folders and files by their name in the bundle.

    `runs` and `ladders` are folders of runs; `quality` the suites' items; `files` the engine's.
    """

    runs: tuple[tuple[CarriedRun, Path], ...] = ()
    ladders: tuple[tuple[str, Path], ...] = ()
    quality: Mapping[str, bytes] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    wheels: CarriedWheels | None = None
    archive: CarriedImage | None = None
    caches: tuple[CarriedCaches, ...] = ()


@dataclass(frozen=True)
class Written:
    """A bundle that was written. `content` is the sha256 of its SHA256SUMS, `size` is in bytes."""

    file: str
    recipe: str
    version: str
    content: str
    size: int
    files: int
    signer: str | None
    info: BundleInfo


def chain_of(loaded: Loaded) -> list[Loaded]:
    """A recipe with everything it extends, the one without parent first."""
    library, chain = loaded.folder.parent, [loaded]
    while chain[0].recipe.extends:
        chain.insert(0, load_recipe(chain[0].recipe.extends, library))
    return chain


def bundle_entries(
    loaded: Loaded, version: str, images: Images, revision: str | None, carried: Carried, signer: str | None
) -> tuple[list[Entry], BundleInfo]:
    """Every file of a recipe's bundle but SHA256SUMS and its signature, and what bundle.json says.

    Raises UsageProblem for a recipe that breaks a rule or isn't what it names, BundleProblem for what can't be carried.
    """
    require_rules(loaded)
    chain = chain_of(loaded)
    entries = [*_recipe_files(chain), *_model_files(chain)]
    lock, why = _lock(loaded, profile_of(loaded), images, revision)
    image = next(iter(images.by_platform.values()), None) if images.by_platform else None
    entries += [Entry(LOCK, as_text(lock).encode())] if lock else []
    entries += rendered(loaded, image)
    entries += [Entry("rules.json", _json(_rules())), Entry("claims.json", _json(as_data(loaded.recipe)["claims"]))]
    entries += [Entry(f"quality/{suite}.jsonl", text) for suite, text in carried.quality.items()]
    for run, folder in carried.runs:
        entries += _folder(folder, f"results/{run.name}")
    for name, folder in carried.ladders:
        entries += [each for each in _folder(folder, f"results/{name}") if not each.name.endswith("/.lock")]
    entries += [Entry(name, file) for name, file in carried.files.items()]
    info = _info(loaded, chain, version, carried, signer).model_copy(
        update={"lock": lock is not None, "why_no_lock": why, "image": image}
    )
    entries.append(Entry(README, readme(loaded, info).encode()))
    entries.append(Entry(INFO, _json(info.model_dump(by_alias=True))))
    names = {entry.name: "" for entry in entries}
    if len(names) != len(entries):
        raise BundleProblem("two files of the bundle would have one name")
    for name in names:
        bad = why_bad_name(name)
        if bad:
            raise BundleProblem(f"{bad}: rename it, it can't be bundled")
    require_parts(names, "the bundle")
    refuse_file_as_folder(names, "the bundle")
    _refuse_secrets(entries)
    return sorted(entries, key=lambda entry: sort_key(entry.name)), info


def _recipe_files(chain: Sequence[Loaded]) -> list[Entry]:
    entries = []
    for each in chain:
        entries.append(Entry(f"recipes/{each.recipe.id}.yaml", (each.folder.parent / f"{each.recipe.id}.yaml")))
    library, last = chain[-1].folder.parent, chain[-1].recipe
    for family in sorted({each.recipe.family for each in chain}):
        rungs = [each.recipe.id.split("/")[1] for each in chain if each.recipe.family == family]
        ladder = as_data(load_ladder(family, library))
        default = last.id.split("/")[1] if family == last.family else rungs[-1]
        ladder |= {"rungs": rungs, "default": default}
        text = yaml.safe_dump(ladder, sort_keys=False, allow_unicode=True, width=110)
        entries.append(Entry(f"recipes/{family}/{LADDER_FILE}", text.encode()))
        card = library / family / "MODEL_CARD.md"
        entries += [Entry(f"recipes/{family}/{card.name}", card)] if card.is_file() else []
    return entries


def _model_files(chain: Sequence[Loaded]) -> list[Entry]:
    """The model's files where they are ours: exactly those that the recipe names, each with the hash it names."""
    last, found = chain[-1], {}
    if last.recipe.model.path is None:
        return []
    differing = differing_files(last.recipe.model.files, observed_files(last))
    if differing:
        raise UsageProblem(f"the model isn't the recipe's: {', '.join(differing)} differ; nothing was bundled")
    model = last.recipe.model
    for name in model.files:
        found[f"recipes/{last.recipe.family}/{model.path}/{name}"] = last.folder / model.path / name
    return [Entry(name, file) for name, file in found.items()]


def profile_of(loaded: Loaded) -> Machine:
    """The machine profile that a bundle's lock and rendered files are for: the family's own, never this machine's."""
    machines = load_machines()
    family = load_ladder(loaded.recipe.family, loaded.folder.parent)
    named = [machines[name] for name in family.machines if name in machines]
    device = declaration(loaded.recipe.engine.image).device
    return next((each for each in named if each.device == device), None) or next(
        each for each in reversed(machines.values()) if each.device == device
    )


def _lock(loaded: Loaded, profile: Machine, images: Images, revision: str | None) -> tuple[dict | None, str | None]:
    """A lock that names no machine, or why there is none yet."""
    model = loaded.recipe.model
    if model.repo and not (revision or model.revision):
        return None, f"the revision of {model.repo} is not confirmed; --model-revision names it"
    if declaration(loaded.recipe.engine.image).device == "cuda" and not images.by_platform:
        return None, "the engine's image has no digest yet; --image PLATFORM=NAME@sha256:… names it"
    return lock_for(with_revision(loaded, revision), profile, images, None), None


def rendered(loaded: Loaded, image: str | None) -> list[Entry]:
    """The recipe for every target, for a host of its profile; placeholders where only a site knows."""
    cuda = declaration(loaded.recipe.engine.image).device == "cuda"
    spec = hosted(loaded, serving_spec(loaded, profile_of(loaded)))
    named = image or f"station-recipes/{loaded.recipe.engine.image}@{NO_DIGEST}"
    box = container(loaded, named, NO_GPU if cuda else None, Path(HOST_CACHE))
    return [Entry(f"rendered/{FILE_NAMES[target]}", render(target, spec, box).encode()) for target in TEMPLATES]


def _rules() -> dict:
    rows = [
        {"id": rule.id, "engines": list(rule.engines), "message": rule.message, "source": rule.source} for rule in RULES
    ]
    return {"version": TABLE_VERSION, "rules": rows}


def _folder(folder: Path, name: str) -> list[Entry]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    links = [path for path in files if path.is_symlink()]
    if links:
        raise BundleProblem(f"{shown(links[0])} is a symbolic link; a bundle holds plain files only")
    return [Entry(f"{name}/{path.relative_to(folder).as_posix()}", path) for path in files]


def _info(loaded: Loaded, chain: Sequence[Loaded], version: str, carried: Carried, signer: str | None) -> BundleInfo:
    recipe = loaded.recipe
    engine = declaration(recipe.engine.image)
    return BundleInfo.model_validate(
        {
            "schema": 1,
            "recipe": recipe.id,
            "version": version,
            "title": recipe.title,
            "status": recipe.status,
            "chain": [each.recipe.id for each in chain],
            "machines": load_ladder(recipe.family, loaded.folder.parent).machines,
            "engine": EngineNamed(
                image=engine.name,
                version=recipe.engine.version,
                device=engine.device,
                identities=identities(engine.name) if engine.disk_gb else {},
            ),
            "rules": TABLE_VERSION,
            "model": "carried" if recipe.model.path else "named",
            "lock": False,
            "image": None,
            "wheels": carried.wheels,
            "archive": carried.archive,
            "caches": list(carried.caches),
            "runs": [run for run, _ in carried.runs],
            "ladders": [name for name, _ in carried.ladders],
            "signer": signer,
        }
    )


def identities(image: str) -> dict[str, str]:
    """An engine environment's identity by platform and Python: those of this repository's pins, on any machine."""
    return {
        f"{platform} cpython-{python}": engine_identity(image, f"cpython-{python}", machine)
        for machine, platform in MACHINES.items()
        for python in PYTHONS
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _refuse_secrets(entries: Sequence[Entry]) -> None:
    for entry in entries:
        if entry.name.startswith("engine/") or entry.size > SECRET_BYTES:
            continue
        found = kinds(_unpacked(entry.name, b"".join(entry.chunks())))
        if found:
            raise BundleProblem(f"{entry.name} seems to hold {found[0]}: take it out, a bundle is handed to others")


def _unpacked(name: str, data: bytes) -> bytes:
    """What a small packed text (a log, answers) says; what is no such thing stays as it is."""
    if not name.endswith(".gz"):
        return data
    try:
        return gunzipped(io.BytesIO(data), SECRET_BYTES) or data
    except ValueError:
        return data


def sealed(entries: Sequence[Entry], info: BundleInfo, key: minisign.SecretKey | None) -> tuple[list[Entry], str]:
    """The files of a bundle in their order, SHA256SUMS and its signature first; and the content's sha256."""
    sums = sums_text({entry.name: entry.sha256() for entry in entries}).encode()
    first = [Entry(SUMS, sums)]
    if key is not None:
        first.append(Entry(SIGNATURE, sign(sums, key, trusted_comment(info.recipe, info.version))))
    return [*first, *entries], hashlib.sha256(sums).hexdigest()


def write_bundle(
    entries: Sequence[Entry],
    info: BundleInfo,
    key: minisign.SecretKey | None,
    out: Path,
    as_folder: bool,
    progress: Callable[[int], None] = lambda _: None,
) -> Written:
    """Write a bundle as a tar or as a folder; it appears whole or not at all, and replaces nothing.

    Raises UsageProblem for a name that is taken or can't be written.
    """
    if out.exists() or out.is_symlink():
        raise UsageProblem(f"{shown(out)} is there already; nothing is replaced: choose another name, or remove it")
    if not out.parent.is_dir():
        raise UsageProblem(f"{shown(out)}: there is no folder {shown(out.parent)}")
    ordered, content = sealed(entries, info, key)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        with disk(out.parent):
            if as_folder:
                size = _write_folder(ordered, partial, progress)
            else:
                with partial.open("xb") as sink:
                    size = write_tar(ordered, sink, progress)
            _publish(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
    return Written(str(out), info.recipe, info.version, content, size, len(ordered), info.signer, info)


def _publish(partial: Path, out: Path) -> None:
    """Give what was written its name. Raises UsageProblem where something of that name has appeared meanwhile."""
    try:
        if partial.is_dir():
            out.mkdir()  # the name is ours from here on: a rename replaces an empty folder, and no other
        else:
            os.link(partial, out)  # unlike a rename it never replaces
            return
    except FileExistsError:
        raise UsageProblem(
            f"{shown(out)} has appeared meanwhile; nothing is replaced: choose another name, or remove it"
        ) from None
    except OSError:
        if partial.is_dir():
            raise
    try:
        partial.rename(out)  # a folder, or a file on a file system without links
    except OSError:
        if partial.is_dir():
            out.rmdir()
        raise


def _write_folder(entries: Sequence[Entry], folder: Path, progress: Callable[[int], None]) -> int:
    size = 0
    for entry in entries:
        target = folder / entry.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as sink:
            for data in entry.chunks():
                sink.write(data)
                size += len(data)
                progress(len(data))
    return size
