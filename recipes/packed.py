"""Room recipes: model files that a family of the library keeps packed, since they say little for their size.

`<family>/packed/NAME.gz` is `<family>/<model.path>/NAME`, unpacked beside the others when a recipe of the family is
first loaded, and only if it is what the recipe names. Bundles carry the file itself: theirs are never unpacked.
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from images.written import write_whole

FOLDER = "packed"
SUFFIX = ".gz"


def unpack_model(family: Path, model: Path, files: Mapping[str, str]) -> list[str]:
    """Put the packed files that are missing into the folder `model`; `files`: the sha256 by name that they must have.

    Returns what is wrong afterwards, one sentence a file, with the remedy. What needs no model can go on all the same.
    """
    return [fault for packed in _packed(family) if (fault := _fault(packed, model / packed.stem, files))]


def _packed(family: Path) -> Iterator[Path]:
    yield from sorted((family / FOLDER).glob(f"*{SUFFIX}"))


def _fault(packed: Path, target: Path, files: Mapping[str, str]) -> str | None:
    wanted = files.get(target.name)
    try:
        if target.exists():
            if target.is_file() and _sha256(target.read_bytes()) == wanted:
                return None
            return f"{target} is not the recipe's: delete it, and it is unpacked from {packed} again"
        data = gzip.decompress(packed.read_bytes())
        if _sha256(data) != wanted:
            return f"{packed} has not what the recipe names: git restores it"
        write_whole(target, data, workshop=packed.parent)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return f"{packed} can't be unpacked ({error}): git restores it"
    except OSError as error:
        return f"{target} can't be unpacked from {packed}: {error.strerror}. That folder has to be writable once"
    return None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
