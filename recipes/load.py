"""Room recipes: from YAML files to a checked Recipe; every error names file, line and key."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from images.errors import UsageProblem, nearest
from images.validate import nearest_mark, validate
from images.yaml_source import Document, KeyPath, Mark, read_yaml
from recipes.adopted import Adopted, Site, find_adopted
from recipes.packed import unpack_model
from recipes.schema import Ladder, Recipe
from recipes.site import OwnSite, at_own_site

LIBRARY = Path(__file__).parent / "library"
LADDER_FILE = "ladder.yaml"
OWN_KEYS = frozenset({"schema", "id", "title", "status", "extends", "claims", "delta", "applies"})
UNCOUNTED = OWN_KEYS | {"choices"}  # inherited, but no change of what is run
ATOMIC = (("engine", "flags"), ("engine", "env"), ("model", "files"))


@dataclass(frozen=True)
class Loaded:
    """A recipe with the folder it came from and the mark of each of its keys.

    `site` is what this machine says of it, `wheels` where an adopted one's bundle brought the engine's;
    `origin` names the bundle.
    """

    recipe: Recipe
    folder: Path
    marks: dict[KeyPath, Mark]
    site: Site = field(default_factory=Site)
    wheels: Path | None = None
    origin: dict | None = None

    def mark(self, *path: str | int) -> Mark:
        """The mark of `path`, or of the nearest key above it."""
        return nearest_mark(self.marks, path)


def families(library: Path = LIBRARY) -> list[str]:
    """The families in the library, by name."""
    return sorted(path.parent.name for path in library.glob(f"*/{LADDER_FILE}"))


def load_ladder(family: str, library: Path = LIBRARY) -> Ladder:
    """Read a family's ladder.yaml.

    Raises UsageProblem for an unknown family, or rungs that have no file.
    """
    if family not in families(library):
        raise UsageProblem(unknown("family", family, families(library)))
    file = library / family / LADDER_FILE
    document = read_yaml(file)
    ladder = validate(Ladder, document.data, document.marks)
    if ladder.family != family:
        mark = nearest_mark(document.marks, ("family",))
        raise UsageProblem(f"{mark}: family: {ladder.family!r}, the folder is {family!r}")
    if len(set(ladder.rungs)) != len(ladder.rungs):
        raise UsageProblem(f"{nearest_mark(document.marks, ('rungs',))}: rungs: one stands twice")
    for key, rungs in (("default", [ladder.default]), ("rungs", ladder.rungs)):
        for rung in rungs:
            if not (library / family / f"{rung}.yaml").exists():
                raise UsageProblem(f"{nearest_mark(document.marks, (key,))}: {key}: there is no file {rung}.yaml")
    return ladder


def recipe_ids(library: Path = LIBRARY) -> list[str]:
    """Every recipe id: rungs in ladder order first, then the family's other recipes."""
    ids = []
    if not families(library):
        raise UsageProblem(f"{library} holds no recipes: no folder in it has a {LADDER_FILE}")
    for family in families(library):
        rungs = list(load_ladder(family, library).rungs)
        others = {path.stem for path in (library / family).glob("*.yaml")} - set(rungs) - {Path(LADDER_FILE).stem}
        ids += [f"{family}/{rung}" for rung in [*rungs, *sorted(others)]]
    return ids


def resolve_id(name: str, library: Path = LIBRARY) -> str:
    """Turn what a person typed into a recipe id: `family/rung`, or a bare family for its default rung.

    What only was adopted is `family/rung@label`; the library goes before. Raises UsageProblem with the nearest names.
    """
    if name in families(library):
        return f"{name}/{load_ladder(name, library).default}"
    known = recipe_ids(library)
    if name in known:
        return name
    found = find_adopted(name) if library == LIBRARY else None
    if found:
        return found.reference
    raise UsageProblem(unknown("recipe", name, [*known, *families(library)]))


def load_recipe(name: str, library: Path = LIBRARY, own: OwnSite | None = None) -> Loaded:
    """Load a recipe by id or family, following `extends`; one of the library with what this machine's site says.

    `own` is that; by default it is read. Raises UsageProblem naming file, line and key for anything wrong, SiteProblem
    where the site is.
    """
    recipe_id = resolve_id(name, library)
    if "@" in recipe_id:
        return load_adopted(find_adopted(recipe_id), own)
    loaded = _load(recipe_id, library, chain=())
    if library != LIBRARY:
        return loaded
    model = loaded.recipe.model
    if model.path:
        unpack_model(loaded.folder, loaded.folder / model.path, model.files)
    recipe, site = at_own_site(loaded.recipe, own)
    return replace(loaded, recipe=recipe, site=site)


def load_adopted(adopted: Adopted, own: OwnSite | None = None) -> Loaded:
    """Load an adopted recipe, with what its own site says and then this machine's, at its lock's commit of the model.

    `own` is this machine's, as `load_recipe` has it. Raises BundleProblem where the recipe was changed since,
    UsageProblem for a site that can't be.
    """
    adopted.require_unchanged()
    record = adopted.record
    loaded = with_options(_load(record.recipe, adopted.library, chain=()), port=adopted.site.port or 0)
    model = loaded.recipe.model
    if model.repo and not model.revision:
        model = model.model_copy(update={"revision": adopted.revision})
        loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"model": model}))
    origin = {"content": record.content, "version": record.version, "signer": record.signer, "label": adopted.label}
    _, ours = at_own_site(loaded.recipe, own)  # what its own site leaves open; its image is the bundle's matter
    site = adopted.site
    site = site.model_copy(update={"gpu": site.gpu or ours.gpu, "cache": site.cache or ours.cache})
    return replace(loaded, site=site, wheels=adopted.wheels, origin=origin)


def _load(recipe_id: str, library: Path, chain: tuple[str, ...]) -> Loaded:
    file = library / f"{recipe_id}.yaml"
    document = read_yaml(file)
    if document.data.get("id") != recipe_id:
        raise UsageProblem(f"{_mark(document, 'id')}: id is {document.data.get('id')!r}, the file says {recipe_id!r}")
    parent_id = document.data.get("extends")
    if parent_id is None:
        recipe = validate(Recipe, document.data, document.marks)
        if recipe.delta:
            raise UsageProblem(f"{_mark(document, 'delta')}: delta without extends: there is nothing to differ from")
        return Loaded(recipe, file.parent, document.marks)
    if parent_id in (*chain, recipe_id):
        loop = " → ".join([*chain, recipe_id, parent_id])
        raise UsageProblem(f"{_mark(document, 'extends')}: extends goes round in a circle: {loop}")
    if parent_id not in recipe_ids(library):
        said = unknown("recipe", str(parent_id), recipe_ids(library))
        raise UsageProblem(f"{_mark(document, 'extends')}: extends: {said}")
    return _extend(document, _load(parent_id, library, (*chain, recipe_id)), file.parent)


def _extend(document: Document, parent: Loaded, folder: Path) -> Loaded:
    inherited = {key: value for key, value in as_data(parent.recipe).items() if key not in OWN_KEYS}
    marks = {path: mark for path, mark in parent.marks.items() if path and path[0] not in OWN_KEYS}
    marks.update(document.marks)
    _refuse_repetition(document, inherited)
    data = _merge(inherited, document.data)
    _unset(data, document)
    recipe = validate(Recipe, data, marks)
    if recipe.delta is None:
        raise UsageProblem(
            f"{Mark(document.file, 1)}: delta: missing; a rung says what it changes, why, and its source"
        )
    found = set(changes(parent.recipe, recipe))
    declared = set(recipe.delta.changes)
    for key in sorted(found - declared):
        mark = nearest_mark(marks, tuple(key.split(".")))
        raise UsageProblem(f"{mark}: {key}: changed, but delta.changes doesn't declare it")
    for key in sorted(declared - found):
        raise UsageProblem(f"{_mark(document, 'delta', 'changes')}: {key}: declared in delta.changes, but not changed")
    own_path = isinstance(document.data.get("model"), dict) and "path" in document.data["model"]
    return Loaded(recipe, folder if own_path else parent.folder, marks)  # a path is below the recipe that names it


def with_options(loaded: Loaded, port: int = 0, boots: int = 0, windows: int = 0) -> Loaded:
    """The same recipe with what a person chose on the command line; 0 leaves the recipe's value.

    Raises UsageProblem for a value the schema doesn't allow.
    """
    parts = {
        "runtime": {"port": port} if port else {},
        "benchmark": {key: value for key, value in (("boots", boots), ("windows", windows)) if value},
    }
    update = {}
    for name, options in parts.items():
        part = getattr(loaded.recipe, name)
        try:
            update[name] = type(part).model_validate({**part.model_dump(), **options})
        except ValidationError as errors:
            first = errors.errors(include_url=False)[0]
            key = first["loc"][0]
            raise UsageProblem(f"--{key} {options[key]}: {first['msg'].lower()}") from None
    return replace(loaded, recipe=loaded.recipe.model_copy(update=update))


def as_data(part: BaseModel) -> dict:
    """A recipe as plain values, under the names the YAML uses."""
    return part.model_dump(by_alias=True)


def changes(before: Recipe, after: Recipe) -> list[str]:
    """The dotted keys in which two recipes differ, beyond their ids, titles, claims and deltas."""
    old, new = dict(leaves(as_data(before))), dict(leaves(as_data(after)))
    differing = (path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
    return sorted(".".join(path) for path in differing if path[0] not in UNCOUNTED and path != ("engine", "unset"))


def leaves(data: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (key path, value) for every value; a flag's or variable's value is one leaf."""
    for key, value in data.items():
        here = (*path, key)
        if isinstance(value, dict) and path not in ATOMIC:
            yield from leaves(value, here)
        else:
            yield here, value


def _refuse_repetition(document: Document, inherited: dict) -> None:
    known = dict(leaves(inherited))
    for path, value in leaves(document.data):
        if path[0] not in OWN_KEYS and path in known and known[path] == value and value != []:
            shown_value = json.dumps(value)
            raise UsageProblem(
                f"{_mark(document, *path)}: {'.'.join(path)}: set to its inherited value {shown_value}; remove it"
            )


def _merge(base: dict, over: dict, path: tuple[str, ...] = ()) -> dict:
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict) and path not in ATOMIC
        merged[key] = _merge(base[key], value, (*path, key)) if nested else value
    return merged


def _unset(data: dict, document: Document) -> None:
    engine = data["engine"]
    if not isinstance(engine, dict) or not isinstance(engine.get("unset", []), list):
        return  # validation says it better
    for index, name in enumerate(engine.get("unset", [])):
        if not isinstance(name, str) or not all(isinstance(engine.get(part), dict) for part in ("flags", "env")):
            return  # validation says it better
        holder = next((engine[part] for part in ("flags", "env") if name in engine.get(part, {})), None)
        if holder is None:
            known = [*engine.get("flags", {}), *engine.get("env", {})]
            raise UsageProblem(f"{_mark(document, 'engine', 'unset', index)}: {unknown('inherited name', name, known)}")
        del holder[name]
    engine["unset"] = []


def _mark(document: Document, *path: str | int) -> Mark:
    return nearest_mark(document.marks, path)


def unknown(kind: str, name: str, known: list[str]) -> str:
    """What is said of a name that isn't there: the ones that resemble it, else all there are."""
    close = nearest(name, known)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(known) or 'none'}"
    return f"unknown {kind} {name!r}; {hint}"


def first_choice(slug: str, library: Path = LIBRARY) -> tuple[str, str]:
    """Pick the recipe for a machine: (recipe id, reason). The family made for it, else the embedded one."""
    ladders = [load_ladder(family, library) for family in families(library)]
    made_for = [ladder for ladder in ladders if slug in ladder.machines]
    if made_for:
        return f"{made_for[0].family}/{made_for[0].default}", f"made for {slug}"
    anywhere = next((ladder for ladder in ladders if "any" in ladder.machines), None)
    if anywhere is None:
        raise UsageProblem(f"{library} has no family for any machine: no ladder.yaml says `machines: [any]`")
    reason = f"this machine is {slug}, no recipe is made for it, so the embedded family that runs anywhere"
    return f"{anywhere.family}/{anywhere.default}", reason
