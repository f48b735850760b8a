"""Room recipes: what a bundle is: its files, their names and sizes, and bundle.json, which says what is in it."""

import json
import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from images.errors import BundleProblem
from recipes.schema import RecipeId, Sha256, Text

SCHEMA = 1
# Schemas that were read once: the last commit or release of this repository that reads each.
DROPPED: dict[int, str] = {}
SUMS = "SHA256SUMS"
SIGNATURE = "SHA256SUMS.minisig"
INFO = "bundle.json"
README = "README.md"
LOCK = "lock.json"
CLAIMS = "claims.json"
FIRST = (SUMS, SIGNATURE, INFO)  # in this order, before all others: what a reader decides by
FILES = frozenset({*FIRST, README, LOCK, CLAIMS, "rules.json"})
FOLDERS = frozenset({"recipes", "rendered", "quality", "results", "engine"})

MAX_ENTRIES = 20_000
MAX_NAME = 240
MAX_SMALL = 4 << 20  # bundle.json, SHA256SUMS, lock.json and other files that are read whole
MAX_FILE = (8 << 30) - 1  # what a plain tar header can say
GB = 1_000_000_000
MAX_GB = 2  # all files together, unless the reader is told otherwise
# A part begins with a letter, a digit or _, so no name is hidden, an option, or leads upwards.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@=-]*(?:/[A-Za-z0-9_][A-Za-z0-9._+@=-]*)*")
SUMS_LINE = re.compile(r"([0-9a-f]{64})  (\S+)")
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Version = Annotated[str, StringConstraints(pattern=f"^{VERSION.pattern}$")]
Platform = Annotated[str, StringConstraints(pattern=r"^linux/[a-z0-9]+$")]
ShortText = Annotated[Text, StringConstraints(max_length=1000)]


class Part(BaseModel):
    """A part of bundle.json: unknown keys are errors, values don't change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineNamed(Part):
    """The engine the recipe runs on. `identities`: its identity by platform and Python, as locks name it."""

    image: ShortText
    version: ShortText
    device: Literal["cpu", "cuda"]
    identities: dict[ShortText, ShortText] = {}


class CarriedWheels(Part):
    """The wheels of the engine and of ./inv itself, for one platform and Python."""

    platform: Platform
    python: ShortText
    identity: ShortText


class CarriedImage(Part):
    """The engine's image as an OCI archive."""

    platform: Platform
    image_id: ShortText


class CarriedCaches(Part):
    """Compiled kernels: of one engine and version, one platform, one kind of device, such as sm_103a."""

    platform: Platform
    engine: ShortText
    device: Annotated[str, StringConstraints(pattern=r"^(cpu|sm_[0-9]{2,3}[a-f]?)$")]


class CarriedRun(Part):
    """A run in results/, with what its verdict was when it was bundled."""

    name: ShortText
    machine: ShortText
    state: ShortText


class BundleInfo(Part):
    """bundle.json: what a bundle says of itself. Everything in it is checked again where it is adopted."""

    schema_: Literal[1] = Field(alias="schema")
    recipe: RecipeId
    version: Version
    title: ShortText
    status: Literal["measured", "synthetic"]
    chain: list[RecipeId] = Field(min_length=1, max_length=64, description="from the recipe without parent to this one")
    machines: list[ShortText] = Field(description="machine profiles the family is made for, or [any]")
    engine: EngineNamed
    rules: int = Field(description="version of the table of engine traps that the recipe keeps")
    model: Literal["carried", "named"] = Field(description="its files are inside, or a hub's repository is named")
    lock: bool
    why_no_lock: ShortText | None = None
    image: ShortText | None = Field(description="the image that the rendered files name; null: a placeholder")
    wheels: CarriedWheels | None = None
    archive: CarriedImage | None = None
    caches: list[CarriedCaches] = []
    runs: list[CarriedRun] = []
    ladders: list[ShortText] = []
    signer: ShortText | None = Field(default=None, description="the public key, as minisign writes it")

    @property
    def platform(self) -> str | None:
        """The one platform of the engine it carries; None: it carries none, and is for any."""
        carried = [self.wheels, self.archive, *self.caches]
        return next((each.platform for each in carried if each), None)


def read_info(data: bytes, what: str) -> BundleInfo:
    """Read bundle.json.

    Raises BundleProblem when it is none, or of a schema that this version doesn't read.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BundleProblem(f"{what}: its {INFO} is not JSON")
    require_schema(found.get("schema"), what)
    try:
        return BundleInfo.model_validate(found)
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise BundleProblem(f"{what}: {INFO}: {key}: {first['msg']}") from None


def require_schema(schema: object, what: str) -> None:
    """Raise BundleProblem, naming the version that reads it, for a schema that this one doesn't."""
    if schema == SCHEMA and not isinstance(schema, bool):
        return
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise BundleProblem(f"{what}: {INFO} names no schema: this is no bundle of ours")
    if schema in DROPPED:
        raise BundleProblem(
            f"{what} is a bundle of schema {schema}, which this version reads no more. {DROPPED[schema]} reads it; "
            f"bundle it again with that, or with anything newer"
        )
    raise BundleProblem(
        f"{what} is a bundle of schema {schema}; this version reads schema {SCHEMA}. Update this repository "
        "(git pull): the version that wrote the bundle reads it"
    )


def why_bad_name(name: str) -> str | None:
    """Why a file's name can't stand in a bundle; None for a good one."""
    shown = repr(name[:100])
    if name.startswith("/"):
        return f"{shown} is an absolute path"
    if ".." in name.split("/"):
        return f"{shown} leads out of the folder"
    if len(name) > MAX_NAME or not NAME.fullmatch(name):
        return f"{shown} is no name that a bundle's file has (letters, digits and ._+@=- in parts divided by /)"
    return None


def require_parts(names: Iterable[str], what: str) -> None:
    """Raise BundleProblem for a file that belongs to no part of a bundle of this schema."""
    for name in names:
        if name not in FILES and (name.split("/")[0] not in FOLDERS or "/" not in name):
            raise BundleProblem(f"{what}: {name!r} belongs to no part of a bundle")


def sort_key(name: str) -> tuple[int, str]:
    """The order of a bundle's files."""
    return (FIRST.index(name), "") if name in FIRST else (len(FIRST), name)


def sums_text(digests: dict[str, str]) -> str:
    """SHA256SUMS of a bundle: sha256 by name, in the bundle's order."""
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests, key=sort_key))


def read_sums(data: bytes, what: str) -> dict[str, Sha256]:
    """Read SHA256SUMS: sha256 by name, in the bundle's order.

    Raises BundleProblem for anything that `sums_text` doesn't write, and for names that can't be.
    """
    found: dict[str, str] = {}
    for line in data.decode("utf-8", errors="replace").split("\n")[:-1]:
        match = SUMS_LINE.fullmatch(line)
        if match is None:
            raise BundleProblem(f"{what}: {SUMS} has a line that is no checksum: {line[:100]!r}")
        bad = why_bad_name(match[2])
        if bad or match[2] in {SUMS, SIGNATURE}:
            raise BundleProblem(f"{what}: {bad or f'{SUMS} names itself or its signature'}")
        found[match[2]] = match[1]
    if len(found) > MAX_ENTRIES:
        raise BundleProblem(f"{what}: {len(found)} files, the most a bundle has is {MAX_ENTRIES}")
    if sums_text(found).encode() != data:
        raise BundleProblem(f"{what}: {SUMS} is not as we write it: cut short, out of order, or a name twice")
    if INFO not in found:
        raise BundleProblem(f"{what}: {SUMS} names no {INFO}: this is no bundle of ours")
    refuse_file_as_folder(found, what)
    return found


def refuse_file_as_folder(names: dict[str, str], what: str) -> None:
    """Raise BundleProblem where one name is a file and a folder, or two differ by case alone."""
    lower: set[str] = set()
    for name in names:
        if name.lower() in lower:
            raise BundleProblem(f"{what}: two names differ by case alone: {name!r}")
        lower.add(name.lower())
    for name in lower:
        parts = name.split("/")
        for end in range(1, len(parts)):
            if "/".join(parts[:end]) in lower:
                raise BundleProblem(f"{what}: {'/'.join(parts[:end])!r} is a file and a folder")
