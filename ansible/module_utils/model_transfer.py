"""Bringing a model's files into the staging folder and letting the whole appear. Standard library only."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import threading
from pathlib import Path

try:
    from ansible.module_utils.model_disk import CHUNK, Partial, Progress, as_ourselves, sha256_of, write_json
    from ansible.module_utils.model_hub import ModelProblem, Told
    from ansible.module_utils.model_request import Request
except ImportError:
    from model_disk import CHUNK, Partial, Progress, as_ourselves, sha256_of, write_json
    from model_hub import ModelProblem, Told
    from model_request import Request

SCHEMA = 1


def bring(request: Request, name: str, told: Told, progress: Progress, stop: threading.Event) -> str:
    """Bring one file into the staging folder, going on where an earlier run ended; returns its sha256.

    Raises ModelProblem where its content is wrong, twice in a row from a hub: a file may change between two halves.
    """
    target = request.place("staging") / name
    partial = target.with_name(target.name + ".partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    if request.link:
        return make_link(request, name, told, progress)
    if target.exists() and target.stat().st_nlink > 1:  # an operator's file with a second name: not ours to open
        target.unlink()
    elif target.exists():  # whole for an earlier run: read again, a power cut may have come in between
        target.chmod(0o644)
        target.replace(partial)
    file = Partial(partial, told, progress)
    try:
        for last in (False, True):
            if file.size > told.size:
                file.restart()
            receive(request, name, file, stop)
            fault = file.fault()
            if fault is None:
                break
            file.restart()
            if last or request.hub is None:
                raise ModelProblem(f"{name} from {request.source}: {fault}; thrown away")
    finally:
        file.close(whole=file.size == told.size)
    partial.chmod(0o444)
    partial.replace(target)
    return file.sha256.hexdigest()


def receive(request: Request, name: str, file: Partial, stop: threading.Event) -> None:
    """Read a file's bytes from the source until all are there."""

    def attempt() -> None:
        with request.hub.file(request.repo, request.revision, name, file.size) as answer:
            if answer.from_start and file.size:
                file.restart()
            pump(answer)
        if file.size < file.told.size:
            raise ConnectionError(f"the connection ended after {file.size} of {file.told.size} bytes")

    def pump(source) -> None:
        while data := source.read1(CHUNK):  # what is there, so that a killed run loses little
            file.write(data)
            if stop.is_set():
                raise ModelProblem("ended, since another file failed")

    if request.hub is not None:
        if file.size < file.told.size or not file.told.size:
            request.hub.patiently(name, attempt, lambda: file.size, stop.wait)
        return
    with as_ourselves():
        source = (Path(request.source) / name).open("rb")
    with source:
        source.seek(file.size)
        pump(source)


def make_link(request: Request, name: str, told: Told, progress: Progress) -> str:
    """Give an operator's file a second name in the staging folder; its owner and mode stay as they are.

    Raises ModelProblem for another content, another file system, or a folder that isn't the cache owner's.
    """
    target = request.place("staging") / name
    with as_ourselves():
        source = (Path(request.source) / name).resolve()
        found = sha256_of(source)
    if found != (told.sha256 or found):
        raise ModelProblem(f"{name} in {request.source}: found sha256 {found}, wanted {told.sha256}")
    target.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with as_ourselves():
            if os.fstat(folder).st_uid != request.owner or os.fstat(folder).st_dev != source.stat().st_dev:
                raise ModelProblem(f"{source} and {request.cache} are on different file systems: use link: false")
            os.link(source, target.name, dst_dir_fd=folder)
    finally:
        os.close(folder)
    with target.open("rb"):  # whether the owner may read it at all
        progress.add(told.size, fetched=False)
    return found


def bring_all(request: Request, files: dict[str, Told], progress: Progress) -> dict[str, str]:
    """Bring every file, several at a time from a hub; returns their sha256. One that fails ends the others."""
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(request.streams if request.hub else 1) as pool:
        jobs = {name: pool.submit(bring, request, name, told, progress, stop) for name, told in files.items()}
        try:
            for job in concurrent.futures.as_completed(jobs.values()):
                job.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {name: job.result() for name, job in jobs.items()}


def finish(request: Request, digests: dict[str, str]) -> None:
    """Write the manifest, then let the folder appear."""
    staging, finished = request.place("staging"), request.place("finished")
    for file in list(staging.rglob("*")):
        if not file.is_dir() and str(file.relative_to(staging)) not in digests:
            file.unlink()
    entries = {}
    for name, digest in digests.items():
        seen = (staging / name).stat()
        entries[name] = {"sha256": digest, "size": seen.st_size, "mtime_ns": seen.st_mtime_ns}
    said = {"schema": SCHEMA, "repo": request.repo, "revision": request.revision, "source": request.source}
    write_json(request.place("manifest"), {**said, "files": entries})
    staging.replace(finished)
    for folder in [finished, *(each for each in finished.rglob("*") if each.is_dir())]:
        folder.chmod(0o555)
    request.place("progress").unlink(missing_ok=True)


def take_back(request: Request, wrong: dict[str, str]) -> None:
    """Make the finished folder a partial one again, without the files that are wrong; the others needn't come again."""
    staging, finished = request.place("staging"), request.place("finished")
    if finished.is_dir():
        shutil.rmtree(staging, ignore_errors=True)
        for folder in [finished, *(each for each in finished.rglob("*") if each.is_dir())]:
            folder.chmod(0o755)
        finished.replace(staging)
    request.place("manifest").unlink(missing_ok=True)
    for name in wrong:
        if name:
            (staging / name).unlink(missing_ok=True)


def arrived(request: Request, name: str, told: Told, wrong: dict[str, str]) -> int:
    """Bytes of a file that need not come again."""
    if name in wrong:
        return 0
    finished, staged = request.place("finished") / name, request.place("staging") / name
    there = [file.stat().st_size for file in (finished, staged, Path(f"{staged}.partial")) if file.is_file()]
    return min(max(there, default=0), told.size)
