"""Room recipes: a bundle read without trust: every byte checked while it is copied to a folder of ours; nothing is run.

Whatever is wrong refuses the whole bundle, and the folder is removed.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from images.console import printable
from images.errors import BundleProblem
from images.staging import disk
from images.yaml_source import shown
from recipes.bundle.layout import (
    GB,
    INFO,
    MAX_ENTRIES,
    MAX_GB,
    MAX_SMALL,
    SIGNATURE,
    SUMS,
    BundleInfo,
    read_info,
    read_sums,
    require_parts,
)
from recipes.bundle.sign import trusted_comment, verify
from recipes.bundle.tar import CHUNK, Content, read_tar

SIGNATURE_BYTES = 9000
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Limits:
    """How much a bundle may hold, checked while it is read."""

    total_bytes: int = MAX_GB * GB
    entries: int = MAX_ENTRIES


@dataclass(frozen=True)
class Bundle:
    """A bundle whose every file is what SHA256SUMS says, in a folder of ours.

    `content` is the sha256 of SHA256SUMS: two bundles with the same content are the same. `signer` is the public key
    whose signature was checked, or None.
    """

    folder: Path
    info: BundleInfo
    content: str
    signer: str | None
    files: dict[str, str]
    size_bytes: int

    @property
    def label(self) -> str:
        """A short name that follows from the content."""
        return self.content[:8]


@contextmanager
def unpacked(
    source: Path, folder: Path, limits: Limits, progress: Progress = lambda _: None, called: str | None = None
) -> Iterator[Bundle]:
    """Check a bundle, a tar or a folder, while it is copied to `folder`, which is made and is removed on any error.

    `called` is how a person named it, where that isn't `source`. Raises BundleProblem with the reason, naming the
    file at fault.
    """
    what = called or shown(source)
    try:
        with disk(folder.parent):
            folder.mkdir()
            try:
                read = _from_folder if source.is_dir() else _from_tar
                bundle = read(source, folder, limits, progress, what)
            except OSError as error:
                if error.filename and Path(error.filename) == source:
                    raise BundleProblem(f"{what}: can't be read: {error.strerror}") from None
                raise
            yield bundle
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _from_tar(file: Path, folder: Path, limits: Limits, progress: Progress, what: str) -> Bundle:
    if not file.is_file():
        raise BundleProblem(f"{what}: there is no such file or folder")
    with file.open("rb") as source:
        return _read(read_tar(source, what), folder, limits, progress, what)


def _from_folder(source: Path, folder: Path, limits: Limits, progress: Progress, what: str) -> Bundle:
    if not (source / SUMS).is_file():
        raise BundleProblem(f"{what} is no bundle: it has no {SUMS}")
    with _plain(source, SUMS, what) as opened:
        wanted = list(read_sums(opened.read(MAX_SMALL), what))
    present = set()
    for root, folders, names in os.walk(source):
        for name in [*names, *(each for each in folders if (Path(root) / each).is_symlink())]:
            present.add((Path(root) / name).relative_to(source).as_posix())
        if len(present) > limits.entries:
            raise BundleProblem(f"{what}: more than {limits.entries} files")
    added = sorted(present - {*wanted, SUMS, SIGNATURE})
    if added:
        raise BundleProblem(f"{what}: {printable(added[0][:100])!r} was added: {SUMS} doesn't name it")
    order = [SUMS, *([SIGNATURE] if SIGNATURE in present else []), *wanted]

    def entries() -> Iterator[tuple[str, Content]]:
        for name in order:
            with _plain(source, name, what) as opened:
                size = os.fstat(opened.fileno()).st_size
                yield name, Content(opened, size)

    return _read(entries(), folder, limits, progress, what)


def _plain(root: Path, name: str, what: str) -> IO[bytes]:
    """Open a file below `root` for reading: a plain one, and no link on the way."""
    path = root
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise BundleProblem(f"{what}: {name!r} is a symbolic link; a bundle holds plain files only")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise BundleProblem(f"{what}: {name!r} can't be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BundleProblem(f"{what}: {name!r} is no plain file")
    return open(descriptor, "rb")


class _Reading:
    """A bundle being copied: what was named, what came, and how much."""

    def __init__(self, folder: Path, limits: Limits, progress: Progress, what: str) -> None:
        self.folder, self.limits, self.progress, self.what = folder, limits, progress, what
        self.total = self.entries = 0

    def count(self, content: Content) -> None:
        """Refuse a file that would be too many or too much, before any of it is written."""
        self.entries += 1
        if self.entries > self.limits.entries:
            raise BundleProblem(f"{self.what}: more than {self.limits.entries} files")
        if self.total + content.size > self.limits.total_bytes:
            raise BundleProblem(
                f"{self.what}: more than {self.limits.total_bytes / GB:g} GB in all. If you expect that, as with an "
                "engine's image inside: --max-gb"
            )

    def write(self, name: str, content: Content, most: int) -> tuple[str, bytes]:
        """Copy one file; returns its sha256 and, for a small one, its bytes."""
        self.count(content)
        if content.size > most:
            raise BundleProblem(f"{self.what}: {name} has {content.size} bytes, the most it may have is {most}")
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        digest, kept = hashlib.sha256(), []
        with target.open("xb") as sink:
            while data := content.read(CHUNK):
                digest.update(data)
                sink.write(data)
                self.total += len(data)
                self.progress(len(data))
                if most <= MAX_SMALL:
                    kept.append(data)
        if content.left:
            raise BundleProblem(f"{self.what} is cut short in {name}")
        return digest.hexdigest(), b"".join(kept)


def _read(
    entries: Iterator[tuple[str, Content]], folder: Path, limits: Limits, progress: Progress, what: str
) -> Bundle:
    reading = _Reading(folder, limits, progress, what)
    name, content = next(entries, (None, None))
    if name != SUMS:
        raise BundleProblem(f"{what} is no bundle: it doesn't begin with {SUMS}")
    digest, sums = reading.write(SUMS, content, MAX_SMALL)
    wanted = read_sums(sums, what)
    left = iter(wanted)
    signature = info = None
    for name, content in entries:
        if name == SIGNATURE and signature is None and info is None:
            signature = reading.write(name, content, SIGNATURE_BYTES)[1]
            continue
        expected = next(left, None)
        if name != expected:
            raise BundleProblem(f"{what}: {name!r} stands where {SUMS} has {expected or 'nothing more'}")
        found, data = reading.write(name, content, MAX_SMALL if name == INFO else limits.total_bytes)
        if found != wanted[name]:
            raise BundleProblem(f"{what}: {name} is altered: its sha256 is {found}, {SUMS} says {wanted[name]}")
        if name == INFO:  # the first that SUMS names: a newer schema is said before its files are
            info = read_info(data, what)
            require_parts(wanted, what)
    missing = next(left, None)
    if missing:
        raise BundleProblem(f"{what}: {missing} is missing")
    if (signature is None) != (info.signer is None):
        said = "is not signed, though it names who signed it" if signature is None else "names nobody who signed it"
        raise BundleProblem(f"{what} {said}: its signature was taken away, or put on")
    if signature is not None:
        verify(sums, signature, info.signer, trusted_comment(info.recipe, info.version), what)
    return Bundle(folder, info, digest, info.signer, wanted, reading.total)
