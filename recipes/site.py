"""Room recipes: what this machine's owner says of it, once: the GPU, the cache, confirmed models, accepted images.

It lies in the user's state, and every task about a recipe of the library reads it. Nothing in it changes what is
measured but the model's commit, which is recorded in every run and lock.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import yaml
from pydantic import Field

from images.console import note
from images.declaration import Digest, Repository
from images.errors import SiteProblem, UsageProblem
from images.index import state_root
from images.validate import validate
from images.written import write_whole
from images.yaml_source import read_yaml, shown
from recipes.adopted import SITE, Folder, Site, Uuid, from_options
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
            site = from_options(OwnSite, data)
            said = {key: value for key, value in site.model_dump().items() if value}
            write_whole(file, yaml.safe_dump(said, sort_keys=True).encode())
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
