"""Room recipes: what this machine's owner says of it, once: the GPU, the cache, confirmed models, accepted images.

It lies in the user's state, and every task about a recipe of the library reads it. Nothing in it changes what is
measured but the model's commit, which is recorded in every run and lock.
"""

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from pydantic import Field

from images.console import emit_json, note, out, table
from images.declaration import Digest, Repository
from images.errors import SiteProblem, UsageProblem
from images.index import state_root
from images.validate import validate
from images.yaml_source import Mark, read_yaml, shown
from recipes.adopted import SITE, Folder, Site, Uuid
from recipes.schema import Part, Recipe, Revision, Text

ALL = "all"  # what is said of the machine, whole


class OwnSite(Part):
    """site.yaml of this machine."""

    gpu: Uuid | None = Field(default=None, description="UUID of the one GPU, where several fit")
    cache: Folder | None = Field(default=None, description="host folder of weights and compiled kernels: /cache inside")
    mirrors: list[Repository] = Field(default=[], description="repositories to ask for an engine's image first")
    images: dict[Text, Digest] = Field(default={}, description="engine → id of the image accepted for it here")
    revisions: dict[Text, Revision] = Field(default={}, description="model's repository → the commit you confirmed")


def site_file() -> Path:
    """Where it lies."""
    return state_root() / SITE


def own_site() -> OwnSite:
    """What was said so far; nothing where there is no file. Raises SiteProblem naming file, key and the ways out."""
    file = site_file()
    if not os.path.lexists(file):
        return OwnSite()
    try:
        document = read_yaml(file)
        return validate(OwnSite, document.data, document.marks)
    except UsageProblem as problem:
        raise SiteProblem(_broken(file, str(problem))) from None


def _broken(file: Path, found: str) -> str:
    lines = "\n".join(f"  {line}" for line in found.splitlines())
    if file.is_dir():  # nothing of ours is in a folder: whose it is, we can't know
        return f"The site.yaml of this machine is broken, no recipe is:\n{lines}\nMove that folder away."
    return (
        f"The site.yaml of this machine is broken, no recipe is:\n{lines}\n"
        f"Mend the file, or forget all that was said in it: ./inv site --forget {ALL}"
    )


def site_for_a_look() -> OwnSite:
    """What was said so far, for a task that only looks at recipes: of a file that is broken nothing, and a note."""
    try:
        return own_site()
    except SiteProblem as problem:
        note(f"✘ {problem}\nUntil then recipes are shown as the library has them.")
        return OwnSite()


def keep_site(changed: Callable[[dict], None], anew: bool = False) -> OwnSite:
    """Change what is said, or, `anew`, say it in place of all that was; returns it as it is now.

    Raises UsageProblem for a value that can't be, SiteProblem where what was said can't be read.
    """
    file = site_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_name(f"{file.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two at once: neither undoes what the other says
            data = (OwnSite() if anew else own_site()).model_dump()
            changed(data)
            site = validate(OwnSite, data, {(): Mark(Path("site"), 1)})
            said = {key: value for key, value in site.model_dump().items() if value}
            partial = file.with_name(f"{file.name}.partial")
            partial.unlink(missing_ok=True)  # left by a killed one, or a link that leads elsewhere
            partial.write_text(yaml.safe_dump(said, sort_keys=True), encoding="utf-8")
            partial.replace(file)
    except OSError as error:
        raise UsageProblem(f"{shown(file)}: can't be written: {error.strerror}") from error
    return site


def at_own_site(recipe: Recipe, own: OwnSite | None = None) -> tuple[Recipe, Site]:
    """A recipe of the library as it is used on this machine: at the confirmed commit of its model; and its site.

    `own` is what is said of the machine; by default it is read. Raises SiteProblem where it can't be.
    """
    own, model = own or own_site(), recipe.model
    confirmed = own.revisions.get(model.repo or "")
    if confirmed and not model.revision:
        recipe = recipe.model_copy(update={"model": model.model_copy(update={"revision": confirmed})})
    image = own.images.get(recipe.engine.image)
    return recipe, Site(gpu=own.gpu, cache=own.cache, image=image, mirrors=own.mirrors)


def accept_image(engine: str, image_id: str) -> None:
    """From now on recipes of an engine run in this image here."""
    keep_site(lambda data: data["images"].update({engine: image_id}))


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
    """

    def change(data: dict) -> None:
        for name in forget:
            if name != ALL:
                _forget(data, name)
        data.update({key: value for key, value in (("gpu", gpu), ("cache", cache)) if value})
        data["mirrors"] += [mirror for mirror in mirrors if mirror not in data["mirrors"]]
        data["images"] |= dict(_pair("image", text) for text in images)
        data["revisions"] |= dict(_pair("model-revision", text) for text in revisions)

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
    part, _, key = name.partition(".")
    holder = data.get(part)
    if not holder or (key and (not isinstance(holder, dict) or key not in holder)):
        raise UsageProblem(f"--forget {name}: nothing is said of it; ./inv site shows what is")
    if key:
        del holder[key]
    else:
        data[part] = type(holder)() if isinstance(holder, dict | list) else None
