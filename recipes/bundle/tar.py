"""Room recipes: a bundle as one file: a plain tar whose bytes follow from its files alone, and its strict reader.

Not compressed, on purpose: what a compressor writes changes with its version, and so would the bundle; and there is
nothing to blow up when it is read. Owner, time and mode are the same in every header. The reader makes the header
again from name and size and compares: one changed byte, a link, a device or a sparse file can't be that.
"""

import hashlib
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from images.errors import BundleProblem
from recipes.bundle.layout import MAX_FILE, why_bad_name

BLOCK = tarfile.BLOCKSIZE
RECORD = tarfile.RECORDSIZE
CHUNK = 1 << 20
COMPRESSED = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"))
COMPRESSED += ((b"PK\x03\x04", "zip"),)
KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "a folder's own entry",
    b"6": "a named pipe",
    b"S": "a sparse file",
    b"x": "an extended header",
    b"g": "an extended header",
    b"L": "an extended header",
    b"K": "an extended header",
}


@dataclass(frozen=True)
class Entry:
    """A file to be written: its name, and its content as bytes or as a file."""

    name: str
    content: bytes | Path

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    def chunks(self) -> Iterator[bytes]:
        """The content, piece by piece."""
        if isinstance(self.content, bytes):
            yield self.content
            return
        with self.content.open("rb") as source:
            while data := source.read(CHUNK):
                yield data

    def sha256(self) -> str:
        """64 hex digits."""
        digest = hashlib.sha256()
        for data in self.chunks():
            digest.update(data)
        return digest.hexdigest()


def header(name: str, size: int) -> bytes:
    """The one header that a file of this name and size has. Raises BundleProblem where there is none."""
    info = tarfile.TarInfo(name)  # owner, group and time are 0, the mode is 0644
    info.size = size
    if size > MAX_FILE:
        raise BundleProblem(f"{name} has {size} bytes; the most a file in a bundle has is {MAX_FILE}")
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
    except (ValueError, UnicodeEncodeError) as error:
        raise BundleProblem(f"{name[:100]!r} can't stand in a bundle: {error}") from None


def write_tar(entries: Iterable[Entry], sink: IO[bytes], progress: Callable[[int], None]) -> int:
    """Write the files as they come; returns the tar's size in bytes.

    Raises BundleProblem for a file that changed its size meanwhile.
    """
    written = 0
    for entry in entries:
        size = entry.size
        sink.write(header(entry.name, size))
        left = size
        for data in entry.chunks():
            left -= len(data)
            sink.write(data)
            progress(len(data))
        if left:
            raise BundleProblem(f"{entry.name} changed while it was bundled: try again")
        sink.write(b"\0" * (-size % BLOCK))
        written += BLOCK + size + -size % BLOCK
    end = 2 * BLOCK
    end += -(written + end) % RECORD
    sink.write(b"\0" * end)
    return written + end


class Content:
    """One file of a tar while it is read: never more than its size."""

    def __init__(self, source: IO[bytes], size: int) -> None:
        """Begin where the file's first byte is."""
        self._source, self.size, self.left = source, size, size

    def read(self, most: int = CHUNK) -> bytes:
        """The next bytes; nothing at the end of the file, or of a tar that is cut short (`left` says which)."""
        data = self._source.read(min(most, self.left))
        self.left -= len(data)
        return data


def read_tar(source: IO[bytes], what: str) -> Iterator[tuple[str, Content]]:
    """Yield every file's name and content, in order; each content has to be read whole before the next.

    Raises BundleProblem for anything that `write_tar` doesn't write.
    """
    total = 0
    while True:
        block = source.read(BLOCK)
        if total == 0:
            _refuse_other_files(block, what)
        if len(block) < BLOCK:
            raise _cut(what)
        if block == b"\0" * BLOCK:
            _require_end(source, total, what)
            return
        name, size = _parse(block, what)
        content = Content(source, size)
        yield name, content
        padding = source.read(-size % BLOCK)
        if content.left or len(padding) < -size % BLOCK:
            raise _cut(what)
        if padding.strip(b"\0"):
            raise BundleProblem(f"{what}: there is something between the files, after {name}")
        total += BLOCK + size + len(padding)


def _cut(what: str) -> BundleProblem:
    return BundleProblem(f"{what} is cut short: copy it again, and compare its size")


def _refuse_other_files(block: bytes, what: str) -> None:
    for sign, kind in COMPRESSED:
        if block.startswith(sign):
            raise BundleProblem(f"{what} is compressed ({kind}): a bundle is a plain tar, and nothing is unpacked here")
    if len(block) == BLOCK and (block[257:262] != b"ustar" or not block.strip(b"\0")):
        raise BundleProblem(f"{what} is no bundle: it doesn't begin as a tar of ours does")


def _parse(block: bytes, what: str) -> tuple[str, int]:
    """Name and size of a header that is exactly as we write it."""
    kind = KINDS.get(block[156:157])
    raw = block[:100].rstrip(b"\0")
    raw = block[345:500].rstrip(b"\0") + b"/" + raw if block[345:346] != b"\0" else raw
    name = raw.decode("latin-1")
    if kind:
        raise BundleProblem(f"{what}: {name[:100]!r} is {kind}; a bundle holds plain files only")
    bad = why_bad_name(name)
    if bad:
        raise BundleProblem(f"{what}: {bad}")
    digits = block[124:135]
    size = int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else -1
    if size < 0 or header(name, size) != block:
        raise BundleProblem(f"{what}: the header of {name!r} is altered: it is not the one we write")
    return name, size


def _require_end(source: IO[bytes], total: int, what: str) -> None:
    """After the first block of zeros: as many more as fill the record, and nothing else."""
    rest = BLOCK + -(total + 2 * BLOCK) % RECORD
    data = source.read(rest + 1)
    if len(data) < rest:
        raise _cut(what)
    if len(data) > rest or data.strip(b"\0"):
        raise BundleProblem(f"{what}: there is something after its end")
