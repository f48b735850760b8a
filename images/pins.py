"""Room images: pins: resolve what was asked for into exact files, and say whether pins still answer what is asked.

A pin set is a pins.txt and its inputs. Resolving needs the package index, checking needs nothing. Where an image
declares its Pythons, only the wheels that its platforms can take are kept, and a pin that is no wheel on one of
them is an error here, not in the middle of a build on another machine.
"""

import hashlib
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from images.command import run_shown, tail
from images.console import emit_json, out
from images.declaration import IMAGES, PYTHON_OF, declaration
from images.errors import EngineProblem, UsageProblem
from images.index import uv_command, uv_environment
from images.pins_file import Pin, entries, environment_of, normalised
from images.wheels import platform_tags

OLDEST_PYTHON = "3.11"
RECORDED = re.compile(r"^# inputs sha256: ([0-9a-f]{64})$", re.M)


@dataclass(frozen=True)
class PinSet:
    """A pins.txt and what it is resolved from.

    `inputs` begins with the requirements (requirements.in, or a pyproject.toml); a second file has overrides.
    `pythons` and `platforms` are where the pins are installed; none: every file of the index is kept.
    """

    name: str
    pins: Path
    inputs: tuple[Path, ...]
    options: tuple[str, ...] = ()
    pythons: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where wheels are installed: a base's Python on a platform; its tags, and what markers see there."""

    python: str
    platform: str
    tags: frozenset[Tag]
    markers: dict[str, str]

    def __str__(self) -> str:
        return f"{self.platform} with Python {self.python}"


def pin_sets() -> dict[str, PinSet]:
    """The project's pin sets by name: the control plane's, and each engine image's."""
    root = IMAGES.parent
    control = PinSet("control", root / "pins.txt", (root / "pyproject.toml",), ("--group", "dev"))
    cpu = PinSet("cpu", IMAGES / "cpu/pins.txt", _inputs("cpu"), ("--torch-backend", "cpu"))
    facts = declaration("cuda")
    pythons = sorted(SpecifierSet(facts.python).filter(PYTHON_OF.values()))
    platforms = tuple(sorted(facts.sources.build.platforms))
    cuda = PinSet("cuda", IMAGES / "cuda/pins.txt", _inputs("cuda"), (), tuple(pythons), platforms)
    return {each.name: each for each in (control, cpu, cuda)}


def _inputs(image: str) -> tuple[Path, ...]:
    return (IMAGES / image / "requirements.in", IMAGES / image / "overrides.txt")


def chosen_sets(name: str | None) -> list[PinSet]:
    """The pin set of that name, or all. Raises UsageProblem for a wrong name."""
    known = pin_sets()
    if name and name not in known:
        raise UsageProblem(f"no pins are called {name!r}: wanted one of {', '.join(known)}")
    return [known[name]] if name else list(known.values())


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """A requirement file's lines with their first line's number, joined at backslashes, without comments."""
    held, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        start = start if held else number
        held += re.sub(r"(^|\s)#.*", "", line).rstrip()
        if held.endswith("\\"):
            held = held[:-1]
        elif held.strip():
            yield start, held.strip()
            held = ""
    if held.strip():
        yield start, held.strip()


def asked(file: Path, options: Iterable[str] = ()) -> list[str]:
    """What one input asks for, as plain requirement lines: comments and order don't matter to pins."""
    if file.name != "pyproject.toml":
        return sorted(line for _, line in _logical_lines(file.read_text()))
    data = tomllib.loads(file.read_text())
    groups = data.get("dependency-groups", {}) if "--group" in options else {}
    return sorted([*data["project"]["dependencies"], *(line for group in groups.values() for line in group)])


def inputs_digest(pins: PinSet) -> str:
    """The sha256 over what a pin set's inputs ask for; pins.txt records it."""
    text = "\n".join("\n".join([file.name, *asked(file, pins.options)]) for file in pins.inputs)
    return hashlib.sha256(text.encode()).hexdigest()


def faults(pins: PinSet) -> list[str]:
    """Why a pins.txt does not answer its inputs; empty where it does. Needs no network.

    Raises UsageProblem when a file can't be read as requirements.
    """
    by_name: dict[str, list[Pin]] = {}
    try:
        for pin in entries(pins.pins):
            by_name.setdefault(pin.name, []).append(pin)
    except EngineProblem as problem:
        return [str(problem)]
    wrong = []
    for line in asked(pins.inputs[0], pins.options):
        wanted = Requirement(line)
        given = by_name.get(normalised(wanted.name), [])
        if not given:
            wrong.append(f"{line}: no pin answers it")
        wrong += [
            f"{line}: {pin.version} is pinned"
            for pin in given
            if not wanted.specifier.contains(pin.version, prereleases=True)
        ]
    for line in (line for file in pins.inputs[1:] for line in asked(file)):
        dropped = Requirement(line)
        if dropped.marker and not dropped.marker.evaluate() and normalised(dropped.name) in by_name:
            wrong.append(f"{dropped.name}: pinned, although {pins.inputs[1].name} drops it")
    recorded = RECORDED.search(pins.pins.read_text())
    if recorded and recorded[1] != inputs_digest(pins):
        wrong.append(f"{' and '.join(file.name for file in pins.inputs)} changed since the pins were resolved")
    return wrong


def check_pins(sets: list[PinSet], as_json: bool) -> int:
    """Print whether each pin set answers its inputs; returns the exit code, 1 where one does not."""
    found = {pins.name: faults(pins) for pins in sets}
    if as_json:
        emit_json(found)
    for pins in sets if not as_json else []:
        for fault in found[pins.name]:
            out().print(f"✘ {pins.name}: {fault}")
        if not found[pins.name]:
            out().print(f"✔ {pins.name}: {len(list(entries(pins.pins)))} pins answer what is asked for")
    if any(found.values()) and not as_json:
        out().print("`./inv pins --image NAME` resolves pins anew.")
    return int(any(found.values()))


def places(pins: PinSet) -> list[Place]:
    """Every place where a pin set is installed."""
    return [_place(python, platform) for python in pins.pythons for platform in pins.platforms]


def _place(python: str, platform: str) -> Place:
    version, native = tuple(int(part) for part in python.split(".")), platform_tags(platform)
    interpreter = f"cp{version[0]}{version[1]}"
    tags = [*cpython_tags(version, platforms=native), *compatible_tags(version, interpreter, native)]
    return Place(python, platform, frozenset(tags), environment_of(platform, python))


def resolve(pins: PinSet, upgrade: bool = False) -> None:
    """Write a pins.txt anew from the package index; versions that still fit stay, unless `upgrade`.

    Raises EngineProblem when the index can't answer, or has no wheel of a pin for one of the places.
    """
    if not upgrade and not pins.pins.exists():
        pins.pins.touch()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        flat, log = work / "pins.txt", work / "uv.log"
        # Versions are kept, hashes are asked for anew: uv would keep a line's hashes, even where some are missing.
        flat.write_text("" if upgrade else re.sub(r" \\\n\s+--hash=\S+", "", pins.pins.read_text()))
        environ = _index()
        _uv(_resolving(pins, flat), f"resolving the {pins.name} pins", log, pins.inputs[0].parent, environ)
        body = flat.read_text()
        if pins.pythons:
            files = work / "pylock.toml"
            listing = ["pip", "compile", str(flat), "--no-deps", "--universal", "--format", "pylock.toml"]
            listing += ["--python-version", OLDEST_PYTHON, "-o", str(files)]
            _uv(listing, f"listing the {pins.name} files", log, work, environ)
            body = wheel_pins(tomllib.loads(files.read_text())["packages"], places(pins))
    pins.pins.write_text(_header(pins) + body)


def _resolving(pins: PinSet, flat: Path) -> list[str]:
    arguments = ["pip", "compile", pins.inputs[0].name, "--universal", "--python-version", OLDEST_PYTHON]
    for overrides in pins.inputs[1:]:
        arguments += ["--override", overrides.name]
    arguments += ["--no-annotate", "--no-header", *pins.options, "-o", str(flat)]
    return arguments if pins.pythons else [*arguments, "--generate-hashes"]


def _index() -> dict[str, str]:
    """The index settings to resolve with, without folders of this machine: they hold what its own platform needs,
    uv takes a version from the first place that has it, and the other platforms' hashes would be missing."""
    environ = uv_environment(os.environ)
    environ.pop("UV_FIND_LINKS", None)
    remote = [index for index in environ.pop("UV_INDEX", "").split() if not index.startswith("file:")]
    return environ | ({"UV_INDEX": " ".join(remote)} if remote else {})


def _uv(arguments: list[str], description: str, log: Path, folder: Path, environ: dict[str, str]) -> None:
    if run_shown([*uv_command(), *arguments], description, log, env=environ, cwd=folder) != 0:
        raise EngineProblem(f"{tail(log)}\n\n{description} failed: the package index's or resolver's words are above")


def wheel_pins(packages: list[dict], everywhere: list[Place]) -> str:
    """Turn a pylock's packages into the lines of a pins.txt: only what some place installs, only its wheels' hashes.

    Raises EngineProblem naming each package that one of the places needs and can't have as a wheel.
    """
    lines, missing = [], []
    for package in packages:
        marker = Marker(package["marker"]) if "marker" in package else None
        needing = [place for place in everywhere if marker is None or marker.evaluate(place.markers)]
        wheels = {_file_name(wheel): wheel["hashes"]["sha256"] for wheel in package.get("wheels", [])}
        fitting = {name: _places_of(name, needing) for name in wheels}
        for place in needing:
            if not any(place in able for able in fitting.values()):
                missing.append(f"{package['name']} {package['version']} has no wheel for {place}")
        hashes = sorted(wheels[name] for name, able in fitting.items() if able)
        if hashes:
            condition = f" ; {marker}".replace('"', "'") if marker else ""
            head = f"{package['name']}=={package['version']}{condition}"
            lines.append(" \\\n".join([head, *(f"    --hash=sha256:{value}" for value in hashes)]))
    if missing:
        raise EngineProblem("\n".join([*missing, "", "Ask for versions that have wheels there, in requirements.in."]))
    return "\n".join(lines) + "\n"


def _file_name(wheel: dict) -> str:
    return wheel.get("name") or unquote(urlsplit(wheel.get("url") or wheel["path"]).path).rsplit("/", 1)[-1]


def _places_of(wheel: str, among: list[Place]) -> list[Place]:
    tags = parse_wheel_filename(wheel)[3]
    return [place for place in among if tags & place.tags]


def _header(pins: PinSet) -> str:
    inputs = " and ".join(file.name for file in pins.inputs)
    kept = "every file has its hash"
    if pins.pythons:
        kept = f"the wheels for {' and '.join(pins.platforms)}, Python {pins.pythons[0]} to {pins.pythons[-1]}"
    return (
        f"# Resolved from {inputs} by ./inv pins --image {pins.name}: {kept}.\n# inputs sha256: {inputs_digest(pins)}\n"
    )
