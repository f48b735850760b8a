"""Room images: what an image.yaml declares: which engine, from which sources, on which platforms."""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from images.errors import UsageProblem, nearest
from images.validate import validate
from images.yaml_source import read_yaml

IMAGES = Path(__file__).parent
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Repository = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)+$")]
PackageName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9+.-]*$")]
Platform = Literal["linux/amd64", "linux/arm64"]
# A platform's name in an image index, by what `uname -m` says; and back.
MACHINES: dict[str, Platform] = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
MACHINE_OF = {platform: machine for machine, platform in MACHINES.items()}
# The Python that each base's own packages bring.
PYTHON_OF = {"bookworm": "3.11", "noble": "3.12", "trixie": "3.13"}


class Part(BaseModel):
    """A part of an image.yaml: unknown keys are errors, values don't change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Patch(Part):
    """A declared change to the engine: a vLLM plugin, and why it is needed."""

    file: Text
    reason: Text


class PulledPlatform(Part):
    """The upstream image of one platform."""

    digest: Digest | None = Field(description="of the platform's own manifest; null while nobody has confirmed it")
    verified: Text


class Pull(Part):
    """Source `pull`: the upstream image by digest, from the first repository that answers."""

    commit: Commit | None = Field(description="the engine's full commit; null while it is unknown")
    repositories: list[Repository] = Field(min_length=1, description="upstream first, then mirrors, in order")
    platforms: dict[Platform, PulledPlatform]
    how_to_find: Text = Field(description="how a person finds the digest and the commit; part of the error")


class Wheel(Part):
    """A wheel outside the package index: the engine of one commit."""

    url: Text
    sha256: Hex64


class Base(Part):
    """What the image is built on: a Debian root made here, or any image named by digest."""

    suite: Literal["bookworm", "noble", "trixie"]
    image: Annotated[str, StringConstraints(pattern=r"^\S+@sha256:[0-9a-f]{64}$")] | None = None

    @property
    def python(self) -> str:
        """The version of the base's own Python."""
        return PYTHON_OF[self.suite]


class BuiltPlatform(Part):
    """One platform that can be built."""

    verified: Text


class Build(Part):
    """Source `build`: a base, and hash-pinned wheels on it."""

    release: Text | None = Field(default=None, description="the engine's release, pinned in pins.txt")
    commit: Commit | None = Field(default=None, description="or its full commit; then `wheels` names the files")
    wheels: dict[Platform, Wheel] = {}
    stands_for: Text | None = Field(default=None, description="what this build replaces, and what is not the same")
    base: Base
    packages: list[PackageName] = Field(min_length=1, description="Debian packages of the image")
    uid: int = Field(default=1000, ge=1, description="the user, and group, that the engine runs as")
    cuda_archs: list[Text] = Field(default=[], description="GPU architectures that kernels are compiled for")
    disk_gb: int = Field(ge=1, description="free space that building needs at its peak")
    platforms: dict[Platform, BuiltPlatform]

    @model_validator(mode="after")
    def _one_engine(self) -> Self:
        if (self.release is None) == (self.commit is None):
            raise ValueError("wanted either release or commit")
        missing = [name for name in self.platforms if self.commit and name not in self.wheels]
        if missing:
            raise ValueError(f"a build from a commit needs the wheel (url, sha256) of {', '.join(missing)}")
        return self


class Sources(Part):
    """Where an image can come from. One is never taken silently instead of the other."""

    pull: Pull | None = None
    build: Build | None = None


class Declaration(Part):
    """An image.yaml, whole."""

    schema_: Literal[1] = Field(alias="schema")
    name: Text
    title: Text
    engine: Literal["vllm"]
    version: Text = Field(description="what /version answers in the engine that claims were measured on")
    distribution: Text = Field(description="the Python distribution that holds the engine")
    device: Literal["cpu", "cuda"]
    python: Text
    requires: Text | None = Field(default=None, description="a requirement that may lie on PyTorch's CPU index only")
    disk_gb: int | None = Field(default=None, description="size of the engine as an environment without container")
    patches: list[Patch] = []
    source: Literal["pull", "build"] = Field(description="what `./inv build` takes unless it is told otherwise")
    sources: Sources

    @model_validator(mode="after")
    def _source_is_declared(self) -> Self:
        if getattr(self.sources, self.source) is None:
            raise ValueError(f"source is {self.source}, but sources.{self.source} is missing")
        return self

    @property
    def module(self) -> str:
        """The distribution's name as files are named by it."""
        return self.distribution.replace("-", "_")


def known_images() -> list[str]:
    """The engine images that are declared, by name."""
    return sorted(path.parent.name for path in IMAGES.glob("*/image.yaml"))


@cache
def declaration(name: str) -> Declaration:
    """Read images/<name>/image.yaml.

    Raises UsageProblem if there is no such image or its file is wrong.
    """
    known = known_images()
    if name not in known:
        close = nearest(name, known) or known
        raise UsageProblem(f"no engine image {name!r}: wanted one of {', '.join(close)}")
    document = read_yaml(IMAGES / name / "image.yaml")
    return validate(Declaration, document.data, document.marks)
