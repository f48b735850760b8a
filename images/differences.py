"""Room images: how two images differ: configuration, packages, files; as a value and as a table."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from images.console import table
from images.layers import Entry, FlatImage, read_images
from images.packages import packages_of

SHOWN = 40
PLAIN = ("User", "WorkingDir", "Entrypoint", "Cmd", "ExposedPorts", "Volumes", "StopSignal", "Healthcheck", "Shell")
FIELDS = ("kind", "mode", "uid", "gid", "size", "sha256", "target", "xattrs")


@dataclass(frozen=True)
class Change:
    """One thing that differs: its name, its value in a and in b; null where there is none."""

    name: str
    a: object
    b: object


@dataclass(frozen=True)
class FileChange:
    """One path that differs, and in what: `fields` are those of layers.Entry, or nothing for a path of one image."""

    path: str
    a: Entry | None
    b: Entry | None

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that differ."""
        if self.a is None or self.b is None:
            return ()
        return tuple(name for name in FIELDS if getattr(self.a, name) != getattr(self.b, name))

    def __str__(self) -> str:
        if self.a is None or self.b is None:
            return f"only in {'b' if self.a is None else 'a'}"
        fields = [name for name in self.fields if not (name == "size" and "sha256" in self.fields)]
        return ", ".join(f"{name} {_brief(self.a, name)} → {_brief(self.b, name)}" for name in fields)


def _brief(entry: Entry, name: str) -> str:
    value = getattr(entry, name)
    if name == "mode":
        return f"{value:04o}"
    return f"{value[:8] or '–'} ({entry.size:,} bytes)" if name == "sha256" else str(value or "–")


@dataclass(frozen=True)
class Difference:
    """How image a and image b differ. `files` are the paths no glob allows, `allowed` those that one does.

    Left out, since no two builds have them in common: times of files, the time and history of the configuration.
    """

    a: str
    b: str
    config: tuple[Change, ...]
    packages: tuple[Change, ...]
    files: tuple[FileChange, ...]
    allowed: tuple[FileChange, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs but allowed paths."""
        return not (self.config or self.packages or self.files)

    def as_json(self) -> dict:
        """Everything that differs, as plain values."""
        lists = {"files": self.files, "allowed": self.allowed}
        return {
            "schema": 1,
            "a": self.a,
            "b": self.b,
            "equal": self.equal,
            "config": [asdict(change) for change in self.config],
            "packages": [asdict(change) for change in self.packages],
            **{key: [asdict(file) | {"fields": file.fields} for file in files] for key, files in lists.items()},
        }


def differences(a: str, b: str, allowed: Sequence[str] = ()) -> Difference:
    """Compare two images of the Docker engine, by name or id.

    `allowed` are globs of paths without the leading slash that may differ (`*` matches / too). Raises ImageProblem
    when an image or the engine is absent.
    """
    first, second = read_images([a, b])
    return compare(first, second, allowed)


def compare(a: FlatImage, b: FlatImage, allowed: Sequence[str] = ()) -> Difference:
    """Compare two images that were read."""
    globs = [re.compile(fnmatch.translate(glob.removeprefix("/"))) for glob in allowed]
    changed = [
        FileChange(path, a.entries.get(path), b.entries.get(path))
        for path in sorted(a.entries.keys() | b.entries.keys())
        if a.entries.get(path) != b.entries.get(path)
    ]
    free = [any(glob.match(change.path) for glob in globs) for change in changed]
    config = _changes(settings(a.config), settings(b.config))
    packages = _changes(_versions(a), _versions(b))
    return Difference(
        a.id,
        b.id,
        config,
        packages,
        tuple(change for change, may in zip(changed, free, strict=True) if not may),
        tuple(change for change, may in zip(changed, free, strict=True) if may),
    )


def settings(config: Mapping) -> dict[str, object]:
    """What of an image's configuration changes how it runs: platform, environment, labels, entrypoint, user, …"""
    inner = config.get("config") or {}
    found = {name: inner.get(name) or None for name in PLAIN}
    found |= {name: config.get(name) or None for name in ("os", "architecture", "variant")}
    for variable in inner.get("Env") or ():
        name, _, value = variable.partition("=")
        found[f"Env {name}"] = value
    return found | {f"Label {name}": value for name, value in (inner.get("Labels") or {}).items()}


def _versions(image: FlatImage) -> dict[str, object]:
    """Versions by a name that says what and where: two environments may hold the same distribution."""
    found: dict[str, list[str]] = {}
    for package in packages_of(image.texts):
        found.setdefault(f"{package.kind} {package.name} ({package.place})", []).append(package.version)
    return {name: ", ".join(versions) for name, versions in found.items()}


def _changes(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[Change, ...]:
    names = sorted(a.keys() | b.keys())
    return tuple(Change(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name))


def print_images_difference(found: Difference, console: Console) -> None:
    """Print counts, every configuration and package change, and the first SHOWN paths."""
    console.print(f"a  {found.a}\nb  {found.b}")
    rows = [
        ("configuration", str(len(found.config))),
        ("packages", str(len(found.packages))),
        ("files", str(len(found.files))),
        ("allowed files", str(len(found.allowed))),
    ]
    console.print(table("\nWhat differs", ("", ""), rows))
    for title, changes in (("\nConfiguration", found.config), ("\nPackages", found.packages)):
        if changes:
            rows = [(change.name, _shown(change.a), _shown(change.b)) for change in changes]
            console.print(table(title, ("", "a", "b"), rows))
    if found.files:
        more = f", the first {SHOWN} (--json has all)" if len(found.files) > SHOWN else ""
        rows = [(change.path, str(change)) for change in found.files[:SHOWN]]
        console.print(table(f"\nFiles{more}", ("path", "what"), rows))
    console.print("\nThe images are the same but for what is allowed." if found.allowed and found.equal else "", end="")
    console.print("\nThe images are the same." if found.equal and not found.allowed else "")


def _shown(value: object) -> str:
    return "–" if value is None else str(value)
