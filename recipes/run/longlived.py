"""Room recipes: servers that outlive the command that started them: state on disk, never a stale pid trusted."""

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from images.engine import Engine
from images.errors import OutsideProblem, UsageProblem
from images.written import write_whole
from recipes.run.process import Progress, environment, refuse_taken_port, wait_ready
from recipes.run.supervised import birth_of
from recipes.run.supervisor import descendants_of
from recipes.spec import ServingSpec

SCHEMA = 1
POLL_S = 0.5
KILL_AFTER_S = 10


@dataclass(frozen=True)
class Record:
    """One server as its state file tells it. `birth` and `machine_boot` tell its pid from a later one."""

    schema: int
    recipe: str
    served_name: str
    url: str
    port: int
    pid: int
    birth: int
    machine_boot: str
    argv: list[str]
    log: str
    stop_timeout_s: int
    started: str


class Served(Protocol):
    """What every server of ours says of itself, a process or a container."""

    recipe: str
    url: str
    port: int


Found = TypeVar("Found", bound=Served)


class Detached:
    """A process in a session of its own, watched by pid; the shape that `wait_ready` asks of a process."""

    failed_to_start: str | None = None

    def __init__(self, popen: subprocess.Popen, log: Path) -> None:
        """Watch a process just started."""
        self._popen, self.pid, self.log = popen, popen.pid, log

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._popen.poll() is None

    def status(self) -> int | None:
        """Its exit status once it has ended."""
        return self._popen.poll()

    def processes(self) -> list[int]:
        """Its pid and those below it."""
        return [self.pid, *descendants_of(self.pid)]


def start(spec: ServingSpec, engine: Engine, state: Path, progress: Progress = lambda _: None) -> Record:
    """Start a server that stays, wait until it is ready, and record it.

    Raises EngineProblem when the port is taken or the engine doesn't become ready, OSError when it can't be recorded;
    nothing is left then.
    """
    folder = state / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    with _port_held(folder, spec.port):
        refuse_taken_port(spec.host, spec.port)
        _refuse_recorded(state, spec.port)
        record, process = _begin(spec, engine, folder)
        try:
            # Recorded before it is ready: a crash of ours in between must not lose it.
            _write(folder / f"{spec.port}.json", record)
            wait_ready(spec, process, time.monotonic() + spec.ready_timeout_s, progress)
        except BaseException:
            _end(record, KILL_AFTER_S)
            _forget(record, state)
            raise
    return record


@contextmanager
def _port_held(folder: Path, port: int) -> Iterator[None]:
    """Hold a port's lock while a server is started on it: until the engine listens, the port itself looks free.

    Raises OutsideProblem while another command holds it.
    """
    with (folder / f"{port}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutsideProblem(
                f"another `./inv serve` is starting a server on port {port}: wait for it, or choose another port: "
                f"--port {port + 1}"
            ) from None
        yield


def _refuse_recorded(state: Path, port: int) -> None:
    """Raise OutsideProblem for a recorded server that lives and doesn't listen yet: whoever started it was killed."""
    for record in records(state):
        if record.port == port and condition(record) != "gone":
            raise OutsideProblem(
                f"{record.recipe} is recorded on port {port} and hasn't answered yet (process {record.pid}): "
                f"./inv stop --port {port} ends it; or choose another port: --port {port + 1}"
            )


def _begin(spec: ServingSpec, engine: Engine, folder: Path) -> tuple[Record, Detached]:
    """Start the engine in a session of its own, its output in the port's log."""
    log = folder / f"{spec.port}.log"
    argv = [*engine.command(), *spec.argv]
    with log.open("wb") as sink:
        environ = environment(spec, engine)
        popen = subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    process = Detached(popen, log)
    record = Record(
        schema=SCHEMA,
        recipe=spec.recipe_id,
        served_name=spec.served_name,
        url=spec.url,
        port=spec.port,
        pid=process.pid,
        birth=birth_of(process.pid) or 0,
        machine_boot=machine_boot(),
        argv=argv,
        log=str(log),
        stop_timeout_s=spec.stop_timeout_s,
        started=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    return record, process


def _write(file: Path, record: Record) -> None:
    write_whole(file, (json.dumps(asdict(record), indent=2, sort_keys=True) + "\n").encode())


def _forget(record: Record, state: Path) -> None:
    """Remove a server's record, unless the port's record is another server's by now."""
    if record in records(state):
        (state / "servers" / f"{record.port}.json").unlink(missing_ok=True)


def records(state: Path) -> list[Record]:
    """Every recorded server, running or not; a file that can't be read is left out."""
    found = []
    for file in sorted((state / "servers").glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            found.append(Record(**json.loads(file.read_text())))
    return found


def machine_boot() -> str:
    """The kernel's id of this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def condition(record: Record) -> str:
    """'ready', 'starting or stuck', or 'gone': the pid counts only with its birth and this boot of the machine."""
    if record.machine_boot != machine_boot() or birth_of(record.pid) != record.birth:
        return "gone"
    try:
        healthy = httpx.get(f"{record.url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        healthy = False
    return "ready" if healthy else "starting or stuck"


def in_flight(record: Served) -> int | None:
    """Requests running and waiting, from the server's gauges; None when it doesn't answer."""
    try:
        text = httpx.get(f"{record.url}/metrics", timeout=5, trust_env=False).text
        families = list(text_string_to_metric_families(text))
    except (httpx.HTTPError, ValueError):
        return None
    gauges = {"vllm:num_requests_running", "vllm:num_requests_waiting"}
    return int(sum(sample.value for family in families if family.name in gauges for sample in family.samples))


def drain(record: Served, drain_s: float, progress: Callable[[int | None], None]) -> int | None:
    """Wait until nothing is in flight or `drain_s` seconds have passed.

    Returns how many requests will be cut off: 0 after a full drain, None when the server doesn't say.
    """
    deadline = time.monotonic() + drain_s
    left = in_flight(record)
    while left and time.monotonic() < deadline:
        progress(left)
        time.sleep(POLL_S)
        left = in_flight(record)
    return left


def stop(record: Record, state: Path, drain_s: float, progress: Callable[[int | None], None]) -> int | None:
    """Stop a server: wait until nothing is in flight or `drain_s` has passed, then end it and forget it.

    Returns how many requests were cut off (see `drain`). A record whose process is gone is only forgotten: whoever
    has its pid now is never touched.
    """
    cut: int | None = 0
    if condition(record) != "gone":
        cut = drain(record, drain_s, progress)
        _end(record, record.stop_timeout_s)
    _forget(record, state)
    return cut


def _end(record: Record, grace_s: float) -> None:
    tree = [(pid, birth_of(pid)) for pid in [record.pid, *descendants_of(record.pid)]]
    _signal(record.pid, record.birth, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while birth_of(record.pid) == record.birth and time.monotonic() < deadline:
        time.sleep(POLL_S / 5)
    for pid, birth in tree:
        if birth is not None:
            _signal(pid, birth, signal.SIGKILL)


def _signal(pid: int, birth: int, number: signal.Signals) -> None:
    if birth_of(pid) == birth:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def find(known: Sequence[Found], port: int | None) -> Found:
    """The server on `port`, or the only one there is.

    Raises UsageProblem when there is none, or several to choose from.
    """
    chosen = [record for record in known if port in {None, record.port}]
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join(f"{record.recipe} on port {record.port}" for record in known) or "none is recorded"
    if not chosen:
        raise UsageProblem(f"no such server; {listed}. `./inv serve` starts one")
    raise UsageProblem(f"several servers are recorded: {listed}. Choose one: --port")
