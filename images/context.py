"""Room images: the build context: a folder of the same bytes for the same input, and the Dockerfile rendered in it."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from jinja2 import FileSystemLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from images.alterations import alter
from images.declaration import IMAGES, Declaration
from images.wheels import Wheelhouse, entry_points

MODE_FILE, MODE_FOLDER, MODE_PROGRAM = 0o644, 0o755, 0o755
TIME = 1735689600  # 2025-01-01: COPY keeps times, so they are the same in every context
SHARED_CHECKS = IMAGES / "verify_checks.py"


def write_context(folder: Path, facts: Declaration, house: Wheelhouse, dockerfile: str) -> None:
    """Fill `folder` with what the Dockerfile copies; wheels are hard links where the file system allows."""
    (folder / "wheels").mkdir(parents=True)
    for wheel in sorted(house.folder.glob("*.whl")):
        _link(wheel, folder / "wheels" / wheel.name)
    (folder / "site").mkdir()
    alter(facts, folder / "site", entry_points(house, facts.module, _engine_version(facts, house)))
    (folder / "pins.txt").write_text(house.pins_text)
    shutil.copyfile(IMAGES / facts.name / "verify", folder / "verify")
    shutil.copyfile(SHARED_CHECKS, folder / SHARED_CHECKS.name)
    (folder / "Dockerfile").write_text(dockerfile)
    _normalise(folder)


def _engine_version(facts: Declaration, house: Wheelhouse) -> str:
    return next(pin.version for pin in house.pins if pin.name == facts.distribution)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _normalise(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.parent.name != "wheels":  # wheels are shared with the wheelhouse, and end in no final layer
            path.chmod(MODE_FOLDER if path.is_dir() else MODE_PROGRAM if path.name == "verify" else MODE_FILE)
            os.utime(path, (TIME, TIME))


def render_dockerfile(name: str, values: Mapping[str, object]) -> str:
    """Render images/<name>/Dockerfile.j2.

    Raises jinja2.UndefinedError for a variable that nobody gave: a fault of ours.
    """
    environment = SandboxedEnvironment(
        loader=FileSystemLoader(IMAGES / name),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False).replace("$", "\\$")
    return environment.get_template("Dockerfile.j2").render(values)


def context_identity(facts: Declaration, house: Wheelhouse, dockerfile: str, base_id: str) -> str:
    """The hash over everything that decides an image's content: 16 hex digits. `dockerfile` without its own label."""
    digest = hashlib.sha256(f"{base_id}\n{dockerfile}\n{house.pins_text}{house.installer.line}".encode())
    for file in (IMAGES / facts.name / "verify", SHARED_CHECKS, *(IMAGES / facts.name / p.file for p in facts.patches)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
