"""Room images: an image kept when its registry forgets it: saved as a file with its checksum, and loaded again."""

import fcntl
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from images.archive import CHUNK, Archive, file_sha256, open_blob, write_archive
from images.command import piped, run
from images.console import stage
from images.docker_engine import docker_engine, find_image, refuse_silent
from images.errors import ImageProblem, UsageProblem
from images.layers import config_digest
from images.registry import (
    Wire,
    digest_of,
    parse_reference,
    same_platform,
)
from images.staging import (
    counted,
    disk,
    open_archive,
    parse_source,
    stage_image,
    workspace,
)
from images.yaml_source import shown

SHA256_LINE = re.compile(r"([0-9a-f]{64})(?: [ *].*)?")


@dataclass(frozen=True)
class Saved:
    """An archive that was written. `image_id` is the digest of the image's configuration, `size` is in bytes.

    `source_digest` is what the registry's reference named (an index, or the manifest), null for an engine's image.
    """

    file: str
    image: str
    image_id: str
    manifest_digest: str
    source_digest: str | None
    platform: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Loaded:
    """An image that the engine has now: its id, which is the archive's, and the tag it was given, or null."""

    file: str
    image_id: str
    tag: str | None
    platform: str
    already_there: bool


def save_image(image: str, out: Path, platform: str | None = None, wire: Wire | None = None) -> Saved:
    """Write an image as an OCI archive, with its SHA-256 in `<out>.sha256`.

    Both are written under other names and appear when they are whole; a file of that name is never replaced. Raises
    UsageProblem for a file that exists or can't be made there, ImageProblem for everything that `stage_image` does.
    """
    source, wire = parse_source(image), wire or Wire()
    if source.archive:
        raise UsageProblem(f"{image} is a file already: to put it into a registry, ./inv image.mirror")
    wire.require_use([source.reference] if source.reference else [])
    with _fresh(out) as sink, disk(out), workspace(out) as folder:
        staged = stage_image(source, folder, wire, platform)
        blobs = sum(file.stat().st_size for file in staged.folder.iterdir())
        with counted(f"Writing {shown(out)}", blobs) as progress:
            written = write_archive(staged.folder, staged.manifest, staged.name, sink, progress)
        sha256 = written.hash.hexdigest()
        _publish(out, sink, sha256)
    digest = digest_of(staged.manifest)
    image_id, size = digest_of(staged.config), written.size
    return Saved(str(out), image, image_id, digest, staged.source_digest, staged.platform, size, sha256)


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)


@contextmanager
def _fresh(out: Path) -> Iterator[IO[bytes]]:
    """Open `<out>.partial` for us alone; it is gone at the end, published or not."""
    _require_new(out)
    partial = _beside(out, ".partial")
    try:
        sink = partial.open("ab")
    except OSError as error:
        raise UsageProblem(f"{shown(out)}: can't be written: {error.strerror}") from None
    with sink:
        try:
            fcntl.flock(sink, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageProblem(
                f"{shown(out)} is being written by another command: wait for it, or use another name"
            ) from None
        try:
            _require_new(out)  # the other one may have just finished
            sink.truncate(0)  # of one that was killed
            yield sink
        finally:
            partial.unlink(missing_ok=True)


def _require_new(out: Path) -> None:
    for file in (out, _beside(out, ".sha256")):
        if file.exists() or file.is_symlink():
            raise UsageProblem(f"{shown(file)} exists, and nothing is replaced: remove it, or use another --out")


def _publish(out: Path, sink: IO[bytes], sha256: str) -> None:
    sink.flush()
    os.fsync(sink.fileno())
    checksum = _beside(out, ".sha256")
    with checksum.open("x") as file:
        file.write(f"{sha256}  {out.name}\n")
    try:
        try:
            os.link(_beside(out, ".partial"), out)  # unlike a rename it never replaces
        except FileExistsError:
            raise UsageProblem(
                f"{shown(out)} has appeared meanwhile, and nothing is replaced: use another --out"
            ) from None
        except OSError:  # a file system without links
            _beside(out, ".partial").rename(out)
    except BaseException:
        checksum.unlink(missing_ok=True)
        raise


def load_image(file: Path, sha256: str | None = None, tag: str | None = None, any_platform: bool = False) -> Loaded:
    """Check an archive and load it into the Docker engine, tagged with its own name or `tag`.

    Raises UsageProblem when there is no checksum to hold it against or the tag names another image, ImageProblem for
    another checksum, a file that is no whole OCI archive, another platform than the engine's, or an engine that is
    absent or refuses it. The engine keeps nothing of an image that did not load whole.
    """
    if not file.is_file():
        raise UsageProblem(f"{shown(file)}: there is no such file")
    platform = docker_engine().platform
    _require_sha256(file, sha256)
    archive = open_archive(file, platform)
    if not same_platform(archive.platform, platform) and not any_platform:
        raise ImageProblem(
            f"{shown(file)} is an image for {archive.platform}, this engine runs {platform}: save the image for "
            f"{platform} (--platform), or load it all the same with --any-platform"
        )
    tag = _free_tag(tag or archive.name, archive)
    there = find_image(archive.image_id)
    if there is None:
        _stream(archive, tag)
        _require_same(archive, tag)
    elif tag:
        run(["docker", "tag", there.id, tag])
    return Loaded(str(file), archive.image_id, tag, archive.platform, there is not None)


def _require_sha256(file: Path, sha256: str | None) -> None:
    checksum = _beside(file, ".sha256")
    if sha256:
        expected, where = sha256.removeprefix("sha256:").lower(), "--sha256"
    elif checksum.is_file():
        expected, where = checksum.read_text(errors="replace").strip(), shown(checksum)
    else:
        raise UsageProblem(
            f"{shown(file)} has no {checksum.name} beside it: bring it along, or give --sha256 from where it was saved"
        )
    line = SHA256_LINE.fullmatch(expected)
    if line is None:
        raise UsageProblem(f"{where}: wanted 64 hex digits, as sha256sum writes them")
    size = file.stat().st_size
    with stage(f"Checking {shown(file)}") as update:
        found = file_sha256(file, lambda done: update(f"{done / 1e6:,.0f} MB", done, size))
    if found != line[1]:
        raise ImageProblem(
            f"{shown(file)} is not the file that was saved: its SHA-256 is {found}, {where} says {line[1]}"
        )


def _free_tag(name: str | None, archive: Archive) -> str | None:
    """The tag to give, when no other image has it."""
    if name is None:
        return None
    reference = parse_reference(name)
    if reference.digest:
        raise UsageProblem(f"--tag {name}: an engine can't be given a digest as a tag; wanted NAME[:TAG]")
    tag = f"{reference.name}:{reference.tag or 'latest'}"
    has = find_image(tag)
    if has and has.id != archive.image_id and config_digest(has.id) != archive.image_id:
        raise UsageProblem(
            f"{tag} is another image in this engine ({has.id}; the archive's is {archive.image_id}), and "
            "it is left alone: give another name with --tag"
        )
    return tag


def _stream(archive: Archive, tag: str | None) -> None:
    """Feed the image to `docker load` in the engine's own format, each layer checked as it passes.

    The list of layers comes last, so an engine whose stream ends early has nothing to keep.
    """
    total = sum(layer.size for layer in archive.layers)
    with piped(["docker", "load"], feed=True) as (process, said):
        try:
            with counted(f"Loading {shown(archive.file)} into the Docker engine", total) as progress:
                _feed(archive, tag, process.stdin, progress)
                process.stdin.close()
                process.wait()
        except BrokenPipeError:
            process.wait()
        said.seek(0)
        words = said.read().decode(errors="replace").strip()
    if process.returncode != 0:
        refuse_silent(words)
        full = "its disk is full" if "no space left" in words else "its own words are above"
        raise ImageProblem(
            f"{words}\nThe Docker engine did not take {shown(archive.file)}: {full}. It keeps nothing of it."
        )


def _feed(archive: Archive, tag: str | None, sink: IO[bytes], progress) -> None:
    layers = {layer.digest: f"{layer.digest[7:]}.tar" for layer in archive.layers}
    config = f"{archive.image_id[7:]}.json"
    contents = [{"Config": config, "RepoTags": [tag] if tag else None, "Layers": [*map(layers.get, _order(archive))]}]
    with archive.file.open("rb") as source, tarfile.open(fileobj=sink, mode="w|", bufsize=CHUNK) as tar:
        for layer in {layer.digest: layer for layer in archive.layers}.values():
            header = tarfile.TarInfo(layers[layer.digest])
            header.size = layer.size
            checked = open_blob(source, layer, progress)
            tar.addfile(header, checked)
            checked.require(shown(archive.file))
        for name, data in ((config, archive.config), ("manifest.json", json.dumps(contents).encode())):
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))


def _order(archive: Archive) -> list[str]:
    return [layer.digest for layer in archive.layers]


def _require_same(archive: Archive, tag: str | None) -> None:
    """Hold the engine's configuration against the archive's; an engine with another store names images otherwise."""
    has = find_image(archive.image_id) or (find_image(tag) if tag else None)
    if has is None:
        raise ImageProblem(f"the Docker engine took {shown(archive.file)} but does not show {archive.image_id}")
    found = has.id if has.id == archive.image_id else config_digest(has.id)
    if found != archive.image_id:
        run(["docker", "image", "rm", tag or has.id])
        raise ImageProblem(
            f"the Docker engine made {found} of {shown(archive.file)}, wanted {archive.image_id}; it was removed"
        )
