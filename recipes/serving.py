"""Room recipes: a recipe as a service of a host: unit, lock, model and image, as the roles' variables."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from images.archive import file_sha256
from images.console import stage
from images.declaration import MACHINES, declaration
from images.declared import pull_references
from images.errors import UsageProblem
from images.registry import same_platform
from images.staging import open_archive
from images.yaml_source import shown
from recipes.load import Loaded
from recipes.lock import Images, make_lock
from recipes.machine import gpu_device, load_machines, machine_profile, require_applies
from recipes.render import container_name, render
from recipes.rules import require_rules
from recipes.schema import Machine
from recipes.spec import IMAGE, IMAGE_ID, ServingSpec, container, serving_spec

MODELS_ON_HOST = "/var/lib/station-recipes/models"
NAME_ON_HOST = "Name it for this host: preflight_gpu in the inventory, or --set preflight_gpu=UUID"
UNPACKED = 3  # an archive's size, copied over and unpacked, at most so many times itself: layers are compressed


@dataclass(frozen=True)
class HostImage:
    """How hosts come by the engine's image. `reference`: NAME@sha256:… or an id; `ids`: other ids of the same image.

    `platform` is None where only the registry knows it. `archive` has `size` bytes and this SHA-256.
    """

    reference: str
    ids: tuple[str, ...] = ()
    platform: str | None = None
    archive: Path | None = None
    sha256: str = ""
    size: int = 0


@dataclass(frozen=True)
class Service:
    """What a host is to serve; role serving keeps it there as JSON. `unit` is the systemd unit's text."""

    name: str
    recipe: str
    unit: str
    lock: dict
    image: str
    url: str
    served_name: str
    ready_timeout_s: int
    user: int
    cache: str
    device: str | None
    model_path: str | None
    model_files: dict[str, str]
    api_key_env: str | None


def host_image(text: str | None, loaded: Loaded, platform: str) -> HostImage:
    """What `--image` means: NAME@sha256:…, the id of an image that the host has, an archive's file; else the declared.

    Raises UsageProblem for anything else, ImageProblem for an archive that is cut short, altered or of another
    platform than the host's, such as linux/arm64.
    """
    if text is None:
        name = loaded.recipe.engine.image
        declared = pull_references(name, platform) if declaration(name).sources.pull else []
        if not declared:
            raise UsageProblem(
                f"{loaded.recipe.id}: no digest of the image {name} for {platform} is declared. Name one: --image "
                "NAME@sha256:…, an archive's file (./inv image.save), or sha256:… of an image that the host has"
            )
        return HostImage(declared[0])
    if IMAGE.fullmatch(text) or IMAGE_ID.fullmatch(text):
        return HostImage(text)
    file = Path(text)
    if not file.is_file():
        raise UsageProblem(
            f"--image {text}: wanted NAME@sha256:…, sha256:… of an image the host has, or an archive's file"
        )
    archive = open_archive(file, platform)
    if not same_platform(archive.platform, platform):
        raise UsageProblem(f"{shown(file)} is an image for {archive.platform}, the host runs {platform}: save that one")
    ids = (archive.manifest_digest,)
    size = file.stat().st_size
    return HostImage(archive.image_id, ids, archive.platform, file, _sha256(file), size)


def _sha256(file: Path) -> str:
    """An archive's SHA-256 as it was saved. Raises UsageProblem where it is another, or nobody wrote it down."""
    written = file.with_name(file.name + ".sha256")
    if not written.is_file():
        raise UsageProblem(f"{shown(file)} has no {written.name} beside it: bring it along from where it was saved")
    wanted, size = written.read_text(errors="replace").split()[:1], file.stat().st_size
    with stage(f"Checking {shown(file)}") as update:
        found = file_sha256(file, lambda done: update(f"{done / 1e6:,.0f} MB", done, size))
    if [found] != wanted:
        raise UsageProblem(f"{shown(file)} is not the file that was saved: its SHA-256 is {found}, not {wanted}")
    return found


def platform_of(facts: dict) -> str:
    """A host's platform, such as linux/arm64.

    Raises UsageProblem for an architecture that no image is made for. What a host says of itself becomes a variable of
    the roles here, so nothing but a word of ours may come through.
    """
    if facts["architecture"] not in MACHINES:
        raise UsageProblem(f"architecture: found {facts['architecture']!r}, wanted {' or '.join(MACHINES)}")
    return MACHINES[facts["architecture"]]


def hosted_path(loaded: Loaded) -> str | None:
    """Where hosts keep a model of this repository: named by the hashes of its files, so that content never changes."""
    model = loaded.recipe.model
    if model.path is None:
        return None
    named = hashlib.sha256(json.dumps(model.files, sort_keys=True).encode()).hexdigest()[:16]
    return f"{MODELS_ON_HOST}/{loaded.recipe.family}-{named}"


def hosted(loaded: Loaded, spec: ServingSpec) -> ServingSpec:
    """The spec as a host serves it: the model at its place there, everything else the same."""
    path = hosted_path(loaded)
    if path is None:
        return spec
    argv = tuple(path if argument == str(spec.model_path) else argument for argument in spec.argv)
    return replace(spec, argv=argv, model_path=Path(path))


def service(loaded: Loaded, image: HostImage, facts: dict, wanted: Mapping[str, str]) -> Service:
    """Render a recipe for a host by its facts; `wanted` has cache, gpu (a UUID or nothing), device (CDI or nothing).

    Raises UsageProblem where the recipe can't run there, has no single GPU to run on, or isn't what it says.
    """
    require_rules(loaded)
    require_applies(loaded.recipe, facts)
    profile = machine_profile(facts, load_machines())
    spec = hosted(loaded, serving_spec(loaded, profile))
    device = wanted["device"] or _device(loaded, facts, profile, wanted["gpu"])
    box = container(loaded, image.reference, device, Path(wanted["cache"]))
    lock = make_lock(loaded, facts, Images({platform_of(facts): image.reference}))
    return Service(
        name=container_name(spec.recipe_id),
        recipe=spec.recipe_id,
        unit=render("systemd", spec, box),
        lock={key: value for key, value in lock.items() if key != "machine"},  # it changes by the minute
        image=image.reference,
        url=spec.url,
        served_name=spec.served_name,
        ready_timeout_s=spec.ready_timeout_s,
        user=box.user,
        cache=str(box.cache),
        device=device,
        model_path=None if spec.model_path is None else str(spec.model_path),
        model_files=dict(loaded.recipe.model.files) if spec.model_path else {},
        api_key_env=spec.api_key_env,
    )


def _device(loaded: Loaded, facts: dict, profile: Machine, gpu: str) -> str | None:
    """The CDI name of the one GPU; the inventory's choice goes before, if the host has it."""
    if gpu and declaration(loaded.recipe.engine.image).device == "cuda":
        facts = {**facts, "gpus": [each for each in facts["gpus"] if each["uuid"] == gpu]}
    return gpu_device(loaded.recipe, facts, profile, remedy=NAME_ON_HOST)


def weights_variables(loaded: Loaded) -> dict[str, object]:
    """The roles' variables about a recipe's model, and the user and port that it is served by."""
    model = loaded.recipe.model
    fetched = {"repo": model.repo, "revision": model.revision, "files": dict(model.files)}
    return {
        "station_uid": loaded.recipe.runtime.user,
        "station_ports": [loaded.recipe.runtime.port],
        "model_cache_models": [fetched] if model.repo else [],
    }


def variables(loaded: Loaded, image: HostImage, told: Service, facts: dict, file: Path) -> dict[str, object]:
    """The roles' variables of one host; `file` is where `told` is written on this machine, for role serving."""
    model = loaded.recipe.model
    file.write_text(json.dumps(asdict(told)), encoding="utf-8")
    return {
        **weights_variables(loaded),
        "engine_image_reference": image.reference,
        "engine_image_ids": list(image.ids),
        "engine_image_platform": platform_of(facts),
        "engine_image_archive": str(image.archive.absolute()) if image.archive else "",
        "engine_image_sha256": image.sha256,
        "engine_image_need_gb": round(UNPACKED * image.size / 1e9, 1),
        "serving_file": str(file),
        "serving_model": str((loaded.folder / model.path).resolve()) if model.path else "",
    }
