"""Room recipes: saying something of this machine, or taking it back: `./inv site`."""

from collections.abc import Iterable, Iterator, Sequence

from images.console import emit_json, out, table
from images.errors import UsageProblem, nearest
from images.yaml_source import shown
from recipes.load import load_recipe, recipe_ids, unknown
from recipes.schema import Recipe
from recipes.site import ALL, OwnSite, keep_site, own_site, site_file


def change_site(
    gpu: str | None,
    cache: str | None,
    mirrors: Sequence[str],
    images: Sequence[str],
    revisions: Sequence[str],
    forget: Sequence[str],
    as_json: bool,
) -> None:
    """Say something of this machine, or take it back, and print all that is said.

    `images` are ENGINE=ID, `revisions` REPOSITORY=COMMIT, `forget` names of site.yaml such as images.cuda.
    Raises UsageProblem for an engine or a repository that no recipe of the library has: it would change nothing.
    """
    accepted = [_pair("image", text) for text in images]
    confirmed = [_pair("model-revision", text) for text in revisions]
    _require_used(accepted, confirmed)

    def change(data: dict) -> None:
        for name in forget:
            if name != ALL:
                _forget(data, name)
        data.update({key: value for key, value in (("gpu", gpu), ("cache", cache)) if value})
        data["mirrors"] += [mirror for mirror in mirrors if mirror not in data["mirrors"]]
        data["images"] |= dict(accepted)
        data["revisions"] |= dict(confirmed)

    asked = any((gpu, cache, mirrors, images, revisions, forget))
    site = keep_site(change, anew=ALL in forget) if asked else own_site()
    if as_json:
        emit_json({"file": shown(site_file()), **site.model_dump()})
        return
    rows = list(_rows(site))
    if not rows:
        out().print("Nothing is said of this machine: recipes are used as the library has them.", markup=False)
        return
    out().print(table(f"What is said of this machine ({shown(site_file())})", ("what", "value"), rows, whole=80))


def _require_used(accepted: Sequence[tuple[str, str]], confirmed: Sequence[tuple[str, str]]) -> None:
    """Hold what is to be said against the library; an adopted recipe's image and commit came with its bundle."""
    if not accepted and not confirmed:
        return
    library = list(_library())
    engines = sorted({recipe.engine.image for recipe in library})
    open_ones = sorted({recipe.model.repo for recipe in library if recipe.model.repo and not recipe.model.revision})
    for option, kind, said, known in (
        ("image", "engine", accepted, engines),
        ("model-revision", "model's repository", confirmed, open_ones),
    ):
        for name, _ in said:
            if name not in known:
                raise UsageProblem(f"--{option} {name}=…: {unknown(kind, name, known)}")


def _library() -> Iterator[Recipe]:
    """The library's recipes with nothing said of this machine; one that is broken is no matter here."""
    for recipe_id in recipe_ids():
        try:
            yield load_recipe(recipe_id, own=OwnSite()).recipe
        except UsageProblem:
            continue


def _rows(site: OwnSite) -> list[tuple[str, str]]:
    single = [(name, value) for name in ("gpu", "cache") if (value := getattr(site, name))]
    several = [
        (f"{name}.{key}", value) for name in ("images", "revisions") for key, value in getattr(site, name).items()
    ]
    return [*single, *(("mirrors", each) for each in site.mirrors), *several]


def _pair(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        wanted = {"image": "ENGINE=sha256:…", "model-revision": "OWNER/NAME=<40 hex digits>"}[option]
        raise UsageProblem(f"--{option} {text}: wanted {wanted}")
    return key, value


def _forget(data: dict, name: str) -> None:
    part, dot, key = name.partition(".")
    holder = data.get(part)
    if not holder or (dot and (not isinstance(holder, dict | list) or key not in holder)):
        known = list(_names(data))
        close = nearest(name, known)
        hint = f"did you mean {' or '.join(close)}?" if close else "./inv site shows what is"
        raise UsageProblem(f"--forget {name}: nothing is said of it; {hint}")
    if isinstance(holder, list) and dot:
        holder.remove(key)
    elif dot:
        del holder[key]
    else:
        data[part] = type(holder)() if isinstance(holder, dict | list) else None


def _names(data: dict) -> Iterable[str]:
    """All that can be forgotten, by the names that --forget takes."""
    for part, holder in data.items():
        if holder:
            yield part
            yield from (f"{part}.{key}" for key in holder if not isinstance(holder, str))
