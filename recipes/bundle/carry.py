"""Room recipes: the engine that a bundle carries: wheels for a host without a network, an image, compiled kernels."""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from images.archive import read_archive
from images.console import note
from images.declaration import MACHINE_OF, declaration
from images.engine import Engine, engine_identity
from images.errors import BundleProblem, UsageProblem
from images.staging import workspace
from images.transport import save_image
from images.wheels import ensure_control_wheels, ensure_wheels, platform_tags
from images.yaml_source import shown
from recipes.bundle.layout import CarriedCaches, CarriedImage, CarriedWheels, why_bad_name
from recipes.bundle.write import Carried
from recipes.load import Loaded
from recipes.machine import machine_facts
from recipes.run.jit import FOLDERS, cache_home
from recipes.serving import platform_of
from recipes.spec import HOST_CACHE

ARCHIVE = "engine/image.oci.tar"
LONGEST_NAME = 100  # of the last part of a path, in a plain tar
KERNELS = tuple(FOLDERS.values())  # what engines compile and tune; downloads and homes are not among them
DEVICE = re.compile(r"cpu|sm_[0-9]{2,3}[a-f]?")


@contextmanager
def carried_engine(
    loaded: Loaded, wheels: bool, image: str | None, caches: str | None, platform: str | None
) -> Iterator[Carried]:
    """What a bundle carries of the engine, as files; what was made for it is gone after the `with` block.

    Raises UsageProblem where the engine has no such form, EngineProblem or ImageProblem where it can't be had.
    """
    platform = platform or platform_of(machine_facts())
    if platform not in MACHINE_OF:
        raise UsageProblem(f"--platform {platform}: wanted one of {', '.join(MACHINE_OF)}")
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
    identity = engine_identity(name, f"cpython-{python.replace('.', '')}", MACHINE_OF[platform])
    return CarriedWheels(platform=platform, python=python, identity=identity)


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


def _caches(loaded: Loaded, text: str, platform: str, files: dict[str, Path]) -> tuple[CarriedCaches, ...]:
    """Compiled kernels as DEVICE=FOLDER, or DEVICE for what this machine's engine keeps as a process."""
    device, given, name = text.partition("=")
    folder = Path(name) if given else own_kernels(loaded)
    if not DEVICE.fullmatch(device) or (given and not name):
        raise UsageProblem(f"--caches {text}: wanted DEVICE or DEVICE=FOLDER, such as sm_103a={HOST_CACHE}")
    here = machine_facts()
    if not given and not _fits(device, here):
        raise UsageProblem(
            f"--caches {text}: this machine's own kernels are for {', '.join(sorted(kernel_device(here)))}. Others are "
            "carried from a folder: DEVICE=FOLDER"
        )
    if not folder.is_dir():
        raise UsageProblem(f"--caches {text}: there is no folder {shown(folder)}")
    left_out, before = 0, len(files)
    for part in KERNELS:
        for path in sorted((folder / part).rglob("*")):
            inside = f"engine/caches/{device}/{path.relative_to(folder).as_posix()}"
            if path.is_symlink() or (path.is_file() and why_bad_name(inside)):
                left_out += 1
            elif path.is_file():
                files[inside] = path
    if len(files) == before:
        raise UsageProblem(f"--caches {text}: {shown(folder)} has no kernels: none of {', '.join(KERNELS)} in it")
    if left_out:
        note(
            f"{left_out} files of {shown(folder)} are left out: links, locks, hidden ones. The engine makes them anew."
        )
    engine = loaded.recipe.engine
    return (CarriedCaches(platform=platform, engine=f"{engine.image} {engine.version}", device=device),)


def own_kernels(loaded: Loaded) -> Path:
    """Where the recipe's engine keeps its kernels on this machine when it runs as a process."""
    engine = loaded.recipe.engine
    return cache_home(Engine(engine.image, engine.version, Path(), engine_identity(engine.image)))


def kernel_device(facts: dict) -> set[str]:
    """The devices of a machine as kernels are compiled for them: cpu, and sm_103 of a compute capability 10.3."""
    told = [str(gpu.get("compute_capability") or "") for gpu in facts["gpus"]]
    return {"cpu", *(f"sm_{each.replace('.', '')}" for each in told if each)}


def fits_kernels(caches: CarriedCaches, facts: dict) -> bool:
    """Whether kernels are for a device of this machine; sm_103a are those of sm_103."""
    return _fits(caches.device, facts)


def _fits(device: str, facts: dict) -> bool:
    return device.rstrip("abcdef") in kernel_device(facts) or device in kernel_device(facts)


def place_caches(bundle: Path, caches: Sequence[CarriedCaches], into: Path, uid: int, facts: dict) -> int:
    """Copy carried kernels of this machine's devices to an engine's cache folder; returns how many files.

    What is there stays, and stays whose it is. What is placed belongs to the engine's user where we may give it away;
    root then follows no link, since whoever may write there could lead it anywhere. Raises BundleProblem for a link.
    """
    fitting = [bundle / "engine" / "caches" / each.device for each in caches if fits_kernels(each, facts)]
    files = [(file, file.relative_to(source)) for source in fitting for file in sorted(source.rglob("*"))]
    files = [(file, inside) for file, inside in files if file.is_file()]
    if not files:
        return 0
    owner = uid if os.geteuid() == 0 else None
    top = _top(into, owner)
    try:
        return sum(_place(file, inside, top, into, owner) for file, inside in files)
    finally:
        os.close(top)


def _top(into: Path, owner: int | None) -> int:
    """The cache folder, open; made where it is missing, and then given to its owner."""
    into.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        into.mkdir()
        if owner is not None:
            os.chown(into, owner, owner, follow_symlinks=False)
    return os.open(into, os.O_RDONLY | os.O_DIRECTORY)


def _place(file: Path, inside: Path, top: int, into: Path, owner: int | None) -> bool:
    """Copy one file below an open folder, unless something of its name is there: even a link that leads nowhere."""
    folder = os.dup(top)
    try:
        for part in inside.parts[:-1]:
            below = _folder(part, folder, into / inside.parent, owner)
            os.close(folder)
            folder = below
        try:
            placed = os.open(inside.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
        except FileExistsError:
            return False
        try:
            with open(placed, "wb") as target, file.open("rb") as source:
                _give(placed, owner)
                shutil.copyfileobj(source, target)
        except BaseException:  # half a kernel would stay for good
            os.unlink(inside.name, dir_fd=folder)
            raise
        return True
    finally:
        os.close(folder)


def _folder(name: str, above: int, path: Path, owner: int | None) -> int:
    """A folder below an open one, open; made where it is missing, and then given to its owner."""
    made = False
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=above)
        made = True
    try:
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | (0 if owner is None else os.O_NOFOLLOW), dir_fd=above)
    except (NotADirectoryError, FileNotFoundError):
        raise BundleProblem(
            f"{shown(path)}: {name} is a link or a file, and kernels are put into folders only. Move it away, or name "
            "another folder with --cache"
        ) from None
    if made:
        _give(folder, owner)
    return folder


def _give(opened: int, owner: int | None) -> None:
    if owner is not None:
        os.fchown(opened, owner, owner)
