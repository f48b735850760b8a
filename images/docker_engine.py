"""Room images: the Docker engine as its command line shows it: is it there, is it new enough, what does it hold."""

import json
import os
import re
from dataclasses import dataclass, field

from images.command import run
from images.declaration import MACHINES
from images.errors import EngineProblem, nearest
from images.registry import IMAGE_ID, parse_reference

LABEL = "station-recipes"  # every label of ours begins with it; nothing without one is ever touched
OLDEST = (20, 10)
OLDEST_CDI = (25, 0)


class DockerProblem(EngineProblem):
    """The Docker engine is absent, too old, or refused something."""


@dataclass(frozen=True)
class DockerEngine:
    """The engine that DOCKER_HOST, or Docker's context, points at. `platform` such as linux/amd64."""

    version: str
    platform: str

    @property
    def devices_by_cdi(self) -> bool:
        """Whether it can hand a GPU to a container by its CDI name."""
        return _numbers(self.version) >= OLDEST_CDI


@dataclass(frozen=True)
class Image:
    """An image that the engine holds. `id` is sha256:… of its configuration; `digests` are NAME@sha256:…

    `environment` is what it sets for every container of it.
    """

    id: str
    platform: str
    size_bytes: int
    labels: dict[str, str]
    digests: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def docker_engine() -> DockerEngine:
    """Ask the Docker engine what it is.

    Raises DockerProblem when there is no `docker`, no engine answers, or it is older than 20.10.
    """
    try:
        answer = run(["docker", "version", "--format", "{{json .}}"])
    except FileNotFoundError:
        raise DockerProblem(
            "there is no `docker` program on PATH. Install it (Debian, Ubuntu: apt install docker.io), or run the "
            "recipe as a process: --runtime process"
        ) from None
    if answer.returncode != 0:
        raise DockerProblem(_why_silent(answer.stderr))
    server = json.loads(answer.stdout).get("Server") or {}
    version = server.get("Version", "")
    if _numbers(version) < OLDEST:
        raise DockerProblem(f"the Docker engine is {version or 'of an unknown version'}; wanted 20.10 or newer")
    arch = server.get("Arch", "")
    platform = MACHINES.get(arch, f"{server.get('Os', 'linux')}/{arch}")
    return DockerEngine(version, platform)


def engine_host() -> str:
    """The address of the engine that `docker` talks to: DOCKER_HOST, else its context's; empty where none is named."""
    named = os.environ.get("DOCKER_HOST")
    if named:
        return named
    try:
        asked = run(["docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"])
    except OSError:
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


def is_local(host: str) -> bool:
    """Whether an engine's address is a socket of this machine, or the default."""
    return not host or host.startswith(("unix://", "npipe://"))


def is_remote() -> bool:
    """Whether containers run on another machine, which ssh reaches.

    Raises DockerProblem for an engine behind any other address: neither its machine's ports nor its facts come here.
    """
    host = engine_host()
    if not is_local(host) and not host.startswith("ssh://"):
        raise DockerProblem(
            f"the Docker engine is at {host}, which brings neither its machine's ports nor its facts here: an engine "
            "can't be served and measured there. Reach it by ssh: DOCKER_HOST=ssh://USER@HOST"
        )
    return not is_local(host)


def _why_silent(said: str) -> str:
    host = engine_host() or "the local socket"
    lower = said.lower()
    if "permission denied" in lower:
        return (
            f"this user may not talk to the Docker engine at {host}. Join the group `docker` and start a new login "
            "(sudo usermod -aG docker $USER), or use root"
        )
    if "cannot connect" in lower or "connection refused" in lower or "no such file" in lower:
        return (
            f"no Docker engine answers at {host}. Start it (systemctl start docker), set DOCKER_HOST, or run the "
            "recipe as a process: --runtime process"
        )
    return f"the Docker engine at {host} did not answer: {said.strip()[:300]}"


def find_image(reference: str) -> Image | None:
    """The image under a name, a digest or an id; None when the engine doesn't hold it."""
    answer = run(["docker", "image", "inspect", reference])
    if answer.returncode != 0:
        return None
    data = json.loads(answer.stdout)[0]
    return Image(
        id=data["Id"],
        platform=f"{data['Os']}/{data['Architecture']}",
        size_bytes=data["Size"],
        labels=dict(data["Config"].get("Labels") or {}),
        digests=tuple(data.get("RepoDigests") or ()),
        environment=dict(entry.partition("=")[::2] for entry in data["Config"].get("Env") or ()),
    )


def require_image(name: str, remedy: str = "") -> Image:
    """The image under a name, a digest or an id.

    Raises UsageProblem for what can't be one, DockerProblem when no engine answers or it has no such image, with the
    nearest names and the `remedy`.
    """
    if not IMAGE_ID.fullmatch(name):
        parse_reference(name)
    docker_engine()
    found = find_image(name)
    if found:
        return found
    names = run(["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}"]).stdout.split()
    close = nearest(name, [known for known in names if "<none>" not in known])
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    raise DockerProblem(f"the Docker engine has no image {name}.{hint}{remedy and ' ' + remedy}")


def refuse_silent(said: str) -> None:
    """Raise DockerProblem when a docker command's words mean that no engine answered."""
    if any(sign in said.lower() for sign in ("cannot connect to the docker daemon", "error during connect")):
        raise DockerProblem(_why_silent("cannot connect"))


def platform_here() -> str:
    """This machine's platform, such as linux/amd64."""
    return MACHINES.get(os.uname().machine, f"linux/{os.uname().machine}")
