"""Room images: the Debian packages and Python distributions that an image's own databases name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import BytesHeaderParser

PYTHON_METADATA = re.compile(r"(.*/)?[^/]+\.(dist-info/METADATA|egg-info/PKG-INFO)")


@dataclass(frozen=True, order=True)
class Package:
    """One installed package. `kind` is deb or pypi, `place` the folder it is in (Python) or its architecture (Debian).

    `licences` are what the package says itself: SPDX expressions, names or classifiers, as written.
    """

    kind: str
    name: str
    version: str
    place: str
    summary: str = ""
    licences: tuple[str, ...] = ()
    source: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it the same package in another image."""
        return self.kind, self.name, self.place


def packages_of(texts: Mapping[str, bytes]) -> list[Package]:
    """Read the packages out of an image's kept texts (layers.FlatImage.texts), sorted.

    Debian's from var/lib/dpkg/status (or status.d, in images without dpkg), those that are installed; Python's from
    every *.dist-info/METADATA and *.egg-info/PKG-INFO.
    """
    found = []
    for path, text in texts.items():
        if path.startswith("var/lib/dpkg/"):
            found += [_debian(stanza, texts) for stanza in _stanzas(text)]
        elif PYTHON_METADATA.fullmatch(path):
            found.append(_python(path, text))
    return sorted({package for package in found if package and package.name})


def python_name(name: str) -> str:
    """A distribution's name as PyPI compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _stanzas(text: bytes) -> list[dict[str, str]]:
    """dpkg's status file: fields by lower-case name; of continued lines the first only."""
    found: list[dict[str, str]] = []
    for block in text.decode(errors="replace").split("\n\n"):
        lines = (line.partition(":") for line in block.splitlines() if line[:1] not in {" ", "\t", ""})
        fields = {name.strip().lower(): value.strip() for name, colon, value in lines if colon}
        if fields:
            found.append(fields)
    return found


def _debian(fields: Mapping[str, str], texts: Mapping[str, bytes]) -> Package | None:
    state = fields.get("status", "install ok installed").split()  # status.d has no such field
    if state[-1] != "installed" or "package" not in fields:
        return None
    name = fields["package"]
    licences = _copyright(texts.get(f"usr/share/doc/{name}/copyright", b""))
    source = fields.get("source", name)
    summary = fields.get("description", "")
    return Package("deb", name, fields.get("version", ""), fields.get("architecture", ""), summary, licences, source)


def _copyright(text: bytes) -> tuple[str, ...]:
    """The licences that a machine-readable copyright file (DEP-5) names, in its order; none of a free-form one."""
    words = text.decode(errors="replace")
    if not words.lstrip().startswith("Format:"):
        return ()
    found = (line[8:].strip() for line in words.splitlines() if line.startswith("License:"))
    return tuple(dict.fromkeys(name for name in found if name))


def _python(path: str, text: bytes) -> Package | None:
    fields = BytesHeaderParser().parsebytes(text)
    name, version = str(fields.get("Name", "")), str(fields.get("Version", ""))
    classifiers = [str(value) for value in fields.get_all("Classifier", [])]
    said = [str(fields.get("License-Expression") or "")]
    if not said[0]:
        said = [value.rpartition("::")[2].strip() for value in classifiers if value.startswith("License ::")]
        short = str(fields.get("License") or "").strip()
        said += [short] if not said and len(short) < 100 and "\n" not in short else []
    licences = tuple(value for value in said if value and value != "UNKNOWN")
    place = path.rpartition("/")[0].rpartition("/")[0]
    return Package("pypi", python_name(name), version, place, str(fields.get("Summary", "")), licences)
