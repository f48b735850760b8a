"""Room images: pin files, read: requirement lines with exact versions and hashes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker

from images.declaration import MACHINE_OF
from images.errors import EngineProblem

PIN = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;\\]+)(?P<rest>.*)$", re.DOTALL)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Pin:
    """One pinned distribution. `name` is normalised; `line` is the whole entry as pip reads it."""

    name: str
    version: str
    hashes: frozenset[str]
    line: str

    @property
    def marker(self) -> Marker | None:
        """Where it applies; None: everywhere."""
        text = self.line.partition("==")[2].partition(";")[2].split("\\")[0].split("--hash")[0].strip()
        return Marker(text) if text else None


def normalised(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(file: Path) -> dict[str, Pin]:
    """Every pin of a file, by normalised name; of several lines of one name (by marker) the last.

    Raises EngineProblem for a line that is no exact, hashed pin.
    """
    return {pin.name: pin for pin in entries(file)}


def entries(file: Path) -> Iterator[Pin]:
    """Every line of a pin file.

    Raises EngineProblem for a line that is no exact, hashed pin.
    """
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE)
    for entry in re.split(r"\n(?=\S)", text.strip()):
        match = PIN.match(entry)
        hashes = frozenset(HASH.findall(entry))
        if not match or not hashes:
            raise EngineProblem(f"{file}: {entry.splitlines()[0][:80]!r} is no exact pin with a hash")
        yield Pin(normalised(match["name"]), match["version"], hashes, entry)


def environment_of(platform: str, python: str) -> dict[str, str]:
    """The marker environment of CPython `python` (3.11) on linux/amd64 or linux/arm64."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": MACHINE_OF[platform],
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
        "extra": "",
    }


def pins_for(file: Path, platform: str, python: str) -> list[Pin]:
    """The pins of one platform and Python, without markers, sorted by name.

    pip evaluates markers for the machine it runs on; an image may be for another, so that is done here.
    """
    environment = environment_of(platform, python)
    chosen = []
    for pin in entries(file):
        if pin.marker is None or pin.marker.evaluate(environment):
            line = f"{pin.name}=={pin.version}" + "".join(
                f" \\\n    --hash=sha256:{each}" for each in sorted(pin.hashes)
            )
            chosen.append(Pin(pin.name, pin.version, pin.hashes, line))
    return sorted(chosen, key=lambda pin: pin.name)
