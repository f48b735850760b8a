"""Room recipes: bundles in registries: an OCI artifact NAME:VERSION, one layer, the tar byte for byte; moved by skopeo.

skopeo and not a Python client, since it moves every image here already: one place for logins, certificates and
proxies, and it holds each blob against its digest.
"""

import hashlib
import json
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from images.errors import BundleProblem, ImageProblem, UsageProblem
from images.registry import Reference, Wire, ask, digest_of, parse_reference, resolve
from images.staging import disk, require_space, skopeo_copy, workspace
from images.yaml_source import shown
from recipes.bundle.layout import GB, BundleInfo
from recipes.bundle.read import Limits, unpacked

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.station-recipes.bundle.v1"
CONFIG_TYPE = "application/vnd.station-recipes.bundle.config.v1+json"
LAYER_TYPE = "application/vnd.station-recipes.bundle.v1.tar"
KEYS = "io.station-recipes."
TITLE = "org.opencontainers.image.title"
VERSION = "org.opencontainers.image.version"
CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class Artifact:
    """A bundle in a registry. `annotations` are its manifest's, without our prefix; `file` where it was pulled to."""

    reference: str
    digest: str
    size: int
    annotations: Mapping[str, str]
    file: Path | None = None


def annotations(info: BundleInfo, content: str) -> dict[str, str]:
    """What a registry says of a bundle without anyone pulling it."""
    said = {
        "recipe": info.recipe,
        "title": info.title,
        "status": info.status,
        "content": content,
        "machine": ",".join(info.machines),
        "engine": f"{info.engine.image} {info.engine.version}",
        "device": info.engine.device,
        "platform": info.platform or "any",
        "signer": info.signer or "",
        "runs": ",".join(f"{run.machine} {run.state}" for run in info.runs),
    }
    return {TITLE: info.recipe, VERSION: info.version, **{KEYS + key: value for key, value in said.items()}}


def artifact_manifest(info: BundleInfo, content: str, layer: str, size: int, config: bytes) -> bytes:
    """The manifest of a bundle's artifact: the same bytes for the same bundle."""
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": digest_of(config), "size": len(config)},
        "layers": [
            {
                "mediaType": LAYER_TYPE,
                "digest": layer,
                "size": size,
                "annotations": {TITLE: f"{info.recipe.replace('/', '-')}-{info.version}.tar"},
            }
        ],
        "annotations": annotations(info, content),
    }
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def push_bundle(file: Path, to: str, wire: Wire, move_tag: bool, limits: Limits) -> Artifact:
    """Push a bundle's tar to HOST/NAME[:VERSION] and prove that it is there; the tag is the bundle's version.

    It is read and checked first: what is broken is not handed on. Raises UsageProblem for a tag that is not the
    version, ImageProblem where the registry refuses, or has another bundle under this version.
    """
    target = parse_reference(to)
    if target.digest:
        raise UsageProblem(f"{to}: push to a name and a version, not to a digest")
    wire.require_use([target])
    with workspace() as folder:
        with unpacked(file, folder / "read", limits) as bundle:
            info, content = bundle.info, bundle.content
        if target.tag not in {None, info.version}:
            raise UsageProblem(
                f"{to}: the bundle is version {info.version}, so that is its tag; bundle it anew for another"
            )
        target = Reference(target.name, info.version)
        art = folder / "content"
        art.mkdir()
        layer = _put(art, file)
        config = info.model_dump_json(by_alias=True).encode()
        (art / digest_of(config)[7:]).write_bytes(config)
        manifest = artifact_manifest(info, content, layer, file.stat().st_size, config)
        (art / "manifest.json").write_bytes(manifest)
        (art / "version").write_text("Directory Transport Version: 1.1\n")
        digest = digest_of(manifest)
        has = ask(target, wire)
        if has.state not in {"ok", "gone"}:
            raise ImageProblem(f"{target}: {has.reason}")
        if has.digest and has.digest != digest and not move_tag:
            raise ImageProblem(
                f"{target} is another bundle there: {has.digest}, this is {digest}. A version is never given twice: "
                "bundle it with another --version, or --move-tag"
            )
        options = ["--preserve-digests", *wire.options(target, "dest-")]
        skopeo_copy(options, "dir:content", target.for_skopeo(), f"Pushing {info.recipe} to {target}", folder)
    back = ask(target, wire)
    if back.digest != digest:
        raise ImageProblem(f"{target}: the registry gives {back.digest or back.reason} back, {digest} was pushed")
    return Artifact(f"{target}@{digest}", digest, file.stat().st_size, annotations(info, content))


def _put(folder: Path, file: Path) -> str:
    """The tar as a blob named by its hash; returns its digest."""
    with file.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    (folder / digest).symlink_to(file.resolve())
    return f"sha256:{digest}"


def describe(reference: Reference, wire: Wire) -> tuple[Artifact, dict]:
    """What a registry says of a bundle: its artifact and its one layer; nothing of it is pulled.

    Raises ImageProblem where there is none, BundleProblem for anything but a bundle of ours.
    """
    digest, manifest = resolve(reference, wire)
    try:
        found = json.loads(manifest)
        layers, told = found.get("layers"), found.get("annotations") or {}
        config = found.get("config") or {}
        ours = config.get("mediaType") == CONFIG_TYPE
        layer = layers[0] if isinstance(layers, list) and len(layers) == 1 else {}
        ours = ours and layer.get("mediaType") == LAYER_TYPE and isinstance(layer.get("size"), int)
        ours = ours and str(layer.get("digest")).startswith("sha256:") and layer["size"] >= 0
        ours = ours and 0 <= config.get("size", -1) <= CONFIG_BYTES
        told = {str(key).removeprefix(KEYS): str(value) for key, value in told.items() if str(key).startswith(KEYS)}
    except (ValueError, TypeError, AttributeError, RecursionError):
        ours = False
    if not ours:
        raise BundleProblem(
            f"{reference} is no bundle of ours: wanted an artifact with one layer of type {LAYER_TYPE}. An image is "
            "taken by ./inv image.mirror"
        )
    told["version"] = str((found.get("annotations") or {}).get(VERSION, ""))
    return Artifact(f"{reference.name}@{digest}", digest, layer["size"], told), layer


def pull_artifact(text: str, out: Path, wire: Wire, limits: Limits) -> Artifact:
    """Pull a bundle's tar to `out`, which must not be there; its digest is checked on the way.

    Raises ImageProblem where the registry gives none, BundleProblem for no bundle, or one that is too large.
    """
    reference = parse_reference(text)
    wire.require_use([reference])
    if out.exists() or out.is_symlink():
        raise UsageProblem(f"{shown(out)} is there already; nothing is replaced")
    artifact, layer = describe(reference, wire)
    if artifact.size > limits.total_bytes:
        raise BundleProblem(
            f"{reference} has {artifact.size / GB:.1f} GB, the most is {limits.total_bytes / GB:g}: --max-gb, if you "
            "expect that"
        )
    with disk(out.parent), workspace(out) as folder:
        require_space(folder, artifact.size, f"pulling {reference}")
        (folder / "content").mkdir()
        options = ["--preserve-digests", *wire.options(reference, "src-")]
        source = reference.at(artifact.digest).for_skopeo()
        with _no_file_larger(artifact.size + CONFIG_BYTES):
            skopeo_copy(options, source, "dir:content", f"Pulling {reference}", folder)
        blob = folder / "content" / layer["digest"][7:]
        with blob.open("rb") as opened:
            same = f"sha256:{hashlib.file_digest(opened, 'sha256').hexdigest()}" == layer["digest"]
            if not same or opened.tell() != artifact.size:
                raise BundleProblem(f"{reference}: the registry gave another file than its manifest names")
        blob.rename(out)
    return Artifact(artifact.reference, artifact.digest, artifact.size, artifact.annotations, out)


@contextmanager
def _no_file_larger(size: int) -> Iterator[None]:
    """While it lasts, programs that we start can write no file larger than what was announced, in bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
