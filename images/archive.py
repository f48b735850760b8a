"""Room images: an image as one file, an OCI image layout in a tar; written deterministically, never trusted when read.

The blobs and the manifest are kept byte for byte. skopeo's own `oci-archive:` is not used for writing: it rewrites the
configuration (a HEALTHCHECK is lost, the image id changes) and stamps the tar with the time.
"""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from images.errors import ImageProblem
from images.registry import INDEXES, digest_of, of_platform, read_manifest
from images.yaml_source import shown

CHUNK = 1 << 20
SMALL_BYTES = 8 << 20  # no manifest or configuration is larger
MEMBER = re.compile(r"(?:\./)?(oci-layout|index\.json|blobs/sha256/[0-9a-f]{64})")
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_TYPES = {
    "application/vnd.docker.distribution.manifest.v2+json": OCI_MANIFEST,
    "application/vnd.docker.container.image.v1+json": "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.docker.image.rootfs.diff.tar": "application/vnd.oci.image.layer.v1.tar",
}
NAME_KEY = "io.containerd.image.name"  # the whole name, as buildx and containerd write and read it
REF_KEY = "org.opencontainers.image.ref.name"


@dataclass(frozen=True)
class Blob:
    """One blob: its digest, its size in bytes, and where it begins in the archive (-1: nowhere)."""

    digest: str
    size: int
    offset: int = -1


@dataclass(frozen=True)
class Archive:
    """One image of an archive, its manifest and configuration read and checked, its layers not yet.

    `name` is the image's name when it was saved, or null; `image_id` the digest of the configuration.
    """

    file: Path
    name: str | None
    manifest: bytes
    config: bytes
    layers: tuple[Blob, ...]
    platform: str

    @property
    def manifest_digest(self) -> str:
        """The digest a registry would know it by."""
        return digest_of(self.manifest)

    @property
    def image_id(self) -> str:
        """The digest of its configuration: what a Docker engine calls the image id."""
        return digest_of(self.config)


def oci_manifest(manifest: bytes) -> bytes:
    """The manifest of an engine's image in OCI's media types: the same configuration and layers, by digest."""
    found = json.loads(manifest)
    found["mediaType"] = OCI_MANIFEST
    for part in (found["config"], *found["layers"]):
        part["mediaType"] = OCI_TYPES.get(part["mediaType"], part["mediaType"])
    return json.dumps(found, separators=(",", ":"), sort_keys=True).encode()


def config_platform(config: bytes) -> str:
    """os/arch[/variant] of an image's configuration."""
    found = json.loads(config)
    return "/".join(part for part in (found.get("os"), found.get("architecture"), found.get("variant")) if part)


class Hashing:
    """A file being written, its SHA-256 and size known at the end."""

    def __init__(self, sink: IO[bytes]):
        self.sink, self.hash, self.size = sink, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        """Write and hash."""
        self.hash.update(data)
        self.size += len(data)
        return self.sink.write(data)

    def tell(self) -> int:
        """Bytes written."""
        return self.size


def write_archive(folder: Path, manifest: bytes, name: str | None, sink: IO[bytes], progress: Callable) -> Hashing:
    """Write an image that lies in `folder` (skopeo's `dir:`, blobs named by hash) as an archive.

    The bytes depend on the image and its name alone. Each blob is checked and removed once it is written, so that
    the image is on the disk once and not twice. Raises ImageProblem for a blob that is not what its name says.
    """
    found = read_manifest(manifest, "the image")
    size = len(manifest)
    entry = {"mediaType": found.get("mediaType", OCI_MANIFEST), "digest": digest_of(manifest), "size": size}
    if name:
        entry["annotations"] = {NAME_KEY: name, REF_KEY: name}
    written = Hashing(sink)
    with tarfile.open(fileobj=written, mode="w", format=tarfile.GNU_FORMAT) as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}, sort_keys=True).encode())
        _add(tar, f"blobs/sha256/{digest_of(manifest)[7:]}", manifest)
        for digest in dict.fromkeys(part["digest"] for part in (found["config"], *found["layers"])):
            blob = folder / digest[7:]
            with blob.open("rb") as source:
                checked = Checked(source, digest, blob.stat().st_size, progress)
                tar.addfile(_header(f"blobs/sha256/{digest[7:]}", checked.left), checked)
            checked.require("the copied image")
            blob.unlink()
    return written


def _header(name: str, size: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)  # time, owner and group are 0
    header.size = size
    return header


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    tar.addfile(_header(name, len(data)), io.BytesIO(data))


class Checked:
    """A blob being read: its hash is held against its digest at the end."""

    def __init__(self, source: IO[bytes], digest: str, size: int, progress: Callable = lambda _count: None):
        self.source, self.digest, self.left, self.progress = source, digest, size, progress
        self.hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes, and never beyond the blob."""
        data = self.source.read(self.left if size < 0 else min(size, self.left))
        self.left -= len(data)
        self.hash.update(data)
        self.progress(len(data))
        return data

    def require(self, what: str) -> None:
        """Raise ImageProblem when the blob ended early or is another."""
        found = f"sha256:{self.hash.hexdigest()}"
        if self.left or found != self.digest:
            raise ImageProblem(f"{what}: blob {self.digest} is cut short or altered (its content is {found})")


def file_sha256(file: Path, progress: Callable[[int], None]) -> str:
    """The SHA-256 of a file, 64 hex digits; `progress` gets the bytes done."""
    found, done = hashlib.sha256(), 0
    with file.open("rb") as source:
        while data := source.read(CHUNK):
            found.update(data)
            done += len(data)
            progress(done)
    return found.hexdigest()


def read_archive(file: Path, platform: str | None) -> Archive:
    """Read an archive's structure: layout, index, manifest and configuration; nothing is written anywhere.

    Where it holds several platforms, `platform` chooses. Raises ImageProblem for a file that is no tar, that holds
    anything but an OCI layout, that is cut short, or whose manifest or configuration is not what its digest says.
    """
    blobs = _members(file)
    with file.open("rb") as source:
        layout = _json(source, blobs, "oci-layout", file)
        if layout.get("imageLayoutVersion") != "1.0.0":
            raise _not_oci(file, f"its layout version is {layout.get('imageLayoutVersion')!r}")
        entries = _json(source, blobs, "index.json", file).get("manifests")
        if not isinstance(entries, list) or len(entries) != 1 or not isinstance(entries[0], dict):
            raise _not_oci(
                file, f"its index names {len(entries) if isinstance(entries, list) else 'no'} images, not one"
            )
        manifest = _small(source, blobs, entries[0].get("digest"), file)
        if entries[0].get("mediaType") in INDEXES or "manifests" in read_manifest(manifest, shown(file)):
            index = read_manifest(manifest, shown(file))
            manifest = _small(source, blobs, of_platform(index, platform or "", shown(file)), file)
        found = read_manifest(manifest, shown(file))
        config = _small(source, blobs, found["config"].get("digest"), file)
    layers = tuple(_layer(blobs, part, file) for part in found["layers"])
    read_diff_ids(config, len(layers), file)
    named = (entries[0].get("annotations") or {}) if isinstance(entries[0].get("annotations"), dict) else {}
    return Archive(file, named.get(NAME_KEY), manifest, config, layers, config_platform(config))


def read_diff_ids(config: bytes, count: int, file: Path) -> list[str]:
    """The layers' content ids from a configuration. Raises ImageProblem when they are not `count`."""
    try:
        found = json.loads(config)["rootfs"]["diff_ids"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _not_oci(file, "its configuration lists no layers") from None
    if len(found) != count:
        raise _not_oci(file, f"its configuration lists {len(found)} layers, its manifest {count}")
    return found


def open_blob(source: IO[bytes], blob: Blob, progress: Callable) -> Checked:
    """Begin to read a layer from the opened archive."""
    source.seek(blob.offset)
    return Checked(source, blob.digest, blob.size, progress)


def unpack(archive: Archive, folder: Path, progress: Callable) -> None:
    """Write an image as skopeo's `dir:`: only blobs that are what their digest says, each named by its hash."""
    (folder / "version").write_text("Directory Transport Version: 1.1\n")
    (folder / "manifest.json").write_bytes(archive.manifest)
    (folder / archive.image_id[7:]).write_bytes(archive.config)
    with archive.file.open("rb") as source:
        for layer in archive.layers:
            checked = open_blob(source, layer, progress)
            with (folder / layer.digest[7:]).open("wb") as sink:
                while data := checked.read(CHUNK):
                    sink.write(data)
            checked.require(shown(archive.file))


def _not_oci(file: Path, why: str) -> ImageProblem:
    return ImageProblem(
        f"{shown(file)} is no whole OCI archive of one image: {why}. Wanted: one that image.save wrote."
    )


def _members(file: Path) -> dict[str, Blob]:
    """What lies where in the tar. Only the names of an OCI layout are accepted, each once, each a plain file."""
    found: dict[str, Blob] = {}
    try:
        for member in _walk(file):
            if member.isdir() and member.name in {".", "blobs", "blobs/sha256", "./blobs", "./blobs/sha256"}:
                continue
            name = MEMBER.fullmatch(member.name)
            if not name or not member.isreg():
                raise _not_oci(file, f"it holds {member.name[:100]!r}, which no OCI layout has")
            if name[1] in found:
                raise _not_oci(file, f"it holds {name[1]} twice")
            found[name[1]] = Blob(f"sha256:{name[1][-64:]}", member.size, member.offset_data)
    except (tarfile.TarError, EOFError, ValueError) as error:
        short = "unexpected end" in str(error)
        raise _not_oci(file, "it is cut short" if short else f"it can't be read as a tar ({error})") from None
    except OSError as error:
        raise ImageProblem(f"{shown(file)}: can't be read: {error.strerror}") from None
    length = file.stat().st_size
    for name, blob in found.items():
        if blob.offset + blob.size > length:
            raise _not_oci(file, f"it is cut short in {name}")
    return found


def _walk(file: Path) -> Iterator[tarfile.TarInfo]:
    with tarfile.open(file, mode="r:") as tar:
        yield from tar


def _small(source: IO[bytes], blobs: dict[str, Blob], digest: object, file: Path) -> bytes:
    blob = blobs.get(f"blobs/sha256/{str(digest).removeprefix('sha256:')}")
    if blob is None:
        raise _not_oci(file, f"it lacks the blob {str(digest)[:80]}")
    data = _read(source, blob, file)
    if digest_of(data) != digest:
        raise _not_oci(file, f"blob {digest} is cut short or altered")
    return data


def _json(source: IO[bytes], blobs: dict[str, Blob], name: str, file: Path) -> dict:
    if name not in blobs:
        raise _not_oci(file, f"it has no {name}")
    try:
        found = json.loads(_read(source, blobs[name], file))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _not_oci(file, f"its {name} is not JSON")
    return found


def _read(source: IO[bytes], blob: Blob, file: Path) -> bytes:
    if blob.size > SMALL_BYTES:
        raise _not_oci(file, f"a part of its structure is {blob.size} bytes long")
    source.seek(blob.offset)
    return source.read(blob.size)


def _layer(blobs: dict[str, Blob], part: dict, file: Path) -> Blob:
    digest = str(part.get("digest")) if isinstance(part, dict) else "?"
    blob = blobs.get(f"blobs/sha256/{digest.removeprefix('sha256:')}")
    if blob is None or blob.size != part.get("size"):
        raise _not_oci(file, f"its layer {digest[:80]} is missing or has another size")
    return blob
