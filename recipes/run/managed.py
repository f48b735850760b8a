"""Room recipes: the service that provisioning made, taken as it runs: what it is, is asked of it and not believed."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from docker import DockerClient
from docker.errors import DockerException, NotFound
from docker.models.containers import Container as DockerContainer

from images.docker_engine import LABEL
from images.errors import EngineProblem
from recipes.model_files import differing_files
from recipes.render import container_name
from recipes.run.contained import Watched
from recipes.run.docker import connect, host_processes, live_state, owns_port, run_inside
from recipes.run.process import Progress, Server, wait_ready
from recipes.run.tunnel import tunnel
from recipes.spec import CACHE_IN_CONTAINER, Container, ServingSpec

READY_S = 60  # it serves already, or it doesn't
LARGEST_LOG_BYTES = 20_000_000
# Run inside the container: the files of a folder by their SHA-256.
HASHES = """
import hashlib, json, os, sys
def sha256(path):
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
print(json.dumps({entry.name: sha256(entry.path) for entry in os.scandir(sys.argv[1]) if entry.is_file()}))
"""


def find_service(client: DockerClient, recipe_id: str) -> DockerContainer:
    """The running container of a recipe's service.

    Raises EngineProblem where there is none, or it isn't ours.
    """
    name = container_name(recipe_id)
    try:
        container = client.containers.get(name)
    except NotFound:
        container = None
    if container is None or container.status != "running" or container.labels.get(f"{LABEL}.recipe") != recipe_id:
        raise EngineProblem(f"no service of {recipe_id} runs there: ./inv provision --recipe {recipe_id} starts one")
    return container


def device_of(container: DockerContainer) -> str | None:
    """The CDI name of the device that a container has."""
    requests = container.attrs["HostConfig"].get("DeviceRequests") or []
    names = [name for each in requests if each.get("Driver") == "cdi" for name in each.get("DeviceIDs") or []]
    return names[0] if names else None


def cache_of(container: DockerContainer) -> Path | str:
    """What a container has as its cache: a folder of its machine, or a volume of its engine."""
    mounts = {each["Destination"]: each for each in container.attrs["Mounts"]}
    found = mounts.get(CACHE_IN_CONTAINER)
    if found is None:
        return "none"
    return Path(found["Source"]) if found["Type"] == "bind" else found["Name"]


@contextmanager
def managed(
    spec: ServingSpec,
    box: Container,
    on_host: str | None,
    files: Mapping[str, str | None],
    log: Path,
    progress: Progress = lambda _: None,
) -> Iterator[Server]:
    """Yield a service that runs and goes on running; `on_host` is its model's folder there, `files` the wanted hashes.

    Raises EngineProblem where it isn't running, its image or its weights are others, it doesn't own its port, or it
    gives no completion. Its live arguments and environment are handed on to be judged, with the model's folder by the
    name it has here.
    """
    with ExitStack() as stack:
        client = connect()
        stack.callback(client.close)
        container = find_service(client, spec.recipe_id)
        since = container.attrs["State"]["StartedAt"]
        if container.attrs["Image"] != box.image:
            raise EngineProblem(f"the service's image is {container.attrs['Image']}, wanted {box.image}")
        if on_host:
            _require_weights(container, on_host, files)
        stack.enter_context(tunnel(spec.host, spec.port))
        watched = Watched(container, log)
        wait_ready(spec, watched, time.monotonic() + READY_S, progress, lambda: owns_port(container, spec.port))
        argv, env = live_state(container)
        try:
            yield Server(
                url=spec.url,
                served_name=spec.served_name,
                log=log,
                argv=[str(spec.model_path) if word == on_host else word for word in argv],
                env=env,
                boot_s=None,
                alive=_same_life(container, since),
                processes=lambda: host_processes(container),
                image=container.attrs["Image"],
                since=f"{since[:19]}Z",
            )
        finally:
            _copy_log(container, log)


def _same_life(container: DockerContainer, since: str) -> Callable[[], bool]:
    def alive() -> bool:
        try:
            container.reload()
        except DockerException:
            return False
        return container.status == "running" and container.attrs["State"]["StartedAt"] == since

    return alive


def _require_weights(container: DockerContainer, folder: str, wanted: Mapping[str, str | None]) -> None:
    """Hash the model's files as the container sees them. Raises EngineProblem where one differs."""
    answer = run_inside(container, "python3", "-IS", "-c", HASHES, folder)
    if answer.returncode != 0:
        raise EngineProblem(f"the service's model can't be read at {folder} in its container: {answer.stderr.strip()}")
    differing = differing_files(dict(wanted), json.loads(answer.stdout))
    if differing:
        raise EngineProblem(f"the service's model is another: {', '.join(differing)} differ. Provision it again")


def _copy_log(container: DockerContainer, log: Path) -> None:
    """Everything the engine said since its start, up to a size that nobody needs."""
    size = 0
    with suppress(DockerException, OSError), log.open("wb") as sink:
        for part in container.logs(stream=True, follow=False):
            size += sink.write(part)
            if size > LARGEST_LOG_BYTES:
                break
