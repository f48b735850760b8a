"""Room recipes: model files that a family keeps packed, since they say little for their size.

`<family>/packed/NAME.gz` is `<family>/<model.path>/NAME`, unpacked beside the others when the recipe is first loaded.
The recipe's digest is of the unpacked file, so that nothing else knows of this.
"""

import contextlib
import gzip
import zlib
from pathlib import Path

from images.written import write_whole

FOLDER = "packed"
SUFFIX = ".gz"
UNREADABLE = (OSError, EOFError, zlib.error)


def packed_files(family: Path) -> list[Path]:
    """What a family keeps packed."""
    return sorted((family / FOLDER).glob(f"*{SUFFIX}"))


def unpack_model(family: Path, model: Path) -> None:
    """Put the packed files that are missing into the folder `model`.

    Where that can't be done, on a read-only disk for example, they stay missing: `why_missing` says so when the
    model's files are looked at, and what needs no model goes on.
    """
    for packed in packed_files(family):
        target = model / packed.stem
        if not target.exists():
            with contextlib.suppress(*UNREADABLE):
                _unpack(packed, target)


def why_missing(family: Path, model: Path) -> str | None:
    """Why a packed file isn't in the folder `model`; None where all are. Tries once more."""
    for packed in packed_files(family):
        target = model / packed.stem
        if target.exists():
            continue
        try:
            _unpack(packed, target)
        except UNREADABLE as error:
            reason = getattr(error, "strerror", None) or error
            told = f"{target} can't be unpacked from {packed}: {reason}"
            return f"{told}. git restores the packed file; the folder has to be writable"
    return None


def _unpack(packed: Path, target: Path) -> None:
    write_whole(target, gzip.decompress(packed.read_bytes()))
