"""Room recipes: the docker run: a spec started as a container through the Docker SDK, here or over ssh://."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import CompletedProcess

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.containers import Container as DockerContainer
from docker.types import DeviceRequest, Healthcheck, Mount, Ulimit

from images.command import run
from images.docker_engine import LABEL, DockerProblem, docker_engine, engine_host, is_remote
from images.errors import EngineProblem
from recipes.render import (
    HEALTH_INTERVAL_S,
    HEALTH_RETRIES,
    HEALTH_TIMEOUT_S,
    TMPFS,
    container_environment,
    container_name,
    health,
    mounts,
)
from recipes.run.carried import carry
from recipes.run.process import Progress, Server, refuse_taken_port, wait_ready
from recipes.run.supervised import Supervised, base_environment, interrupts_held, supervised
from recipes.run.supervisor import descendants_of
from recipes.run.tunnel import tunnel
from recipes.spec import CACHE_IN_CONTAINER, FIXED_ENV, Container, ServingSpec

KIND = f"{LABEL}.kind"
ENDED = ("exited", "dead")
STARTS_WITHIN = timedelta(minutes=10)
# How what runs in a container is stopped, by its kind; a service's container has none.
WHOSE = {"lasting server": "./inv stop", "server": "end the run that measures it, by Ctrl-C, or wait for its end"}
SECOND_NS = 1_000_000_000
STOP_MARGIN_S = 20  # for `docker stop` and `docker rm`, after the engine's own time is over
ATTACH = Path(__file__).with_name("attach.py")
PASSED = ("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", "SSH_AUTH_SOCK")
# Run inside the container: does one of its processes hold the socket that listens on the port? The network is the
# host's, the processes are only its own.
OWNS = """
import glob, os, sys
rows = [line.split() for table in ("/proc/net/tcp", "/proc/net/tcp6") if os.path.exists(table) for line in open(table)]
wanted = {f"socket:[{row[9]}]" for row in rows[1:] if row[3:4] == ["0A"] and int(row[1].rsplit(":", 1)[1], 16) == PORT}
def links():
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            yield os.readlink(link)
        except OSError:
            pass
sys.exit(not wanted.intersection(links()))
"""


def connect() -> docker.DockerClient:
    """The Docker engine that the `docker` program talks to: DOCKER_HOST, else Docker's context.

    Raises DockerProblem when none answers, it is too old, or is where nothing can be served from.
    """
    is_remote()
    docker_engine()
    host = engine_host()
    try:
        environ = {**os.environ, "DOCKER_HOST": host} if host else dict(os.environ)
        client = docker.from_env(environment=environ, use_ssh_client=True, timeout=120)
        client.ping()
    except DockerException as error:
        raise DockerProblem(f"the Docker engine at {host or 'the local socket'} does not answer: {error}") from error
    return client


@contextmanager
def serve(spec: ServingSpec, box: Container, log: Path, progress: Progress = lambda _: None) -> Iterator[Server]:
    """Serve `spec` in a container for the length of a `with` block.

    Raises EngineProblem when the port is taken, the image or the device is not there, the engine dies, or it isn't
    ready by the deadline. The container is gone afterwards; one that isn't ours is never touched.
    """
    refuse_taken_port(spec.host, spec.port)
    started = time.monotonic()
    client = connect()
    with ExitStack() as stack:
        stack.callback(client.close)
        container = create(client, spec, box, "server")
        stack.callback(remove, container)
        stack.enter_context(tunnel(spec.host, spec.port))
        process = stack.enter_context(attached(container, log, spec.stop_timeout_s))
        wait_ready(spec, process, started + spec.ready_timeout_s, progress, lambda: owns_port(container, spec.port))
        live = live_state(container)
        yield Server(
            url=spec.url,
            served_name=spec.served_name,
            log=log,
            argv=live[0],
            env=live[1],
            boot_s=time.monotonic() - started,
            alive=process.alive,
            processes=lambda: host_processes(container),
            image=container.attrs.get("Image"),
        )


@contextmanager
def attached(container: DockerContainer, log: Path, stop_timeout_s: int) -> Iterator[Supervised]:
    """Start a created container and follow its output; it is stopped afterwards, however we end (see attach.py)."""
    argv = [sys.executable, "-S", str(ATTACH), str(stop_timeout_s), container.id]
    environ = {**base_environment(), **{name: os.environ[name] for name in PASSED if name in os.environ}}
    with supervised(argv, environ, log, stop_timeout_s + STOP_MARGIN_S) as process:
        yield process


def create(client: docker.DockerClient, spec: ServingSpec, box: Container, kind: str) -> DockerContainer:
    """Create the container of a spec: the same options as the rendered `docker run`.

    Raises EngineProblem when the engine refuses, and for a container of that name, saying whose it is.
    """
    name = container_name(spec.recipe_id)
    _refuse_taken_name(client, name)
    options = sdk_options(spec, box)
    if is_remote() and spec.model_path:
        here = [mount for mount in options["mounts"] if mount["Target"] != str(spec.model_path)]
        options["mounts"] = [*here, *model_options(client, spec, box)["mounts"]]
    options["labels"] = {**options["labels"], KIND: kind, f"{LABEL}.port": str(spec.port), f"{LABEL}.url": spec.url}
    options["labels"] |= {f"{LABEL}.served_name": spec.served_name, f"{LABEL}.stop_timeout_s": str(spec.stop_timeout_s)}
    try:
        return client.containers.create(box.image, list(spec.argv), name=name, **options)
    except ImageNotFound as error:
        raise EngineProblem(f"the Docker engine has no image {box.image}: ./inv build makes or pulls it") from error
    except APIError as error:
        raise EngineProblem(f"Docker could not create the container: {error.explanation or error}") from error


def sdk_options(spec: ServingSpec, box: Container) -> dict:
    """The options of a spec's container in the SDK's words; `docker_options` says the same for the command line."""
    check = health(spec)
    return {
        "entrypoint": ["vllm"],
        "environment": container_environment(spec),
        "labels": {f"{LABEL}.recipe": spec.recipe_id},
        "network_mode": "host",
        "read_only": True,
        "tmpfs": dict([TMPFS.split(":", 1)]),
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "user": f"{box.user}:{box.user}",
        "ipc_mode": box.ipc,
        "shm_size": box.shm_gb * 1024**3,
        "ulimits": [Ulimit(name=name, soft=value, hard=value) for name, value in sorted(box.ulimits.items())],
        "device_requests": [DeviceRequest(driver="cdi", count=0, device_ids=[box.device])] if box.device else [],
        "mounts": sdk_mounts(spec, box),
        "healthcheck": Healthcheck(
            test=["CMD-SHELL", check.command],
            interval=HEALTH_INTERVAL_S * SECOND_NS,
            timeout=HEALTH_TIMEOUT_S * SECOND_NS,
            retries=HEALTH_RETRIES,
            start_period=spec.ready_timeout_s * SECOND_NS,
        ),
    }


def sdk_mounts(spec: ServingSpec, box: Container) -> list[Mount]:
    """The cache (a folder of the host, or a volume of the engine) and the model."""
    found = []
    for mount in mounts(spec, box):
        kind = "volume" if mount.target == CACHE_IN_CONTAINER and not mount.source.startswith("/") else "bind"
        found.append(Mount(mount.target, mount.source, type=kind, read_only=mount.read_only))
    return found


@contextmanager
def client_container(
    client: docker.DockerClient, spec: ServingSpec, box: Container, argv: list[str], folder: str
) -> Iterator[tuple[DockerContainer, int]]:
    """Create a container of the engine's image beside a served spec, and remove it afterwards.

    It has the host's network and processes, the model and the device, no privileges, and `folder` as its own. Yields
    it with the server's pid as that machine counts it. Raises EngineProblem when it can't be created.
    """
    server = client.containers.get(container_name(spec.recipe_id))
    scratch = f"{folder}/tmp"  # noqa: S108 the container's own
    options = {**model_options(client, spec, box), "network_mode": "host", "pid_mode": "host", "working_dir": folder}
    kept = {name: sdk_options(spec, box)[name] for name in ("cap_drop", "security_opt", "user", "device_requests")}
    environment = {**FIXED_ENV, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": scratch}
    environment |= {"HOME": folder, "XDG_CACHE_HOME": scratch, "VLLM_CACHE_ROOT": scratch}
    labels = {f"{LABEL}.recipe": spec.recipe_id, KIND: "client"}
    try:
        container = client.containers.create(
            box.image,
            argv,
            entrypoint=[],
            environment=environment,
            labels=labels,
            **options,
            **kept,
        )
    except APIError as error:
        raise EngineProblem(f"Docker could not create the client's container: {error.explanation or error}") from error
    try:
        yield container, server.attrs["State"]["Pid"]
    finally:
        remove(container)


def model_options(client: docker.DockerClient, spec: ServingSpec, box: Container) -> dict:
    """The model's mount: its folder, or another machine's volume with a copy of it; else the cache that has it."""
    if spec.model_path is None:
        (cache,) = sdk_mounts(spec, box)
        return {"mounts": [Mount(CACHE_IN_CONTAINER, cache["Source"], type=cache["Type"], read_only=True)]}
    path = str(spec.model_path)
    if not is_remote():
        return {"mounts": [Mount(path, path, type="bind", read_only=True)]}
    return {"mounts": [Mount(path, carry(client, box.image, spec.model_path), type="volume", read_only=True)]}


def _refuse_taken_name(client: docker.DockerClient, name: str) -> None:
    """A container of ours that has ended is removed; any other is left alone, and said."""
    try:
        found = client.containers.get(name)
    except NotFound:
        return
    if f"{LABEL}.recipe" not in found.labels:
        raise EngineProblem(f"a container {name!r} exists that isn't ours (no label {LABEL}.recipe): rename it")
    if found.status not in ENDED and not _left_over(found):
        remedy = WHOSE.get(found.labels.get(KIND, ""), f"systemctl stop {name}, if it is a service of this host")
        raise EngineProblem(
            f"{found.labels[f'{LABEL}.recipe']} is already {found.status} in the container {name!r} "
            f"(port {found.labels.get(f'{LABEL}.port', '?')}). Stop it first: {remedy}"
        )
    remove(found)


def _left_over(container: DockerContainer) -> bool:
    """Whether a container was made and never started: who made it was killed meanwhile."""
    made = datetime.fromisoformat(container.attrs["Created"][:19]).replace(tzinfo=UTC)
    return container.status == "created" and datetime.now(UTC) - made > STARTS_WITHIN


def remove(container: DockerContainer) -> None:
    """Remove a container of ours, running or not. Never raises."""
    with interrupts_held(), suppress(DockerException):
        container.remove(force=True, v=True)


def owns_port(container: DockerContainer, port: int) -> bool:
    """Whether a process of the container listens on the port: the network is shared with the host."""
    return run_inside(container, "python3", "-IS", "-c", OWNS.replace("PORT", str(port))).returncode == 0


def run_inside(container: DockerContainer, *argv: str) -> CompletedProcess:
    """Run a program in a running container, by Docker's command line.

    The SDK's exec over ssh:// ends with a broken pipe where the engine closes the stream first (Docker 26).
    """
    return run(["docker", "exec", container.id, *argv])


def live_state(container: DockerContainer) -> tuple[list[str], dict[str, str]]:
    """The live command line and environment, from `docker inspect`."""
    container.reload()
    attributes = container.attrs
    argv = [attributes["Path"], *attributes["Args"]]
    return argv, dict(pair.split("=", 1) for pair in attributes["Config"]["Env"] if "=" in pair)


def host_processes(container: DockerContainer) -> list[int]:
    """The pids of a running container's processes as this machine counts them; none where it runs on another.

    That the pid is this container's is asked of the kernel: a Docker engine may be anywhere.
    """
    pid = container.attrs["State"]["Pid"]
    try:
        ours = bool(pid) and container.id in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        ours = False
    return [pid, *descendants_of(pid)] if ours else []
