"""Room recipes: servers in containers that outlive the command that started them: the labels are the record."""

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from docker.errors import APIError, DockerException, NotFound
from docker.models.containers import Container as DockerContainer

from images.console import note
from images.docker_engine import LABEL
from images.errors import EngineProblem
from recipes.run.docker import KIND, connect, create, owns_port, remove
from recipes.run.longlived import drain
from recipes.run.process import Progress, refuse_taken_port, wait_ready
from recipes.spec import Container, ServingSpec

STAYS = "lasting server"
LOG_LINES = 2000


@dataclass(frozen=True)
class ContainerRecord:
    """One server in a container, as the Docker engine tells it."""

    recipe: str
    served_name: str
    url: str
    port: int
    container: str
    name: str
    image: str
    argv: list[str]
    log: str
    stop_timeout_s: int
    started: str


class Watched:
    """A started container, in the shape that `wait_ready` asks of a process."""

    failed_to_start: str | None = None

    def __init__(self, container: DockerContainer, log: Path) -> None:
        """Watch a container; its output so far is written to `log` whenever it is asked for."""
        self._container, self._log = container, log

    def alive(self) -> bool:
        """Whether it still runs."""
        self._container.reload()
        return self._container.status == "running"

    def status(self) -> int | None:
        """Its exit status once it has ended."""
        return None if self.alive() else self._container.attrs["State"]["ExitCode"]

    @property
    def log(self) -> Path:
        """A file with its output so far."""
        with suppress(DockerException):
            self._log.write_bytes(self._container.logs(tail=LOG_LINES))
        return self._log


def start_contained(spec: ServingSpec, box: Container, progress: Progress = lambda _: None) -> ContainerRecord:
    """Start a container that stays, and wait until it is ready. The Docker engine is this machine's (see bench.plan).

    Raises EngineProblem when the port is taken or the engine doesn't become ready; nothing is left then.
    """
    refuse_taken_port(spec.host, spec.port)
    client = connect()
    container = create(client, spec, box, STAYS)
    try:
        try:
            container.start()
        except APIError as error:
            raise EngineProblem(f"Docker could not start the container: {error.explanation or error}") from error
        deadline = time.monotonic() + spec.ready_timeout_s
        with tempfile.TemporaryDirectory(prefix="station-recipes-") as folder:
            watched = Watched(container, Path(folder) / "server.log")
            wait_ready(spec, watched, deadline, progress, lambda: owns_port(container, spec.port))
    except BaseException:
        remove(container)
        raise
    container.reload()
    return _record(container)


def contained() -> list[ContainerRecord]:
    """Every lasting server of ours in the Docker engine; none, and a note, where there is `docker` and it won't say."""
    if shutil.which("docker") is None:
        return []
    try:
        found = connect().containers.list(all=True, filters={"label": f"{KIND}={STAYS}"})
        return sorted((_record(each) for each in found), key=lambda record: record.port)
    except (DockerException, EngineProblem) as error:
        note(f"✘ Docker could not be asked which servers of ours it has: {error}")
        return []


def _record(container: DockerContainer) -> ContainerRecord:
    labels = container.labels
    return ContainerRecord(
        recipe=labels[f"{LABEL}.recipe"],
        served_name=labels.get(f"{LABEL}.served_name", ""),
        url=labels.get(f"{LABEL}.url", ""),
        port=int(labels.get(f"{LABEL}.port", "0")),
        container=container.id,
        name=container.name,
        image=container.attrs["Image"],
        argv=[container.attrs["Path"], *container.attrs["Args"]],
        log=f"docker logs {container.name}",
        stop_timeout_s=int(labels.get(f"{LABEL}.stop_timeout_s", "10")),
        started=container.attrs["State"]["StartedAt"][:19] + "Z",
    )


def contained_condition(record: ContainerRecord) -> str:
    """'ready', 'starting or stuck', or 'gone' (the container has ended)."""
    container = _find(record)
    if container is None or container.status != "running":
        return "gone"
    with suppress(httpx.HTTPError):
        if httpx.get(f"{record.url}/health", timeout=5, trust_env=False).status_code == 200:
            return "ready"
    return "starting or stuck"


def stop_contained(record: ContainerRecord, drain_s: float, progress: Callable[[int | None], None]) -> int | None:
    """Stop a lasting server's container, once nothing is in flight or `drain_s` has passed, and remove it.

    Returns how many requests were cut off, as `longlived.stop` does.
    """
    cut = 0 if contained_condition(record) == "gone" else drain(record, drain_s, progress)
    container = _find(record)
    if container is not None:
        with suppress(DockerException):
            container.stop(timeout=record.stop_timeout_s)
        remove(container)
    return cut


def _find(record: ContainerRecord) -> DockerContainer | None:
    try:
        return connect().containers.get(record.container)
    except NotFound:
        return None
