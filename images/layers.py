"""Room images: what is in an image of the Docker engine, read as `docker save` streams it; nothing is unpacked.

Memory holds one small record a file, and the text of the package databases. Formats: the engine's own up to 24 (layers
in folders) and the OCI layout that it writes from 25 on; whiteouts as in the OCI image specification, layer.md.
"""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TypeVar

from images.command import piped
from images.console import stage
from images.docker_engine import refuse_silent, require_image
from images.errors import ImageProblem

BUFFER = 1 << 16  # tarfile copies its buffer at each header: larger is slower for small files
CHUNK = 1 << 20
SMALL_BYTES = 8 << 20
KEPT_TEXT = re.compile(  # what packages.py reads
    r"(usr/lib|etc)/os-release|var/lib/dpkg/status(\.d/[^/]+)?|.*\.dist-info/METADATA|.*\.egg-info/PKG-INFO|usr/share/doc/[^/]+/copyright"
)
KEPT_BYTES = 1 << 18  # of each, but for dpkg's status
KINDS = {
    tarfile.DIRTYPE: "directory",
    tarfile.SYMTYPE: "link",
    tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device",
    tarfile.FIFOTYPE: "fifo",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of an image: `kind` file, directory, link, …; `mode` its permission bits; `size` in bytes.

    `sha256` is that of a file's content, `target` where a symbolic link points, `xattrs` its extended attributes. A
    hard link is the file it is linked to. Times are left out: no two builds have the same.
    """

    kind: str
    mode: int
    uid: int
    gid: int
    size: int = 0
    sha256: str = ""
    target: str = ""
    xattrs: tuple[tuple[str, str], ...] = ()


@dataclass
class Layer:
    """What one layer adds, what it hides of those below, and texts of files that say what is installed."""

    entries: dict[str, Entry] = field(default_factory=dict)
    hard_links: dict[str, str] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    emptied: set[str] = field(default_factory=set)
    texts: dict[str, bytes] = field(default_factory=dict)


T = TypeVar("T")
Saved = tuple[list[dict], dict[str, T], dict[str, bytes]]  # manifest.json, layers and small files by name


@dataclass(frozen=True)
class FlatImage:
    """An image as a container sees it: its id, its configuration, every path without the leading slash, kept texts."""

    name: str
    id: str
    config: Mapping
    entries: Mapping[str, Entry]
    texts: Mapping[str, bytes]


def read_images(names: Sequence[str]) -> list[FlatImage]:
    """Read images of the Docker engine whole, in one stream: layers that they share are read once.

    Raises ImageProblem when an image or the engine is absent, or the stream ends early.
    """
    images = [require_image(name) for name in names]
    ids = list(dict.fromkeys(image.id for image in images))
    total = max(image.size_bytes for image in images)

    def read(source: IO[bytes]) -> Saved[Layer]:
        with stage(f"Reading {' and '.join(names)}") as update:
            return read_stream(Counted(source, update, total), read_layer)

    contents, layers, blobs = saved_by_engine(ids, names, read)
    found = {}
    for saved in contents:
        config = blobs[saved["Config"]]
        flat = flatten([layers[name] for name in saved["Layers"] or []])
        found[f"sha256:{hashlib.sha256(config).hexdigest()}"] = (json.loads(config), *flat)
    flats = []
    for name, image in zip(names, images, strict=True):
        key = image.id if image.id in found else _config_of(image.id, contents, blobs, found)
        flats.append(FlatImage(name, key, *found[key]))
    return flats


def saved_by_engine(ids: Sequence[str], names: Sequence[str], read: Callable[[IO[bytes]], T]) -> T:
    """What `read` makes of the stream in which the engine gives images out, by their ids; `names` are for errors.

    Raises ImageProblem when the stream ends early, DockerProblem when no engine answers.
    """
    with piped(["docker", "save", *ids]) as (process, said):
        try:
            found = read(process.stdout)
            while process.stdout.read(CHUNK):
                pass
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            process.stdout.close()  # or it would wait for us to read on
            process.wait()
            raise _ended(said, names, str(error)) from None
        if process.wait() != 0:
            raise _ended(said, names, "")
    return found


def _ended(said: IO[bytes], names: Sequence[str], why: str) -> ImageProblem:
    said.seek(0)
    words = said.read().decode(errors="replace").strip()
    refuse_silent(words)
    return ImageProblem(f"{words or why}\nThe Docker engine did not give {' and '.join(names)} out whole.")


def _config_of(image_id: str, contents: list[dict], blobs: Mapping[str, bytes], found: Mapping) -> str:
    """The configuration's digest of an image whose engine names it by its manifest (containerd's image store)."""
    waiting = [image_id]
    while waiting:
        inner = json.loads(blobs.get(f"blobs/sha256/{waiting.pop()[7:]}", b"{}"))
        if inner.get("config", {}).get("digest") in found:
            return inner["config"]["digest"]
        waiting += [manifest["digest"] for manifest in inner.get("manifests", [])]
    if len(contents) == 1:
        return next(iter(found))
    raise ImageProblem(f"the Docker engine's archive does not say which of its images is {image_id}")


def config_digest(name: str) -> str:
    """The digest of an engine image's configuration: its id, but for engines that name images by their manifest.

    Raises ImageProblem when the image is absent, or the stream ends early.
    """
    image = require_image(name)
    contents, blobs = saved_by_engine([image.id], [name], _small_files)
    if len(contents) != 1 or contents[0]["Config"] not in blobs:
        raise ImageProblem(f"the Docker engine does not give the configuration of {name}")
    return f"sha256:{hashlib.sha256(blobs[contents[0]['Config']]).hexdigest()}"


def _small_files(source: IO[bytes]) -> tuple[list[dict], dict[str, bytes]]:
    blobs = {}
    with tarfile.open(fileobj=source, mode="r|", bufsize=BUFFER) as tar:
        for member in tar:
            if member.isreg() and member.size < SMALL_BYTES:
                blobs[member.name] = tar.extractfile(member).read()
    return json.loads(blobs.get("manifest.json", b"[]")), blobs


class Counted:
    """A stream whose bytes are shown as they come."""

    def __init__(self, source: IO[bytes], update: Callable, total: int):
        self.source, self.update, self.total, self.done = source, update, total, 0

    def read(self, size: int) -> bytes:
        """Read and count."""
        data = self.source.read(size)
        self.done += len(data)
        self.update(f"{self.done / 1e6:,.0f} MB", min(self.done, self.total), self.total)
        return data


def read_stream(source: object, take: Callable[["Peeked", str], T]) -> Saved[T]:
    """Read what `docker save` writes: its manifest.json, each layer by its name, each small file by its name.

    `take` reads one layer: a stream, and tarfile's mode for it. A link stands for what it points at, as between equal
    layers in the engine's old format. Raises ImageProblem when there is no manifest, a layer can't be read, or fewer
    layers came than the manifest lists: nobody may take what was never looked at for empty.
    """
    layers: dict[str, T] = {}
    blobs: dict[str, bytes] = {}
    links: dict[str, str] = {}
    with tarfile.open(fileobj=source, mode="r|", bufsize=BUFFER) as tar:
        for member in tar:
            tar.members = []  # the list would hold every header
            if member.issym() or member.islnk():
                links[member.name] = _link_target(member)
            elif member.isreg() and member.size:
                stream = Peeked(tar.extractfile(member))
                mode = _layer_mode(stream.head, member.name)
                if mode:
                    layers[member.name] = take(stream, mode)
                elif member.size < SMALL_BYTES:
                    blobs[member.name] = stream.read(member.size)
    layers |= {name: layers[target] for name, target in links.items() if target in layers}
    if "manifest.json" not in blobs:
        raise ImageProblem("the Docker engine's archive has no manifest.json: it ended early, or the engine is too old")
    contents = json.loads(blobs["manifest.json"])
    missing = [name for saved in contents for name in saved["Layers"] or [] if name not in layers]
    if missing:
        raise ImageProblem(
            f"the Docker engine's archive lists the layer {missing[0]}; found no tar under that name, wanted one, "
            "plain or compressed with gzip: pull or build the image again"
        )
    return contents, layers, blobs


def _layer_mode(head: bytes, name: str) -> str:
    """The mode in which tarfile reads a layer, by its first 512 bytes; empty for what is no layer."""
    if head[257:262] == b"ustar" or not head.strip(b"\0"):
        return "r|"
    if head[:2] == b"\x1f\x8b":
        return "r|gz"
    if head[:4] == b"\x28\xb5\x2f\xfd":
        raise ImageProblem(f"{name} is compressed with zstd, which can't be read here: build the image with gzip")
    return ""


def _link_target(member: tarfile.TarInfo) -> str:
    folder = member.name.rpartition("/")[0]
    return _clean(f"{folder}/{member.linkname}" if member.issym() else member.linkname)


class Peeked:
    """A stream whose first block has been looked at."""

    def __init__(self, source: IO[bytes]):
        self.source, self.head = source, source.read(512)
        self.rest = io.BytesIO(self.head)

    def read(self, size: int) -> bytes:
        """Read, beginning with the block that was looked at."""
        data = self.rest.read(size)
        return data + self.source.read(size - len(data)) if len(data) < size else data


def read_layer(source: object, mode: str = "r|") -> Layer:
    """Read one layer's tar from a stream: each file is hashed as it passes."""
    layer = Layer()
    with tarfile.open(fileobj=source, mode=mode, bufsize=BUFFER) as tar:
        for member in tar:
            tar.members = []
            _take(tar, member, layer)
    return layer


def _take(tar: tarfile.TarFile, member: tarfile.TarInfo, layer: Layer) -> None:
    path = _clean(member.name)
    folder, _, name = path.rpartition("/")
    if name == ".wh..wh..opq":
        layer.emptied.add(folder)
    elif name.startswith(".wh..wh."):
        return  # the storage driver's own marks, which no container sees
    elif name.startswith(".wh."):
        layer.hidden.add(f"{folder}/{name[4:]}" if folder else name[4:])
    elif member.islnk():
        layer.hard_links[path] = _clean(member.linkname)
    else:
        layer.entries[path] = _entry(tar, member, path, layer)


def _entry(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str, layer: Layer) -> Entry:
    prefix = "SCHILY.xattr."
    xattrs = tuple(sorted((key[len(prefix) :], value) for key, value in member.pax_headers.items() if prefix in key))
    owner = (member.mode & 0o7777, member.uid, member.gid)
    if not member.isreg():
        target = member.linkname if member.issym() else ""
        if member.isdev():
            target = f"{member.devmajor},{member.devminor}" if not member.isfifo() else ""
        return Entry(KINDS.get(member.type, "other"), *owner, target=target, xattrs=xattrs)
    content, found = tar.extractfile(member), hashlib.sha256()
    kept = [] if KEPT_TEXT.fullmatch(path) else None
    while data := content.read(CHUNK):
        found.update(data)
        if kept is not None and (path == "var/lib/dpkg/status" or not kept):
            kept.append(data if path == "var/lib/dpkg/status" else data[:KEPT_BYTES])
    if kept is not None:
        layer.texts[path] = b"".join(kept)
    return Entry("file", *owner, member.size, found.hexdigest(), "", xattrs)


def flatten(layers: Iterable[Layer]) -> tuple[dict[str, Entry], dict[str, bytes]]:
    """Lay layers over each other, the lowest first: entries and kept texts by path, sorted.

    A whiteout hides only what lower layers have; a path that is no directory hides what a lower layer had below it.
    """
    entries: dict[str, Entry] = {}
    texts: dict[str, bytes] = {}
    for layer in layers:
        own = {**layer.entries, **_resolved(layer, entries)}
        replaced = {path for path, entry in own.items() if entry.kind != "directory" and _is_directory(entries, path)}
        gone = layer.hidden | replaced
        if gone or layer.emptied:
            entries = {path: entry for path, entry in entries.items() if not _covered(path, gone, layer.emptied)}
        entries.update(own)
        texts = {path: text for path, text in texts.items() if path in entries and path not in own} | layer.texts
        texts |= {path: texts[target] for path, target in layer.hard_links.items() if target in texts}
    entries.pop("", None)
    return dict(sorted(entries.items())), dict(sorted(texts.items()))


def _resolved(layer: Layer, lower: Mapping[str, Entry]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for path, target in layer.hard_links.items():
        entry = layer.entries.get(target) or found.get(target) or lower.get(target)
        found[path] = entry or Entry("file", 0, 0, 0, target=target)  # a link to nothing: shown as such
    return found


def _is_directory(entries: Mapping[str, Entry], path: str) -> bool:
    return path in entries and entries[path].kind == "directory"


def _covered(path: str, gone: set[str], emptied: set[str]) -> bool:
    if path in gone:
        return True
    end = path.rfind("/")
    while end >= 0:
        above = path[:end]
        if above in gone or above in emptied:
            return True
        end = path.rfind("/", 0, end)
    return "" in emptied and path != ""


def _clean(name: str) -> str:
    """A path as a container knows it: no leading slash or dot, no `..` that leads out."""
    parts: list[str] = []
    for part in name.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in {"", "."}:
            parts.append(part)
    return "/".join(parts)
