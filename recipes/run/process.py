"""Room recipes: the process run: a spec started as a process of this machine, no container."""

import errno
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from images.engine import Engine
from images.errors import EngineProblem, OutsideProblem
from images.index import cache_root
from recipes.run.jit import cache_environment
from recipes.run.supervised import Supervised, base_environment, supervised
from recipes.spec import ServingSpec

POLL_S = 0.5
READY_REQUEST_TIMEOUT_S = 240  # a first completion may wait for kernels to be compiled
# An engine that ends with these was stopped by its surroundings, whatever the recipe says.
OUTSIDE = re.compile(r"address already in use|no space left on device|disk quota exceeded", re.IGNORECASE)
SIGNS = re.compile(r"error|exception|traceback|refused|not found|invalid|unrecognized|killed|no space", re.IGNORECASE)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Server:
    """A ready server of ours: it has answered a real completion under the right model name.

    `argv` and `env` are the live ones, read from the running process; `boot_s` is start to ready, None for one that
    ran already (`since` is its start, in UTC); `processes` gives the pids of all it consists of now, on this machine;
    `image` is the id of the image its container has.
    """

    url: str
    served_name: str
    log: Path
    argv: list[str]
    env: dict[str, str]
    boot_s: float | None
    alive: Callable[[], bool]
    processes: Callable[[], list[int]] = list
    image: str | None = None
    since: str | None = None


def environment(spec: ServingSpec, engine: Engine) -> dict[str, str]:
    """The whole environment the engine starts with; what it caches lies beside the engine, not in ~/.cache."""
    caches = {"HF_HOME": str(cache_root() / "huggingface"), **cache_environment(engine)}
    return {**base_environment(), **caches, **engine.environ(), **spec.env}


@contextmanager
def serve(spec: ServingSpec, engine: Engine, log: Path, progress: Progress = lambda _: None) -> Iterator[Server]:
    """Serve `spec` for the length of a `with` block.

    Raises EngineProblem if the port is taken, the engine dies, or it isn't ready by the deadline; the
    message carries the log's last relevant lines. Everything started is gone afterwards.
    """
    refuse_taken_port(spec.host, spec.port)
    started = time.monotonic()
    with ExitStack() as stack:
        # The engine leaves sockets behind in its temporary folder: it gets one that goes away with it.
        folder = stack.enter_context(TemporaryDirectory(prefix="station-recipes-", ignore_cleanup_errors=True))
        environ = {**environment(spec, engine), "TMPDIR": folder}
        command = [*engine.command(), *spec.argv]
        process = stack.enter_context(supervised(command, environ, log, spec.stop_timeout_s))
        wait_ready(spec, process, started + spec.ready_timeout_s, progress)
        yield Server(
            url=spec.url,
            served_name=spec.served_name,
            log=log,
            argv=_live(process.pid, "cmdline"),
            env=dict(pair.split("=", 1) for pair in _live(process.pid, "environ") if "=" in pair),
            boot_s=time.monotonic() - started,
            alive=process.alive,
            processes=process.processes,
        )


def refuse_taken_port(host: str, port: int) -> None:
    """Raise OutsideProblem if something already listens: it isn't ours, and measuring it would be a lie."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise EngineProblem(f"{host}:{port} can't be used: {error.strerror}. Choose another: --port") from error
            owner = _describe_owner(port)
            raise OutsideProblem(
                f"port {port} on {host} is in use by {owner}; it isn't ours, so nothing was sent to it. "
                f"Stop it, or choose another port: --port {port + 1}"
            ) from error


def wait_ready(
    spec: ServingSpec,
    process: Supervised,
    deadline: float,
    progress: Progress,
    owns_port: Callable[[], bool] | None = None,
) -> None:
    """Wait for a real completion from a server that is ours: `owns_port` says so, else its process tree is asked.

    Raises EngineProblem when the engine ends, the deadline passes, or another's server answers.
    """
    with httpx.Client(base_url=spec.url, timeout=READY_REQUEST_TIMEOUT_S, trust_env=False) as client:
        while True:
            if process.failed_to_start:
                raise EngineProblem(f"the engine could not be started: {process.failed_to_start}")
            if not process.alive():
                said = _died(process)
                raise OutsideProblem(said) if OUTSIDE.search(said) else EngineProblem(said)
            if time.monotonic() > deadline:
                raise EngineProblem(
                    f"the engine was not ready after {spec.ready_timeout_s} s (runtime.ready_timeout_s).\n"
                    f"{relevant_lines(process.log)}"
                )
            if _healthy(client):
                _refuse_foreign(spec, owns_port or (lambda: _owns_port(process, spec.port)))
                return _complete(client, spec)
            progress(_stage(process.log))
            time.sleep(POLL_S)


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _complete(client: httpx.Client, spec: ServingSpec) -> None:
    request = {
        "model": spec.served_name,
        "prompt": "1",
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
    }
    try:
        answer = client.post("/v1/completions", json=request)
        ok = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise EngineProblem(f"the server is healthy but gave no completion: {error}") from error
    if not ok:
        raise EngineProblem(
            f"the server is healthy but refused a completion for model {spec.served_name!r}: "
            f"{answer.status_code} {answer.text[:300]}"
        )


def _owns_port(process: Supervised, port: int) -> bool:
    own = {inode for pid in process.processes() for inode in _socket_inodes(pid)}
    return bool(_listening_inodes(port) & own)


def _refuse_foreign(spec: ServingSpec, owns_port: Callable[[], bool]) -> None:
    if not owns_port():
        raise OutsideProblem(
            f"a server answers on {spec.url}, but it isn't the one we started (it is {_describe_owner(spec.port)}); "
            "nothing was measured. Stop it, or choose another port: --port"
        )


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(fields[9])
    return inodes


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = str(link.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:
        return inodes  # gone meanwhile, or not ours to look at
    return inodes


def _describe_owner(port: int) -> str:
    wanted = _listening_inodes(port)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and wanted & _socket_inodes(int(entry.name)):
            command = " ".join(_live(int(entry.name), "cmdline"))
            return f"process {entry.name} ({command[:80]})"
    return "a process we may not look at"


def _live(pid: int | None, what: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _died(process: Supervised) -> str:
    status = process.status()
    how = f"killed by signal {-status}" if status is not None and status < 0 else f"exit status {status}"
    return f"the engine ended before it was ready ({how}).\n{relevant_lines(process.log)}"


def relevant_lines(log: Path, count: int = 12) -> str:
    """The log's last lines that say something went wrong, or its last lines when none does."""
    if not log.exists():
        return "(no server log)"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    signs = [line for line in lines if SIGNS.search(line)]
    chosen = (signs or lines)[-count:]
    return "\n".join(f"  | {line[:200]}" for line in chosen)


def _stage(log: Path) -> str:
    """Where a booting engine is, from the last line of its log that says."""
    stages = (
        ("Started server process", "starting the API"),
        ("init engine", "engine initialised"),
        ("Loading weights took", "weights loaded"),
        ("Starting to load model", "loading the model"),
        ("Initializing a V1 LLM engine", "starting the worker"),
        ("Resolved architecture", "reading the configuration"),
    )
    text = log.read_text(errors="replace") if log.exists() else ""
    return next((stage for sign, stage in stages if sign in text), "importing")
