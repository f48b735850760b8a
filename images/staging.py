"""Room images: an image brought to a folder of ours, byte for byte, from an engine, a registry or an archive."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from images.archive import Archive, config_platform, oci_manifest, read_archive, unpack
from images.command import run_shown, tail
from images.console import stage
from images.docker_engine import Image, platform_here, refuse_silent, require_image
from images.errors import ImageProblem, UsageProblem
from images.registry import (
    IMAGE_ID,
    Reference,
    Wire,
    cause,
    of_platform,
    parse_reference,
    read_manifest,
    require_skopeo,
    resolve,
    same_platform,
)
from images.yaml_source import shown

MARGIN_BYTES = 32 << 20  # manifests, tar headers, what a file system needs itself


@dataclass(frozen=True)
class Source:
    """Where an image comes from, declared by how it is named and never guessed.

    Exactly one of the three: `engine` a name or id in the Docker engine, `reference` a registry's (docker://…),
    `archive` a file. `recorded` is the digest the engine's image must have, where NAME:tag@sha256:… gave one.
    """

    text: str
    engine: str | None = None
    reference: Reference | None = None
    archive: Path | None = None
    recorded: str | None = None


@dataclass(frozen=True)
class Staged:
    """An image in `folder` as skopeo's `dir:`, with its manifest's bytes, its configuration and its name.

    `source_digest` is what the registry's reference resolved to (an index, or the manifest), null for an engine.
    """

    folder: Path
    manifest: bytes
    config: bytes
    name: str | None
    source_digest: str | None

    @property
    def platform(self) -> str:
        """os/arch[/variant] of the image."""
        return config_platform(self.config)


def parse_source(text: str) -> Source:
    """Read where an image comes from: docker://REF, a file, or a name or id in the Docker engine.

    Raises UsageProblem for anything else.
    """
    if text.startswith("docker://"):
        return Source(text, reference=parse_reference(text.removeprefix("docker://")))
    file = Path(text.removeprefix("oci-archive:"))
    if text.startswith("oci-archive:") or file.name.endswith(".tar"):
        return Source(text, archive=file)
    name = text.removeprefix("docker-daemon:")
    if IMAGE_ID.fullmatch(name):
        return Source(text, engine=name)
    reference = parse_reference(name)
    if reference.tag and reference.digest:
        return Source(text, engine=f"{reference.name}:{reference.tag}", recorded=reference.digest)
    return Source(text, engine=name)


@contextmanager
def workspace(beside: Path | None = None) -> Iterator[Path]:
    """A folder for what is under way, removed at the end whatever happens."""
    if beside is None:
        folder = Path(tempfile.mkdtemp(prefix="station-recipes-"))
    else:
        folder = Path(tempfile.mkdtemp(prefix=f".{beside.name}.", dir=beside.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def disk(where: Path) -> Iterator[None]:
    """Turn a full disk into one sentence: an ImageProblem."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise ImageProblem(f"the disk of {shown(where)} is full: free some space, or use a larger one") from None
        raise ImageProblem(f"{shown(where)}: {error.strerror or error}") from None


def require_space(folder: Path, wanted: int, why: str) -> None:
    """Raise ImageProblem when the disk of `folder` has less than `wanted` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < wanted + MARGIN_BYTES:
        raise ImageProblem(
            f"{why} needs {(wanted + MARGIN_BYTES) / 1e6:,.0f} MB in {shown(folder)}, {free / 1e6:,.0f} MB are free. "
            "Free some space, or use a folder on a larger disk (TMPDIR for what is under way)."
        )


def folder_bytes(folder: Path) -> int:
    """The bytes of the files in a folder, which may change meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                continue  # renamed or gone since
    return total


def grown(folder: Path, total: int) -> Callable[[], dict]:
    """What a stage shows while `folder` grows to about `total` bytes."""

    def watch() -> dict:
        done = folder_bytes(folder)
        return {"status": f"{done / 1e6:,.0f} of about {total / 1e6:,.0f} MB", "done": min(done, total), "total": total}

    return watch


def skopeo_copy(
    options: Sequence[str], source: str, target: str, said: str, cwd: Path, watch: Callable | None = None
) -> None:
    """Copy by skopeo, shown. Raises ImageProblem with the cause in one sentence; it runs in `cwd`."""
    require_skopeo()
    _carry_out(["skopeo", "--tmpdir", ".", "copy", *options, source, target], said, cwd, watch)


def _carry_out(argv: Sequence[str], said: str, cwd: Path, watch: Callable | None) -> None:
    """Run a copying command in `cwd`. Its log is not there: what fills that disk must not swallow the reason."""
    with tempfile.NamedTemporaryFile(prefix="station-recipes-") as file:
        log = Path(file.name)
        if run_shown(argv, said, log, cwd=cwd, watch=watch) == 0:
            return
        words = tail(log)
    refuse_silent(words)
    why = cause(words)[1]
    if "log is empty" in words:
        free = shutil.disk_usage(cwd).free
        why = f"it gave no reason; a full disk does that ({free / 1e6:,.0f} MB are free in {shown(cwd.parent)} now)"
    raise ImageProblem("\n".join([*words.splitlines()[-2:], f"{said} failed: {why}."]))


def require_recorded(source: Source, image: Image) -> None:
    """Raise ImageProblem when the engine's image is not the one that NAME:tag@sha256:… records: both are named."""
    known = {image.id, *(digest.rpartition("@")[2] for digest in image.digests)}
    if source.recorded and source.recorded not in known:
        raise ImageProblem(
            f"{source.engine} has moved: the engine has {', '.join(sorted(known))} now, recorded is {source.recorded}."
        )


def stage_image(source: Source, folder: Path, wire: Wire, platform: str | None = None) -> Staged:
    """Bring one platform's image into `folder`, which must be empty and on a disk with room for it.

    Raises ImageProblem: the image, the engine, the registry or skopeo absent, a moved tag, another platform, a disk
    that is full, an archive that is not whole.
    """
    require_skopeo()
    if source.engine:
        staged = _from_engine(source, folder)
    elif source.reference:
        staged = _from_registry(source.reference, folder, wire, platform or platform_here())
    else:
        staged = _from_archive(source.archive, folder, platform)
    if platform and not same_platform(staged.platform, platform):
        raise ImageProblem(f"{source.text} is an image for {staged.platform}, not {platform}.")
    return staged


def _from_engine(source: Source, folder: Path) -> Staged:
    by_name = not IMAGE_ID.fullmatch(source.engine)
    image = require_image(source.engine, f"To take it from its registry: docker://{source.engine}" if by_name else "")
    require_recorded(source, image)
    # The engine gives layers uncompressed; with the compressed ones that is twice the image at most.
    require_space(folder, 2 * image.size_bytes, f"reading {source.engine} out of the engine")
    tar, content = folder / "image.tar", folder / "content"
    argv = ["docker", "save", "--output", tar.name, image.id]  # by id: the name may move meanwhile
    reading = f"Reading {source.engine} out of the Docker engine"
    _carry_out(argv, reading, folder, grown(folder, image.size_bytes))
    content.mkdir()
    skopeo_copy(["--dest-compress"], f"docker-archive:{tar.name}", "dir:content", "Compressing its layers", folder)
    tar.unlink()
    manifest = (content / "manifest.json").read_bytes()
    config = (content / read_manifest(manifest, source.engine)["config"]["digest"][7:]).read_bytes()
    name = source.engine if by_name and "@" not in source.engine else None
    return Staged(content, oci_manifest(manifest), config, name, None)


def _from_registry(reference: Reference, folder: Path, wire: Wire, platform: str) -> Staged:
    digest, manifest = resolve(reference, wire)
    found, chosen = read_manifest(manifest, str(reference)), digest
    if "manifests" in found:
        chosen, manifest = resolve(reference.at(of_platform(found, platform, str(reference))), wire)
        found = read_manifest(manifest, str(reference))
    sizes = [int(part.get("size", 0)) for part in (found["config"], *found["layers"])]
    require_space(folder, sum(sizes) + max(sizes), f"copying {reference}")
    content = folder / "content"
    content.mkdir()
    options = ["--preserve-digests", *wire.options(reference, "src-")]
    copying = f"Copying {reference} from its registry"
    from_where = reference.at(chosen).for_skopeo()
    skopeo_copy(options, from_where, "dir:content", copying, folder, grown(content, sum(sizes)))
    copied = (content / "manifest.json").read_bytes()
    if copied != manifest:
        raise ImageProblem(f"{reference}: the registry gave another manifest than {chosen} when it was copied")
    config = (content / found["config"]["digest"][7:]).read_bytes()
    # Without a tag the digest is its name; an engine can't have that as a tag.
    return Staged(content, manifest, config, f"{reference.name}:{reference.tag}" if reference.tag else None, digest)


def _from_archive(file: Path, folder: Path, platform: str | None) -> Staged:
    archive = open_archive(file, platform or platform_here())
    total = sum(layer.size for layer in archive.layers)
    require_space(folder, total, f"unpacking {shown(file)}")
    content = folder / "content"
    content.mkdir()
    with counted(f"Checking the layers of {shown(file)}", total) as progress:
        unpack(archive, content, progress)
    return Staged(content, archive.manifest, archive.config, archive.name, None)


def open_archive(file: Path, platform: str) -> Archive:
    """Read an archive's structure. Raises UsageProblem for no such file, ImageProblem when it is not whole."""
    if not file.is_file():
        raise UsageProblem(f"{shown(file)}: there is no such file")
    return read_archive(file, platform)


@contextmanager
def counted(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A stage that counts bytes: yields a function for the bytes that have come."""
    with stage(description) as update:
        done = 0

        def progress(count: int) -> None:
            nonlocal done
            done += count
            update(status=f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB", done=done, total=total or None)

        yield progress
