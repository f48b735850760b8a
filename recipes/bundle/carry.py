"""Room recipes: the engine that a bundle carries: wheels for a host without a network, an image, compiled kernels."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from images.archive import read_archive
from images.declaration import MACHINES, declaration
from images.engine import engine_identity
from images.errors import BundleProblem, UsageProblem
from images.staging import workspace
from images.transport import save_image
from images.wheels import ensure_control_wheels, ensure_wheels, platform_tags
from images.yaml_source import shown
from recipes.bundle.layout import CarriedCaches, CarriedImage, CarriedWheels
from recipes.bundle.write import Carried
from recipes.load import Loaded
from recipes.machine import machine_facts
from recipes.serving import platform_of

ARCHIVE = "engine/image.oci.tar"
LONGEST_NAME = 100  # of the last part of a path, in a plain tar
DEVICE = re.compile(r"cpu|sm_[0-9]{2,3}[a-z]?")


@contextmanager
def carried_engine(
    loaded: Loaded, wheels: bool, image: str | None, caches: Path | None, platform: str | None
) -> Iterator[Carried]:
    """What a bundle carries of the engine, as files; what was made for it is gone after the `with` block.

    Raises UsageProblem where the engine has no such form, EngineProblem or ImageProblem where it can't be had.
    """
    platform = platform or platform_of(machine_facts())
    if platform not in MACHINES.values():
        raise UsageProblem(f"--platform {platform}: wanted one of {', '.join(MACHINES.values())}")
    files: dict[str, Path] = {}
    named = _wheels(loaded, platform, files) if wheels else None
    kernels = _caches(loaded, caches, platform, files) if caches else ()
    with workspace() as folder:
        archive = _archive(image, folder, platform, files) if image else None
        yield Carried(files=files, wheels=named, archive=archive, caches=kernels)


def _wheels(loaded: Loaded, platform: str, files: dict[str, Path]) -> CarriedWheels:
    name = loaded.recipe.engine.image
    facts = declaration(name)
    if facts.disk_gb is None:
        raise UsageProblem(f"the {name} engine runs in a container only: carry its image, --with-image NAME")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    engine = ensure_wheels(name, platform, python, facts.requires)
    control = ensure_control_wheels(platform, python)
    for part, house in (("wheels", engine), ("control", control)):
        for wheel in sorted(house.folder.glob("*.whl")):
            files[f"engine/{part}/{short_name(wheel.name, platform)}"] = wheel
    machine = next(machine for machine, each in MACHINES.items() if each == platform)
    return CarriedWheels(
        platform=platform, python=python, identity=engine_identity(name, f"cpython-{python.replace('.', '')}", machine)
    )


def short_name(name: str, platform: str) -> str:
    """A wheel's name as a tar's header holds it: of several platform tags the one that most systems take.

    Installers read the tags from the name, and the hash is the content's: the wheel stays the pinned one.
    """
    if len(name) <= LONGEST_NAME:
        return name
    head, _, tags = name.removesuffix(".whl").rpartition("-")
    fitting = [tag for tag in platform_tags(platform) if tag in tags.split(".")]
    return f"{head}-{(fitting or tags.split('.'))[-1]}.whl"


def _archive(image: str, folder: Path, platform: str, files: dict[str, Path]) -> CarriedImage:
    file = folder / "image.oci.tar"
    save_image(image, file, platform)
    found = read_archive(file, platform)
    files[ARCHIVE] = file
    files[f"{ARCHIVE}.sha256"] = file.with_name(f"{file.name}.sha256")
    return CarriedImage(platform=found.platform, image_id=found.image_id)


def _caches(loaded: Loaded, folder: Path, platform: str, files: dict[str, Path]) -> tuple[CarriedCaches, ...]:
    """Compiled kernels: a folder named by the device they are for, sm_90a or cpu, with what the engine keeps below."""
    if not folder.is_dir():
        raise UsageProblem(f"--caches {shown(folder)}: there is no such folder")
    if not DEVICE.fullmatch(folder.name):
        raise UsageProblem(
            f"--caches {shown(folder)}: name the folder by the device its kernels are for, such as sm_90a or cpu"
        )
    found = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file()]
    if any(path.is_symlink() for path in found):
        raise BundleProblem(f"{shown(folder)} holds symbolic links; a bundle holds plain files only")
    for path in found:
        files[f"engine/caches/{folder.name}/{path.relative_to(folder).as_posix()}"] = path
    identity = engine_identity(loaded.recipe.engine.image)
    return (CarriedCaches(platform=platform, identity=identity, device=folder.name),)
