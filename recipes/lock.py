"""Room recipes: a lock: everything that decides what a recipe runs, in one file that another machine can check."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel

from images.console import printable
from images.declaration import MACHINE_OF, declaration
from images.engine import engine_identity
from images.errors import UsageProblem
from images.validate import validate
from images.yaml_source import Mark, shown
from recipes.load import Loaded, as_data, load_recipe
from recipes.machine import how_to_confirm, load_machines, machine_profile
from recipes.model_files import differing_files, observed_files
from recipes.rules import TABLE_VERSION
from recipes.schema import Machine, Recipe, Revision
from recipes.spec import IMAGE, IMAGE_ID, serving_spec

SCHEMA = 1
MODEL = "{model}"
DEEPEST = 32  # values inside values; a lock has about ten


@dataclass(frozen=True)
class Images:
    """The image digest of each platform, such as {'linux/arm64': 'name@sha256:…'}; empty for a process run."""

    by_platform: dict[str, str]


class _Named(BaseModel):
    id: str


class _Model(BaseModel):
    revision: Revision | None


class _Engine(BaseModel):
    images: dict[str, str]


class _Read(BaseModel):
    """Of a lock what is read of it, before the rest is compared."""

    recipe: _Named
    model: _Model
    engine: _Engine


def parse_images(texts: list[str]) -> Images:
    """Read PLATFORM=NAME@sha256:… arguments.

    Raises UsageProblem for an unknown platform or an image without a digest.
    """
    found = {}
    for text in texts:
        platform, _, image = text.partition("=")
        if platform not in MACHINE_OF or not (IMAGE.fullmatch(image) or IMAGE_ID.fullmatch(image)):
            raise UsageProblem(f"--image {text}: wanted linux/arm64=NAME@sha256:… or linux/amd64=NAME@sha256:…")
        found[platform] = image
    return Images(found)


def with_revision(loaded: Loaded, revision: str | None) -> Loaded:
    """The recipe at a revision that a person has confirmed.

    Raises UsageProblem, with the way to find it, when the recipe needs one and has none.
    """
    model = loaded.recipe.model
    if model.path:
        if revision:
            raise UsageProblem(f"{loaded.recipe.id} serves a folder of this repository; it has no --model-revision")
        return loaded
    chosen = revision or model.revision
    if not chosen:
        raise UsageProblem(
            f"{loaded.mark('model', 'revision')}: the revision of {model.repo} is not confirmed. "
            f"{how_to_confirm(model)}; or for one lock or bundle: --model-revision <40 hex digits>"
        )
    if len(chosen) != 40 or set(chosen) - set("0123456789abcdef"):
        raise UsageProblem(f"--model-revision {chosen}: wanted the full commit, 40 lower-case hex digits")
    recipe = loaded.recipe.model_copy(update={"model": model.model_copy(update={"revision": chosen})})
    return replace(loaded, recipe=recipe)


def make_lock(loaded: Loaded, facts: dict, images: Images) -> dict:
    """Lock a recipe on this machine.

    Raises UsageProblem when something that must be fixed isn't: the image's digest, the model's files.
    """
    on_cuda = declaration(loaded.recipe.engine.image).device == "cuda"
    identity = None if on_cuda else engine_identity(loaded.recipe.engine.image)
    return {**lock_for(loaded, machine_profile(facts, load_machines()), images, identity), "machine": facts}


def lock_for(loaded: Loaded, profile: Machine, images: Images, identity: str | None) -> dict:
    """A lock without its machine: for any of a profile. `identity`: the engine environment's, None for an image's.

    Raises UsageProblem when something that must be fixed isn't: the image's digest, the model's files.
    """
    recipe = loaded.recipe
    spec = serving_spec(loaded, profile)
    on_cuda = declaration(recipe.engine.image).device == "cuda"
    if on_cuda and not images.by_platform:
        raise UsageProblem(f"{recipe.id} runs in a container: name its image, --image linux/arm64=NAME@sha256:…")
    observed = observed_files(loaded)
    differing = differing_files(recipe.model.files, observed) if recipe.model.path else []
    if differing:
        raise UsageProblem(f"the model isn't the recipe's: {', '.join(differing)} differ; nothing was locked")
    argv = [MODEL if argument == str(spec.model_path) else argument for argument in spec.argv]
    return {
        "schema": SCHEMA,
        "recipe": as_data(recipe),
        "rules": TABLE_VERSION,
        "engine": {
            "image": recipe.engine.image,
            "version": recipe.engine.version,
            "substitutes": recipe.engine.substitutes,
            "identity": identity,
            "images": images.by_platform,
        },
        "model": {
            "repo": recipe.model.repo,
            "revision": recipe.model.revision,
            "files": recipe.model.files,
            "why_no_files": None if recipe.model.path else "hashes come with the first download",
        },
        "argv": argv,
        "env": spec.env,
    }


def as_text(lock: dict) -> str:
    """A lock as it is written: the same bytes for the same content."""
    return json.dumps(lock, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def read_lock(file: Path) -> dict:
    """Read a lock file.

    Raises UsageProblem when it isn't one, or one of another schema.
    """
    try:
        lock = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageProblem(f"{shown(file)}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageProblem(f"{shown(file)}: not a lock: {error}") from error
    if not isinstance(lock, dict) or lock.get("schema") != SCHEMA:
        found = lock.get("schema") if isinstance(lock, dict) else type(lock).__name__
        raise UsageProblem(f"{shown(file)}: a lock of schema {found!r}; this version reads schema {SCHEMA}")
    if _deeper([lock], DEEPEST):
        raise UsageProblem(f"{shown(file)}: not a lock: values lie more than {DEEPEST} deep in it")
    return lock


def _deeper(values: Iterable[object], than: int) -> bool:
    """Whether values lie deeper in others than so many levels."""
    for _ in range(than):
        inside = (each.values() if isinstance(each, dict) else each for each in values if isinstance(each, dict | list))
        values = [value for group in inside for value in group]
    return bool(values)


def locked_recipe(file: Path) -> Loaded:
    """The recipe inside a lock, as it was when it was locked.

    Raises UsageProblem when the file is no lock.
    """
    lock = read_lock(file)
    data = lock.get("recipe")
    if not isinstance(data, dict):
        raise UsageProblem(f"{shown(file)}: not a whole lock: it holds no recipe")
    return Loaded(validate(Recipe, data, {(): Mark(file, 1)}), file.parent, {(): Mark(file, 1)})


def lock_here(file: Path, facts: dict) -> tuple[Loaded, dict, list[str]]:
    """A lock against this machine: the library's recipe at the lock's revision, the lock, and what differs.

    Raises UsageProblem when the file is no lock, or its recipe isn't in the library.
    """
    lock = read_lock(file)
    told = validate(_Read, lock, {(): Mark(file, 1)})
    loaded = load_recipe(told.recipe.id)
    # A commit that is confirmed here is this machine's, and may differ from the lock's: that is what is asked.
    loaded = loaded if loaded.recipe.model.revision else with_revision(loaded, told.model.revision)
    images = Images(told.engine.images)
    return loaded, lock, differences(lock, make_lock(loaded, facts, images))


def differences(locked: dict, here: dict) -> list[str]:
    """What differs between a lock and the same recipe locked here: one line a value, machine facts apart."""
    lines = []
    old, new = _flat(locked), _flat(here)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key) and not key.startswith("machine."):
            lines.append(f"{printable(key)}: locked {json.dumps(old.get(key))}, here {json.dumps(new.get(key))}")
    return lines


def _flat(value: object, path: str = "") -> dict[str, object]:
    if isinstance(value, dict) and value:
        parts = [_flat(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()]
    elif isinstance(value, list) and value:
        parts = [_flat(item, f"{path}[{index}]") for index, item in enumerate(value)]
    else:
        return {path: value}
    return {key: item for part in parts for key, item in part.items()}
