"""Room images: an image kept when its registry forgets it: put into another registry, and proved by its digest."""

import re
from dataclasses import dataclass
from pathlib import Path

from images.archive import CHUNK, Blob, config_platform, open_blob
from images.console import note
from images.docker_engine import platform_here
from images.errors import ImageProblem, UsageProblem
from images.registry import (
    Reference,
    Wire,
    ask,
    config_bytes,
    digest_of,
    of_platform,
    parse_reference,
    read_manifest,
    require_skopeo,
    resolve,
)
from images.staging import Source, disk, parse_source, require_space, skopeo_copy, stage_image, workspace


@dataclass(frozen=True)
class Mirrored:
    """An image that a registry has now, as `reference` NAME@sha256:… . `verified`: pulled back whole and compared."""

    image: str
    reference: str
    tag: str
    digest: str
    image_id: str | None
    platforms: tuple[str, ...]
    verified: bool


def mirror_image(
    image: str,
    to: str,
    wire: Wire | None = None,
    platform: str | None = None,
    every: bool = False,
    verify: bool = False,
    expect: str | None = None,
    move_tag: bool = False,
) -> Mirrored:
    """Push an image to another registry and prove by its digest that the registry gives the same one back.

    From a registry the manifests are kept byte for byte: one platform's, or with `every` the index and all it names.
    `expect` is the digest recorded for `image`. Raises UsageProblem for wrong names, ImageProblem for a moved tag, a
    registry that is away or goes away, another image under the target's tag (unless `move_tag`), or a digest that
    does not come back.
    """
    source, target, wire = parse_source(image), parse_reference(to.removeprefix("docker://")), wire or Wire()
    if target.digest or target.host == "docker.io":
        raise UsageProblem(f"--to {to}: wanted REGISTRY/NAME[:TAG] with the registry's host, and no digest")
    if every and not source.reference:
        raise UsageProblem("--all copies every platform from a registry: docker://NAME; an engine or a file has one")
    wire.require_use([reference for reference in (source.reference, target) if reference])
    require_skopeo()
    with workspace() as folder, disk(folder):
        if source.reference:
            digest, manifest, target = _copy(source.reference, target, wire, platform, every, expect, move_tag, folder)
        else:
            digest, manifest, target = _push(source, target, wire, platform, expect, move_tag, folder)
        there = target.at(digest)
        came = ask(there, wire)
        if came.state != "ok" or came.manifest != manifest:
            raise ImageProblem(f"{target.name} does not give {digest} back: {came.reason or 'its manifest is another'}")
        image_id, platforms = _image_id(there, manifest, wire)
        if verify:
            _pull_back(there, manifest, wire, every, folder)
    return Mirrored(image, str(there), target.tag, digest, image_id, platforms, verify)


def _tagged(target: Reference, source_tag: str | None, digest: str, wire: Wire, move_tag: bool) -> Reference:
    """The target with a tag (a registry may throw away what has none), when no other image has that tag."""
    tag = target.tag or source_tag or f"sha256-{digest[7:23]}"
    wanted = Reference(target.name, tag)
    has = ask(wanted, wire)
    if has.state not in {"ok", "gone"}:
        raise ImageProblem(f"{wanted}: {has.reason}")
    if has.digest and has.digest != digest and not move_tag:
        raise ImageProblem(
            f"{wanted} is another image there: it names {has.digest}, this is {digest}. Use another tag, or --move-tag."
        )
    return wanted


def _copy(reference, target, wire, platform, every, expect, move_tag, folder) -> tuple[str, bytes, Reference]:
    """Registry to registry: nothing passes this machine's disk but what skopeo streams."""
    digest, manifest = resolve(reference, wire, expect)
    index = "manifests" in read_manifest(manifest, str(reference))
    if index and not every:
        wanted = of_platform(read_manifest(manifest, str(reference)), platform or platform_here(), str(reference))
        digest, manifest = resolve(reference.at(wanted), wire)
    target = _tagged(target, reference.tag, digest, wire, move_tag)
    options = ["--preserve-digests", *(["--all"] if index and every else [])]
    options += [*wire.options(reference, "src-"), *wire.options(target, "dest-")]
    skopeo_copy(
        options, reference.at(digest).for_skopeo(), target.for_skopeo(), f"Mirroring {reference} to {target}", folder
    )
    return digest, manifest, target


def _push(source: Source, target, wire, platform, expect, move_tag, folder) -> tuple[str, bytes, Reference]:
    """From the engine or an archive: brought to a folder first, then pushed as it is."""
    _tagged(target, None, "", wire, move_tag=True)  # a registry that is away is said before anything is read
    staged = stage_image(source, folder, wire, platform)
    digest = digest_of(staged.manifest)
    if expect and expect not in {digest, digest_of(staged.config)}:
        raise ImageProblem(f"{source.text} is {digest} (image id {digest_of(staged.config)}), recorded is {expect}")
    target = _tagged(target, parse_reference(staged.name).tag if staged.name else None, digest, wire, move_tag)
    (staged.folder / "manifest.json").write_bytes(staged.manifest)
    options = ["--preserve-digests", *wire.options(target, "dest-")]
    skopeo_copy(options, "dir:content", target.for_skopeo(), f"Pushing {source.text} to {target}", folder)
    return digest, staged.manifest, target


def _image_id(there: Reference, manifest: bytes, wire: Wire) -> tuple[str | None, tuple[str, ...]]:
    """The mirrored image's id and platform as the registry gives them back; of an index its platforms only."""
    found = read_manifest(manifest, str(there))
    if "manifests" in found:
        parts = (entry.get("platform") or {} for entry in found["manifests"])
        return None, tuple(f"{part.get('os')}/{part.get('architecture')}" for part in parts)
    config = config_bytes(there, wire)
    if digest_of(config) != found["config"]["digest"]:
        raise ImageProblem(f"{there}: the registry gives another configuration back than its manifest names")
    return digest_of(config), (config_platform(config),)


def _pull_back(there: Reference, manifest: bytes, wire: Wire, every: bool, folder: Path) -> None:
    """Pull the image by digest and hold every blob against its name."""
    back = folder / "back"
    back.mkdir()
    found = read_manifest(manifest, str(there))
    require_space(folder, sum(int(part.get("size", 0)) for part in found.get("layers", ())), f"pulling {there} back")
    options = ["--preserve-digests", *(["--all"] if every else []), *wire.options(there, "src-")]
    skopeo_copy(options, there.for_skopeo(), "dir:back", f"Pulling {there.name} back by digest", folder)
    blobs = [file for file in back.iterdir() if re.fullmatch(r"[0-9a-f]{64}(\.manifest\.json)?", file.name)]
    for file in blobs:
        with file.open("rb") as source:
            checked = open_blob(source, Blob(f"sha256:{file.name[:64]}", file.stat().st_size, 0), lambda _count: None)
            while checked.read(CHUNK):
                pass
        checked.require(str(there))
    if not blobs or (back / "manifest.json").read_bytes() != manifest:
        raise ImageProblem(f"{there}: what came back is not what was pushed")
    note(f"Pulled back by digest: {len(blobs)} blobs and the manifest are the same bytes.")
