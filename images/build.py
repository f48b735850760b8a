"""Room images: from a declaration to an image in the Docker engine: pulled by digest, or built from pinned wheels."""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from images.base import BaseImage, ensure_base
from images.command import run, run_shown, tail
from images.context import context_identity, render_dockerfile, write_context
from images.declaration import Build, Declaration, declaration
from images.docker_engine import LABEL, DockerEngine, Image, docker_engine, engine_host, find_image, is_local
from images.engine import build_lock, declared_patches
from images.errors import EngineProblem, UsageProblem
from images.index import cache_root
from images.wheels import Wheelhouse, ensure_wheels

IDENTITY = f"{LABEL}.identity"
STAGE = f"{LABEL}.stage"
# All that two builds from the same pins on the same base may differ in: bytecode holds reference flags that depend on
# what else the compiling process had in hand. Seen: 1 file of 30,000.
MAY_DIFFER = ("*.pyc",)
CAUSES = (
    ("no space left on device", "the disk of the Docker engine is full: free some space there and run again"),
    ("do not match the hashes", "a wheel isn't the pinned one: remove the wheels in the cache and run again"),
    ("hash mismatch", "a wheel isn't the pinned one: remove the wheels in the cache and run again"),
    ("exec format error", "the base is for another architecture than the Docker engine's"),
    ("temporary failure resolving", "apt found no network: the base lacks packages that the build must install"),
    ("unknown instruction", "this Docker engine doesn't know an instruction of the Dockerfile"),
)


@dataclass(frozen=True)
class Order:
    """What is wanted of `./inv build`. None: as image.yaml declares. `base`: NAME@sha256:…; `mirrors`: asked first."""

    image: str
    source: str | None = None
    base: str | None = None
    platform: str | None = None
    cuda_archs: tuple[str, ...] = ()
    again: bool = False
    mirrors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Built:
    """An image in the Docker engine. `digest` is the registry's NAME@sha256:…, None for a local build.

    `id` is sha256:… of its configuration; `version` the engine's; `fresh` is false where an earlier build was used.
    """

    name: str
    source: str
    id: str
    digest: str | None
    identity: str
    version: str
    platform: str
    size_bytes: int
    fresh: bool
    patches: tuple[dict, ...]

    @property
    def reference(self) -> str:
        """How a container names it: the registry's digest, else the id."""
        return self.digest or self.id

    def command(self) -> list[str]:
        """The start of every vLLM command line in a container of it."""
        return ["vllm"]


def build_image(order: Order) -> Built:
    """Pull or build an image, unless the engine holds it already.

    Raises UsageProblem for an order that can't be, EngineProblem when Docker fails; nothing half-made is kept.
    """
    facts = declaration(order.image)
    source = order.source or facts.source
    if getattr(facts.sources, source, None) is None:
        declared = [name for name in ("pull", "build") if getattr(facts.sources, name)]
        raise UsageProblem(
            f"{facts.name} can't come from source {source!r}; image.yaml declares: {', '.join(declared)}"
        )
    engine = docker_engine()
    if order.platform and order.platform != engine.platform:
        raise UsageProblem(
            f"--platform {order.platform}: the Docker engine runs {engine.platform}, and an image is proved by running "
            "it. Point DOCKER_HOST at a machine of that architecture"
        )
    return _pull(facts, engine, order.mirrors) if source == "pull" else _build(facts, order, engine)


def _pull(facts: Declaration, engine: DockerEngine, mirrors: tuple[str, ...] = ()) -> Built:
    pull = facts.sources.pull
    platform = pull.platforms.get(engine.platform)
    if platform is None or platform.digest is None:
        raise UsageProblem(missing_digest(facts, engine.platform))
    said = []
    for repository in (*mirrors, *pull.repositories):
        reference = f"{repository}@{platform.digest}"
        image = find_image(reference)
        fresh = image is None
        if fresh:
            log = _log(facts.name)
            code = run_shown(["docker", "pull", "--platform", engine.platform, reference], f"pulling {reference}", log)
            image = find_image(reference) if code == 0 else None
            if image is None:
                said.append(f"{repository}: {tail(log, 2)}")
                continue
        if image.platform != engine.platform:
            raise EngineProblem(
                f"{reference} is for {image.platform}, wanted {engine.platform}: a wrong digest was declared"
            )
        return _built(facts, "pull", image, reference, platform.digest[7:23], facts.version, fresh)
    raise EngineProblem("no repository has the image:\n" + "\n".join(f"  {line}" for line in said))


def held_image(name: str, image_id: str) -> Built:
    """The image of an engine that something runs already, told by its labels or its declared digest.

    Raises EngineProblem where it is no image of that engine, or one of another version of this repository.
    """
    facts, image = declaration(name), find_image(image_id)
    if image is None:
        raise EngineProblem(f"the Docker engine has no image {image_id}")
    pull, labels = facts.sources.pull, image.labels
    digest = pull.platforms[image.platform].digest if pull and image.platform in pull.platforms else None
    for reference in image.digests:
        if digest and reference.endswith(f"@{digest}"):
            return _built(facts, "pull", image, reference, digest[7:23], facts.version, fresh=False)
    patches = json.dumps(list(declared_patches(name)), sort_keys=True)
    if labels.get(f"{LABEL}.image") != name or IDENTITY not in labels or labels.get(f"{LABEL}.patches") != patches:
        raise EngineProblem(f"{image_id} is not this version's {name} image: neither its labels nor its digest say so")
    return _built(facts, "build", image, None, labels[IDENTITY], engine_version(facts), fresh=False)


def missing_digest(facts: Declaration, platform: str) -> str:
    """Why an image can't be pulled yet, how to find what is missing, and what stands in for it."""
    lines = [
        f"{facts.name}: the digest of {facts.version} for {platform} is not known, so it can't be pulled.",
        f"How to find it: {facts.sources.pull.how_to_find}.",
        f"Write it to sources.pull.platforms.{platform}.digest in images/{facts.name}/image.yaml.",
    ]
    if facts.sources.build and facts.sources.build.stands_for:
        build = facts.sources.build
        lines.append(
            f"A substitute can be built: --source build makes {build.release or build.commit} ({build.stands_for})."
        )
    return "\n".join(lines)


def engine_version(facts: Declaration) -> str:
    """The version a build of this declaration answers: the release, or what the commit's image declares."""
    build = facts.sources.build
    return build.release or facts.version


def _build(facts: Declaration, order: Order, engine: DockerEngine) -> Built:
    build = facts.sources.build
    if engine.platform not in build.platforms:
        raise UsageProblem(
            f"{facts.name} is not built for {engine.platform}; image.yaml names {', '.join(build.platforms)}"
        )
    log = _log(facts.name)
    base = ensure_base(build, order.base, engine, log)
    wheel = build.wheels.get(engine.platform)
    outside = (facts.distribution, engine_version(facts), wheel) if build.commit and wheel else None
    house = ensure_wheels(facts.name, engine.platform, base.python, facts.requires, outside)
    values = dockerfile_values(facts, build, order, engine, base, house)
    identity = context_identity(facts, house, render_dockerfile(facts.name, {**values, "identity": ""}), base.id)
    tag = f"station-recipes/{facts.name}:{identity}"
    with build_lock(cache_root() / "images" / identity):  # two runs at once: one builds, the other finds it built
        found = None if order.again else find_image(tag)
        if found and found.labels.get(IDENTITY) == identity:
            return _built(facts, "build", found, None, identity, engine_version(facts), fresh=False)
        _check_disk(build)
        values["labels"] = {**values["labels"], IDENTITY: identity}
        dockerfile = render_dockerfile(facts.name, {**values, "identity": identity})
        _docker_build(facts, house, dockerfile, identity, tag, bool(base.install), log)
        image = find_image(tag)
    if image is None:
        raise EngineProblem(f"{tag} was built and is gone again: does something prune this Docker engine?")
    return _built(facts, "build", image, None, identity, engine_version(facts), fresh=True)


def dockerfile_values(
    facts: Declaration, build: Build, order: Order, engine: DockerEngine, base: BaseImage, house: Wheelhouse
) -> dict[str, object]:
    archs = order.cuda_archs or tuple(build.cuda_archs)
    pins = {pin.name: pin.version for pin in house.pins}
    labels = {
        "org.opencontainers.image.title": facts.title,
        "org.opencontainers.image.version": engine_version(facts),
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.base.name": base.reference,
        "org.opencontainers.image.base.digest": base.id,
        f"{LABEL}.image": facts.name,
        f"{LABEL}.pins": json.dumps(pins, sort_keys=True, separators=(",", ":")),
        f"{LABEL}.patches": json.dumps(list(declared_patches(facts.name)), sort_keys=True),
    }
    return {
        "base": base.reference,
        "install": base.install,
        "python": base.python,
        "uid": build.uid,
        "cuda_archs": archs,
        "platform": engine.platform,
        "labels": labels,
    }


def _check_disk(build: Build) -> None:
    """Raise EngineProblem where a disk of this machine lacks space; another machine's engine says so itself."""
    folders = [cache_root()]
    if is_local(engine_host()):
        asked = run(["docker", "info", "--format", "{{.DockerRootDir}}"]).stdout.strip()
        folders = [Path(asked or "/"), *folders]
    for folder in folders:
        if not folder.is_dir():
            continue  # a local engine in a machine of its own, as on a desktop
        free_gb = shutil.disk_usage(folder).free / 1e9
        if free_gb < build.disk_gb:
            raise EngineProblem(
                f"the build needs {build.disk_gb} GB in {folder}, {free_gb:.1f} GB are free: free some space there"
            )


def _docker_build(
    facts: Declaration, house: Wheelhouse, dockerfile: str, identity: str, tag: str, network: bool, log: Path
) -> None:
    folder = cache_root() / "contexts"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as context:
            write_context(Path(context), facts, house, dockerfile)
            argv = ["docker", "build", "--network", "host" if network else "none", "--force-rm", "--tag", tag, context]
            if run_shown(argv, f"building {facts.title}", log) != 0:
                raise EngineProblem(explain(log))
    finally:
        # The stage with the wheels is needed no more. Its label is ours alone.
        run(["docker", "image", "prune", "--force", "--filter", f"label={STAGE}={identity}"])


def explain(log: Path) -> str:
    """The last words of a failed build, the likely cause, and where the whole log is."""
    said = tail(log)
    cause = next((remedy for sign, remedy in CAUSES if sign in said.lower()), "Docker's last words are above")
    return f"{said}\n\nThe image could not be built: {cause}. Whole log: {log}"


def _log(name: str) -> Path:
    log = cache_root() / "logs" / f"build-{name}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
    except OSError as error:
        raise EngineProblem(f"can't write to {log.parent}: {error.strerror}. Set STATION_RECIPES_CACHE") from error
    return log


def _built(
    facts: Declaration, source: str, image: Image, digest: str | None, identity: str, version: str, fresh: bool
) -> Built:
    patches = declared_patches(facts.name) if source == "build" else ()
    return Built(
        name=facts.name,
        source=source,
        id=image.id,
        digest=digest,
        identity=identity,
        version=version,
        platform=image.platform,
        size_bytes=image.size_bytes,
        fresh=fresh,
        patches=patches,
    )
