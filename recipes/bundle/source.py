"""Room recipes: where a bundle comes from, declared by how it is named: tar, folder, registry or git repository."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from images.errors import UsageProblem
from images.registry import Wire
from images.staging import workspace
from recipes.bundle.git import GIT, bundle_of_git
from recipes.bundle.oci import pull_artifact
from recipes.bundle.read import Limits

OCI = ("docker://", "oci://")


@dataclass(frozen=True)
class Choice:
    """What a person said beside the source: of several bundles or versions which, and how registries are reached."""

    recipe: str | None = None
    version: str | None = None
    ref: str | None = None
    wire: Wire = field(default_factory=Wire)


@contextmanager
def brought(source: str, choice: Choice, limits: Limits) -> Iterator[Path]:
    """The bundle as a tar or a folder on this machine, unchecked; what was fetched is gone after the `with` block.

    Raises UsageProblem for no such source, BundleProblem or ImageProblem where it can't be fetched.
    """
    git, registry = source.startswith(GIT) or source.endswith(".git"), source.startswith(OCI)
    if not git and (choice.recipe or choice.version or choice.ref):
        raise UsageProblem(
            "--recipe, --version and --ref choose a bundle of a git repository; this source is one bundle"
        )
    if git:
        with workspace() as folder:
            yield bundle_of_git(source.removeprefix(GIT), folder, choice.recipe, choice.version, choice.ref, limits)
    elif registry:
        with workspace() as folder:
            yield pull_artifact(source.partition("://")[2], folder / "bundle.tar", choice.wire, limits).file
    elif "://" in source:
        raise UsageProblem(f"{source}: wanted a tar, a folder, docker://HOST/NAME:VERSION, or git+URL")
    else:
        local = Path(source)
        if not local.exists():
            raise UsageProblem(f"{source}: there is no such file or folder")
        yield local
