"""Room images: the wheelhouse: every wheel of an image, downloaded by hash for the platform that will run it."""

import hashlib
import os
import shutil
import sys
import time
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import STDOUT, Popen
from subprocess import run as run_process

from images.command import tail
from images.console import stage
from images.declaration import IMAGES, MACHINE_OF, Wheel
from images.engine import build_lock, torch_source
from images.errors import EngineProblem
from images.index import cache_root, uv_command, uv_environment
from images.pins_file import Pin, pins_for, read_pins

CONTROL_PINS = IMAGES.parent / "pins.txt"
DOWNLOADS_AT_ONCE = 4
CHUNK = 1 << 20
# The oldest C library of the bases (bookworm, 2.36) takes every wheel for these.
GLIBC_MINORS = range(36, 4, -1)


@dataclass(frozen=True)
class Wheelhouse:
    """A folder of wheels and the pins they satisfy; `installer` is uv's own pin."""

    folder: Path
    pins: tuple[Pin, ...]
    installer: Pin

    @property
    def pins_text(self) -> str:
        """The pins as a requirements file of this platform."""
        return "\n".join(pin.line for pin in self.pins) + "\n"


def ensure_wheels(
    image: str, platform: str, python: str, requires: str | None, engine: tuple[str, str, Wheel] | None = None
) -> Wheelhouse:
    """Download what is missing and return the wheelhouse of an image; a finished one is used again.

    `engine` (name, version, wheel) replaces a pin by a wheel outside the index.
    Raises EngineProblem when a file can't be had, or isn't the pinned one.
    """
    pins = pins_for(IMAGES / image / "pins.txt", platform, python)
    if engine:
        pins = [pin if pin.name != engine[0] else _replaced(pin, engine) for pin in pins]
    installer = read_pins(CONTROL_PINS)["uv"]
    house = Wheelhouse(_folder([*pins, installer], platform, python), tuple(pins), installer)
    if not (house.folder / "complete").exists():
        with build_lock(house.folder):
            if not (house.folder / "complete").exists():  # another run may have filled it while we waited
                _fill(house, platform, python, _extra_index(requires), engine)
    return house


def ensure_control_wheels(platform: str, python: str) -> Wheelhouse:
    """Download what is missing of ./inv's own environment and return its wheelhouse, as `ensure_wheels` does."""
    pins = pins_for(CONTROL_PINS, platform, python)
    house = Wheelhouse(_folder(pins, platform, python), tuple(pins), next(pin for pin in pins if pin.name == "uv"))
    if not (house.folder / "complete").exists():
        with build_lock(house.folder):
            if not (house.folder / "complete").exists():
                _fill(house, platform, python, [], None)
    return house


def _fill(
    house: Wheelhouse, platform: str, python: str, extra: list[str], engine: tuple[str, str, Wheel] | None
) -> None:
    """Download every wheel of a house; it appears whole, under its name, or not at all."""
    partial = house.folder.with_name(f"{house.folder.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        needed = {pin.name: pin for pin in [*house.pins, house.installer]}.values()
        inside = [pin for pin in needed if not engine or pin.name != engine[0]]
        _download(inside, platform, python, partial, extra)
        if engine:
            fetch_wheel(engine[2], partial)
        shutil.rmtree(house.folder, ignore_errors=True)
        (partial / "complete").write_text("")
        partial.rename(house.folder)
    except OSError as error:
        raise EngineProblem(
            f"the wheels can't be kept in {partial}: {error.strerror}. Free some space and run again."
        ) from error


def _replaced(pin: Pin, engine: tuple[str, str, Wheel]) -> Pin:
    name, version, wheel = engine
    line = f"{name}=={version} \\\n    --hash=sha256:{wheel.sha256}"
    return Pin(pin.name, version, frozenset({wheel.sha256}), line)


def _folder(pins: Sequence[Pin], platform: str, python: str) -> Path:
    digest = hashlib.sha256(f"{platform} {python}\n".encode())
    for pin in pins:
        digest.update(pin.line.encode())
    return cache_root() / "wheels" / digest.hexdigest()[:16]


def _extra_index(requires: str | None) -> list[str]:
    """PyTorch's CPU index as an option for pip, where the configured index lacks the CPU build."""
    if not requires:
        return []
    environ = uv_environment(os.environ)
    if not torch_source(requires, Path(sys.executable), environ):
        return []
    return ["--extra-index-url", pytorch_index()]


def pytorch_index() -> str:
    """The address of PyTorch's CPU index, as uv knows it."""
    asked = [
        *uv_command(),
        "pip",
        "compile",
        "-",
        "--torch-backend",
        "cpu",
        "--emit-index-annotation",
        "--no-deps",
        "-q",
    ]
    answer = run_process(asked, input="torch", capture_output=True, text=True, check=False)
    found = [line.split("from", 1)[1].strip() for line in answer.stdout.splitlines() if "# from" in line]
    if not found:
        raise EngineProblem(f"PyTorch's CPU index could not be asked: {answer.stderr.strip()[:300]}")
    return found[0]


def platform_tags(platform: str) -> list[str]:
    """The wheel tags that a glibc 2.36 system of this platform takes, newest first."""
    machine = MACHINE_OF[platform]
    older = [f"manylinux{name}_{machine}" for name in ("2014", "2010", "1")]
    return [*(f"manylinux_2_{minor}_{machine}" for minor in GLIBC_MINORS), *older, f"linux_{machine}"]


def _download(pins: Sequence[Pin], platform: str, python: str, folder: Path, extra: list[str]) -> None:
    """Run several pip downloads side by side, largest packages first in different ones."""
    tags = [part for tag in platform_tags(platform) for part in ("--platform", tag)]
    argv = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
    ]
    argv += [
        "--implementation",
        "cp",
        "--python-version",
        python,
        *tags,
        "--dest",
        str(folder),
        "--no-cache-dir",
        *extra,
    ]
    logs, processes = [], []
    try:
        for number in range(DOWNLOADS_AT_ONCE):
            part = folder / f"part-{number}.txt"
            part.write_text("\n".join(pin.line for pin in pins[number::DOWNLOADS_AT_ONCE]) + "\n")
            logs.append(folder / f"part-{number}.log")
            with logs[-1].open("wb") as sink:
                processes.append(Popen([*argv, "-r", str(part)], stdout=sink, stderr=STDOUT))
        with stage(f"downloading {len(pins)} wheels for {platform}, Python {python}, by hash") as update:
            while any(process.poll() is None for process in processes):
                done = len(list(folder.glob("*.whl")))
                update(f"{done}/{len(pins)}", done, len(pins))
                time.sleep(0.3)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    for process, log in zip(processes, logs, strict=True):
        if process.returncode:
            raise EngineProblem(explain(tail(log)))
    for leftover in [*folder.glob("part-*")]:
        leftover.unlink()


def explain(said: str) -> str:
    """pip's last words, and what to do about them."""
    lower = said.lower()
    if "do not match the hashes" in lower:
        remedy = "a downloaded wheel is not the pinned one: the index serves altered files. Nothing was built"
    elif "no matching distribution" in lower:
        remedy = "the package index lacks a pinned wheel for this platform: check pip's index settings"
    elif "no space left" in lower:
        remedy = "the disk is full: free some space, or set STATION_RECIPES_CACHE to a larger disk"
    else:
        remedy = "the package index could not be used: check the network and pip's index settings"
    return f"{said}\n\nThe wheels could not be downloaded: {remedy}."


def fetch_wheel(wheel: Wheel, folder: Path, progress: Callable[[str], None] = lambda _: None) -> Path:
    """Download one wheel by its address and check its sha256.

    Raises EngineProblem when it can't be had, or is another file.
    """
    name = wheel.url.rsplit("/", 1)[1]
    target, partial = folder / name, folder / f"{name}.partial"
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(wheel.url, timeout=60) as source, partial.open("wb") as sink:  # noqa: S310
            while block := source.read(CHUNK):
                digest.update(block)
                sink.write(block)
                progress(f"{sink.tell() / 1e6:.0f} MB")
    except (OSError, ValueError) as error:
        partial.unlink(missing_ok=True)
        raise EngineProblem(f"{wheel.url}: can't be downloaded: {error}") from error
    if digest.hexdigest() != wheel.sha256:
        with suppress(OSError):
            partial.unlink()
        raise EngineProblem(
            f"{wheel.url}: sha256 {digest.hexdigest()}, wanted {wheel.sha256}: not the declared "
            "wheel; it was thrown away"
        )
    partial.rename(target)
    return target


def entry_points(house: Wheelhouse, module: str, version: str) -> str:
    """The entry_points.txt inside a wheel of the house.

    Raises EngineProblem when no such wheel is there.
    """
    found = sorted(house.folder.glob(f"{module}-{version}-*.whl"))
    if not found:
        raise EngineProblem(f"no wheel {module}-{version} in {house.folder}")
    with zipfile.ZipFile(found[0]) as packed:
        return packed.read(f"{module}-{version}.dist-info/entry_points.txt").decode()
