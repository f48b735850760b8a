"""Room recipes: from a checked recipe to what is started: one argv, one environment, for every target."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from images.errors import UsageProblem
from recipes.load import Loaded
from recipes.schema import FlagValue, Machine

IMAGE = re.compile(
    r"(?:[a-z0-9][a-z0-9.-]*:[0-9]{1,5}/)?[a-z0-9][a-z0-9._/-]*(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?@sha256:[0-9a-f]{64}"
)
IMAGE_ID = re.compile(r"sha256:[0-9a-f]{64}")
# Every engine we start stays offline and tells nobody anything.
FIXED_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

MACHINE_S = frozenset({"CUDA_VISIBLE_DEVICES", "HF_HOME"})  # chosen for a run and its machine, not by the recipe
# Variables that something in an engine's process is known to read: vLLM says itself which of its own it doesn't.
ENGINE_READS = re.compile(
    r"(VLLM|OMP|GOMP|MKL|OPENBLAS|KMP|ONEDNN|DNNL|CUDA|CUBLAS|CUBLASLT|CUDNN|NCCL|MALLOC"
    r"|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON|FLASHINFER)_\w+|NVIDIA_TF32_OVERRIDE|LD_PRELOAD"
)

CACHE_IN_CONTAINER = "/cache"
HOST_CACHE = "/var/lib/station-recipes/cache"  # what is mounted there on a host, unless told otherwise
# Where the engine keeps what it downloads and compiles, below one folder, in every container.
CACHE_ENV = {
    "HF_HOME": f"{CACHE_IN_CONTAINER}/huggingface",
    "VLLM_CACHE_ROOT": f"{CACHE_IN_CONTAINER}/vllm",
    "FLASHINFER_WORKSPACE_BASE": f"{CACHE_IN_CONTAINER}/flashinfer",
    "TRITON_CACHE_DIR": f"{CACHE_IN_CONTAINER}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_IN_CONTAINER}/inductor",
    "CUDA_CACHE_PATH": f"{CACHE_IN_CONTAINER}/cuda",
    "XDG_CACHE_HOME": f"{CACHE_IN_CONTAINER}/xdg",
    # The uid has no entry in the image's passwd, and / is read-only: a home and a name are needed all the same.
    "HOME": f"{CACHE_IN_CONTAINER}/home",
    "USER": "engine",
}


@dataclass(frozen=True)
class Container:
    """What the container targets need beside argv and env. `image` is ref@sha256:…; `device` a CDI name.

    `cache` is what is mounted at CACHE_IN_CONTAINER: a folder of the host, or the name of a volume of the Docker
    engine. The model's folder, if it is a folder, is mounted read-only at its own path, so that argv is the same
    everywhere.
    """

    image: str
    device: str | None
    cache: Path | str
    ipc: str
    shm_gb: int
    ulimits: dict[str, int]
    user: int


@dataclass(frozen=True)
class ServingSpec:
    """What a target starts. `argv` begins after the vLLM program: ('serve', model, …)."""

    recipe_id: str
    argv: tuple[str, ...]
    env: dict[str, str]
    host: str
    port: int
    served_name: str
    model_path: Path | None
    ready_timeout_s: int
    stop_timeout_s: int
    api_key_env: str | None = None

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://{self.host}:{self.port}"


def flag_arguments(name: str, value: FlagValue) -> list[str]:
    """One flag of the map as arguments: true → --name, false → --no-name, a map → JSON with sorted keys."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value, sort_keys=True, separators=(",", ":"))]
    if isinstance(value, list):
        return [f"--{name}", *value]
    text = str(value)
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def serving_spec(loaded: Loaded, machine: Machine | None = None) -> ServingSpec:
    """Build the spec of a recipe; a machine's own variables come before the recipe's."""
    recipe = loaded.recipe
    model = recipe.model
    model_path = (loaded.folder / model.path).resolve() if model.path else None
    argv = ["serve", str(model_path or model.repo)]
    argv += ["--revision", model.revision] if model.revision else []
    argv += ["--served-model-name", recipe.model.served_name]
    argv += ["--host", recipe.runtime.host, "--port", str(recipe.runtime.port), "--dtype", recipe.model.dtype]
    for name in sorted(recipe.engine.flags):
        argv += flag_arguments(name, recipe.engine.flags[name])
    return ServingSpec(
        recipe_id=recipe.id,
        argv=tuple(argv),
        env={**FIXED_ENV, **(machine.env if machine else {}), **recipe.engine.env},
        host=recipe.runtime.host,
        port=recipe.runtime.port,
        served_name=recipe.model.served_name,
        model_path=model_path,
        ready_timeout_s=recipe.runtime.ready_timeout_s,
        stop_timeout_s=recipe.runtime.stop_timeout_s,
        api_key_env=recipe.runtime.api_key_env,
    )


def container(loaded: Loaded, image: str, device: str | None, cache: Path | str) -> Container:
    """The container part of a recipe.

    Raises UsageProblem unless `image` names a digest, or is the id of an image that was built here.
    """
    if not IMAGE.fullmatch(image) and not IMAGE_ID.fullmatch(image):
        raise UsageProblem(f"image {image!r} has no digest: wanted NAME@sha256:<64 hex digits>, never a tag alone")
    runtime = loaded.recipe.runtime
    return Container(image, device, cache, runtime.ipc, runtime.shm_gb, dict(runtime.ulimits), runtime.user)
