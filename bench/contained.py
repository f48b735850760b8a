"""Room bench: one window measured in a client container beside the server's, its files copied out intact."""

import io
import json
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from docker.errors import DockerException
from docker.models.containers import Container as DockerContainer

from bench.load import LoadProblem
from bench.runfolder import SEAL, dump_rows, read_json, seal_faults, write_text
from bench.window import Order, Progress, Sent, Target, log_lines
from images.build import Built
from images.command import tail
from recipes.run.docker import attached, client_container, connect
from recipes.spec import Container, ServingSpec

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = ("bench", "images", "recipes")
WORK = "/work"
FILES = frozenset({"client.npz", "counters.json", "telemetry.npz", SEAL})
LARGEST_BYTES = 200_000_000
POLL_S = 0.5
STOP_S = 5
LAST_LINES = 15


def measure_contained(
    order: Order, target: Target, spec: ServingSpec, box: Container, built: Built, folder: Path, progress: Progress
) -> Sent:
    """Measure one window in a container of the engine's image, on the server's machine.

    Load, counters and telemetry are the code of this repository, run by the image's own Python. Raises LoadProblem
    when the window has no result or its files arrive damaged.
    """
    asked = {
        "url": target.url,
        "model": target.model,
        "tokenizer": str(order.tokenizer),
        "load": order.load.model_dump(),
        "prompts": order.prompts,
        "clients": order.clients,
        "gpus": order.gpus,
        "no_gpu": order.no_gpu,
        "version": built.version,
        "identity": built.identity,
    }
    argv = ["python3", "-m", "bench.inside", WORK]
    log_before = log_lines(target)
    with closing(connect()) as docker, tempfile.TemporaryDirectory(prefix="station-recipes-") as name:
        log = Path(name) / "client.log"
        with client_container(docker, spec, box, argv, WORK) as (container, pid):
            container.put_archive("/", packed({**asked, "server_pid": pid}, box.user))
            with attached(container, log, STOP_S) as process:
                last = _follow(process.alive, log, progress)
            if "streams" not in last:
                why = (
                    "the engine ended during the window" if not target.alive() else "the client container has no result"
                )
                raise LoadProblem(last.get("problem") or f"{why}.\n{tail(log, LAST_LINES)}")
            _fetch(container, folder)
    _add_log_lines(folder, log_before, log_lines(target))
    return Sent(last["streams"], last["prompts"], last["start_skew_s"])


def _add_log_lines(folder: Path, before: int | None, after: int | None) -> None:
    """Say in counters.json which lines of the server's log fall into the window: the log is on this side."""
    file = folder / "counters.json"
    counted = read_json(file)
    lines = None if before is None or after is None else {"before": before, "after": after}
    write_text(file, dump_rows({**counted, "log_lines": lines}))


def _follow(alive: Callable[[], bool], log: Path, progress: Progress) -> dict:
    """Hand on the client's progress until it ends; returns the last thing it told."""
    last: dict = {}
    read = 0
    while True:
        running = alive()
        lines = log.read_text(errors="replace").splitlines(keepends=True) if log.exists() else []
        whole = lines if not running else [line for line in lines if line.endswith("\n")]
        for line in whole[read:]:
            with suppress(ValueError):
                said = json.loads(line)
                last = said if isinstance(said, dict) else last
        read = len(whole)
        if "done" in last:
            progress(last["done"], last["total"])
        if not running:
            return last
        time.sleep(POLL_S)


def packed(asked: dict, uid: int) -> bytes:
    """What the client container gets: this repository's rooms and the order, as a tar owned by its user."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:

        def add(name: str, content: bytes | None) -> None:
            entry = tarfile.TarInfo(f"{WORK[1:]}/{name}".rstrip("/"))
            entry.uid = entry.gid = uid
            entry.type, entry.mode = (tarfile.DIRTYPE, 0o755) if content is None else (tarfile.REGTYPE, 0o644)
            entry.size = len(content or b"")
            tar.addfile(entry, None if content is None else io.BytesIO(content))

        add("", None)
        add("tmp", None)
        for file in sorted(file for room in ROOMS for file in (REPOSITORY / room).rglob("*.py")):
            add(file.relative_to(REPOSITORY).as_posix(), file.read_bytes())
        for file in sorted((REPOSITORY / "images").glob("*/image.yaml")):
            add(file.relative_to(REPOSITORY).as_posix(), file.read_bytes())
        add("order.json", json.dumps(asked).encode())
    return whole.getvalue()


def _fetch(container: DockerContainer, folder: Path) -> None:
    """Copy the window's files out of the container, hold them against their seal, and put them in place."""
    try:
        stream, _ = container.get_archive(f"{WORK}/out")
        content = io.BytesIO(b"".join(_limited(stream)))
    except DockerException as error:
        raise LoadProblem(f"the window's files can't be copied out of the client container: {error}") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".window-") as name:
        with tarfile.open(fileobj=content) as tar:
            for member in tar:
                file = member.name.removeprefix("out/")
                if member.isfile() and file in FILES:  # by name: whatever else is in there stays there
                    (Path(name) / file).write_bytes(tar.extractfile(member).read())
        faults = seal_faults(Path(name))
        if faults:
            raise LoadProblem(f"the window's files arrived damaged: {', '.join(faults)}")
        (Path(name) / SEAL).unlink()
        folder.mkdir(exist_ok=True)
        for file in sorted(Path(name).iterdir()):
            shutil.move(file, folder / file.name)


def _limited(stream: Iterable[bytes]) -> Iterator[bytes]:
    read = 0
    for block in stream:
        read += len(block)
        if read > LARGEST_BYTES:
            raise LoadProblem(f"the client container holds more than {LARGEST_BYTES} bytes for one window")
        yield block
