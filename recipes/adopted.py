"""Room recipes: recipes adopted from other teams: where they lie, and the site overlay that never edits them.

Each is a folder of the user's state, named by a label: the bundle as it came, adopted.json, and site.yaml.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError

from images.declaration import Digest, Repository
from images.errors import BundleProblem, UsageProblem, nearest
from images.index import state_root
from images.validate import validate
from images.yaml_source import Mark, read_yaml, shown
from recipes.schema import Part, RecipeId, Text

LABEL = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")
SITE = "site.yaml"
RECORD = "adopted.json"
BUNDLE = "bundle"
Uuid = Annotated[str, StringConstraints(pattern=r"^(GPU|MIG)-[0-9a-fA-F-]{4,}$")]
Folder = Annotated[str, StringConstraints(pattern=r"^/[^\x00\n]*$")]


class Site(Part):
    """What this machine says of an adopted recipe; nothing here changes what is measured."""

    port: int | None = Field(default=None, ge=1024, le=65535, description="port on 127.0.0.1 instead of the recipe's")
    gpu: Uuid | None = Field(default=None, description="UUID of the one GPU, where several fit")
    cache: Folder | None = Field(default=None, description="host folder that rendered files mount as the cache")
    image: Digest | None = Field(default=None, description="id of the engine's image in this machine's Docker engine")
    mirrors: list[Repository] = Field(default=[], description="repositories to ask for the engine's image first")


# How each value of a site is given on a command line: by which option, and what that wants.
OPTIONS = {
    "port": ("--port", "a port from 1024 to 65535"),
    "gpu": ("--gpu", "the UUID of a GPU, GPU-…, as nvidia-smi -L tells it"),
    "cache": ("--cache", "an absolute folder, /…"),
    "mirrors": ("--mirror", "a registry's repository, HOST/NAME in small letters, without a tag"),
    "images": ("--image", "ENGINE=sha256:… with 64 hex digits"),
    "revisions": ("--model-revision", "OWNER/NAME=… with the commit's 40 hex digits"),
}


def from_options(kind: type[Part], said: dict) -> Any:
    """A site, of whichever kind, as options have it. Raises UsageProblem naming each wrong option and its wish."""
    try:
        return kind.model_validate(said)
    except ValidationError as errors:
        wrong = [(error["loc"], error["input"]) for error in errors.errors(include_url=False)]
    lines = []
    for (key, *inside), value in wrong:
        option, wanted = OPTIONS[str(key)]
        named = f"{inside[0]}=" if inside and isinstance(inside[0], str) else ""
        lines.append(f"{option} {named}{value}: wanted {wanted}")
    raise UsageProblem("\n".join(dict.fromkeys(lines)))


class Record(Part):
    """adopted.json: where a bundle came from, what it was, and by whom it was signed."""

    recipe: RecipeId
    version: Text
    content: Text
    source: Text
    signer: Text | None
    trusted: bool = Field(description="whether the signer is the one that was asked for")


@dataclass(frozen=True)
class Adopted:
    """One adopted recipe."""

    label: str
    folder: Path
    record: Record
    site: Site

    @property
    def reference(self) -> str:
        """How it is named on the command line."""
        return f"{self.record.recipe}@{self.label}"

    @property
    def bundle(self) -> Path:
        """The bundle as it came."""
        return self.folder / BUNDLE

    @property
    def library(self) -> Path:
        """The bundle's recipes, laid out as the library is."""
        return self.bundle / "recipes"

    @property
    def wheels(self) -> Path | None:
        """The engine's wheels, where the bundle carries them."""
        folder = self.bundle / "engine" / "wheels"
        return folder if folder.is_dir() else None

    @cached_property
    def info(self) -> dict:
        """bundle.json."""
        return json.loads((self.bundle / "bundle.json").read_text(encoding="utf-8"))

    @cached_property
    def revision(self) -> str | None:
        """The commit of the model's repository that was confirmed when the recipe was locked, if it was."""
        file = self.bundle / "lock.json"
        if not file.is_file():
            return None
        return json.loads(file.read_text(encoding="utf-8"))["model"]["revision"]

    def require_unchanged(self) -> None:
        """Raise BundleProblem where a file of the recipe isn't what was adopted any more; big files aren't read.

        The model's own files are hashed by every run.
        """
        try:
            sums = (self.bundle / "SHA256SUMS").read_bytes()
            lines = [line.partition("  ") for line in sums.decode().splitlines()]
            digests = {name: digest for digest, _, name in lines}
            changed = hashlib.sha256(sums).hexdigest() != self.record.content
            files = [*sorted(self.library.glob("*/*.yaml")), *self.bundle.glob("lock.json")]
            for file in files:
                name = file.relative_to(self.bundle).as_posix()
                changed = changed or hashlib.sha256(file.read_bytes()).hexdigest() != digests.get(name)
        except (OSError, UnicodeDecodeError):
            changed = True
        if changed:
            raise BundleProblem(
                f"{self.reference} was changed since it was adopted: {shown(self.folder)}. Remove that folder and "
                f"adopt it again (it came from {self.record.source}); what a site may change stands in {SITE}"
            )


def adopted_root() -> Path:
    """The folder that holds every adopted recipe."""
    return state_root() / "adopted"


def adopted() -> list[Adopted]:
    """Every adopted recipe, by label. Raises UsageProblem for a record or an overlay that is wrong."""
    folders = sorted(adopted_root().glob("*/" + RECORD))
    return [read_adopted(file.parent) for file in folders if LABEL.fullmatch(file.parent.name)]


def read_adopted(folder: Path) -> Adopted:
    """Read one. Raises UsageProblem naming file and key for a record or an overlay that is wrong."""
    file = folder / RECORD
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageProblem(f"{shown(file)}: can't be read: {error}. Remove {shown(folder)} and adopt again") from None
    site = read_yaml(folder / SITE)
    return Adopted(
        folder.name, folder, validate(Record, record, {(): Mark(file, 1)}), validate(Site, site.data, site.marks)
    )


def find_adopted(name: str) -> Adopted | None:
    """The adopted recipe that `family/rung@label` names, or `family/rung` where one alone is called so; else None.

    Raises UsageProblem for an unknown label, and for a name that several have.
    """
    recipe, at, label = name.partition("@")
    there = adopted()
    if not at:
        called = [each for each in there if name in {each.record.recipe, each.record.recipe.split("/")[0]}]
        if len(called) > 1:
            known = ", ".join(each.reference for each in called)
            raise UsageProblem(f"{name} was adopted more than once: name one of {known}")
        return called[0] if called else None
    for each in there:
        if each.label == label and recipe in {each.record.recipe, each.record.recipe.split("/")[0]}:
            return each
    known = [each.reference for each in there]
    close = nearest(name, known) or known
    hint = f"there is: {', '.join(close)}" if close else "nothing was adopted yet: ./inv adopt SOURCE"
    raise UsageProblem(f"no adopted recipe {name!r}; {hint}")
