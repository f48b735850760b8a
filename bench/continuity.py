"""Room bench: which life of the machine and of its Docker engine this is, so that a restart in a run is noticed."""

import hashlib
from pathlib import Path

HEX_DIGITS = 16


def host_identity(root: Path = Path("/")) -> dict[str, str | None]:
    """`boot`: this life of the kernel, `dockerd`: this life of the Docker engine; None where there is none to see.

    Both are hashes: equal or not is all they tell.
    """
    return {"boot": _boot(root), "dockerd": _dockerd(root)}


def _boot(root: Path) -> str | None:
    try:
        return _hashed((root / "proc/sys/kernel/random/boot_id").read_text().strip())
    except OSError:
        return None


def _dockerd(root: Path) -> str | None:
    """The oldest process named dockerd, by its id and start time: field 22 of /proc/<pid>/stat, proc(5)."""
    found = []
    for folder in (root / "proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().partition(") ")
        except (OSError, UnicodeDecodeError):
            continue
        if name.endswith("(dockerd"):
            found.append((int(rest.split()[19]), int(folder.name)))
    return _hashed(f"{min(found)}") if found else None


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HEX_DIGITS]
