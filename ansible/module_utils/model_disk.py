"""A model cache on the disk: whose it is, its lock, what lies in it, what is arriving. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
from pathlib import Path

try:
    from ansible.module_utils.model_hub import ModelProblem, Told
except ImportError:
    from model_hub import ModelProblem, Told

CHUNK = 1 << 20
LOCK_POLL_S = 0.5
GIVEN_AWAY_WITHIN_S = 2.0


@contextlib.contextmanager
def inside(cache: Path, owner: int, group: int, make: bool):
    """Work in the cache's folder as its owner; root lends itself to them, so that no link of theirs leads us astray.

    Yields whether there is a cache. Paths are relative from here on: the owner need not see the folders above.
    """
    before, uid, gid = os.getcwd(), os.geteuid(), os.getegid()
    if uid not in {0, owner}:
        raise ModelProblem(f"found uid {uid}, wanted root or the cache's owner {owner}")
    if make and not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another run has just made it
            cache.mkdir(mode=0o755)
            os.chown(cache, owner, group)
    if not cache.exists():
        yield False
        return
    while (found := cache.stat().st_uid) != owner and _just_made(cache):
        time.sleep(LOCK_POLL_S / 10)  # another run gives it away now
    if found != owner:
        raise ModelProblem(
            f"{cache} belongs to uid {found}, wanted {owner}; it is left alone. Choose another folder, or give it away"
        )
    groups = os.getgroups()
    os.chdir(cache)
    try:
        if uid == 0 and owner != 0:
            os.setgroups([])
            os.setegid(group)
            os.seteuid(owner)
        yield True
    except OSError as error:
        where = f"{cache}/{error.filename}" if error.filename else str(cache)
        raise ModelProblem(f"{where}: {error.strerror} (as uid {owner}); what has arrived is kept") from error
    finally:
        os.seteuid(uid)
        os.setegid(gid)
        if uid == 0:
            os.setgroups(groups)
        os.chdir(before)


def _just_made(folder: Path) -> bool:
    """Whether a folder of ours is so new that whoever made it may not have given it away yet."""
    seen = folder.stat()
    return seen.st_uid == os.geteuid() and time.time() - seen.st_ctime < GIVEN_AWAY_WITHIN_S


@contextlib.contextmanager
def as_ourselves():
    """Be root again where we are: the operator's source folder is read with the operator's rights."""
    lent = os.geteuid()
    if os.getuid() == 0:
        os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(lent)


@contextlib.contextmanager
def locked(file: Path, wait_s: float):
    """Hold a lock; wait for another run that holds it. A run that died holds nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    with file.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelProblem(f"another run holds {file}, waited {wait_s:g} s") from None
                time.sleep(LOCK_POLL_S)
        yield


def write_json(file: Path, value: object) -> None:
    """Write a small file so that nobody reads half of it."""
    fresh = file.with_name(file.name + ".new")
    with fresh.open("w") as sink:
        json.dump(value, sink, indent=1, sort_keys=True)
        sink.flush()
        os.fsync(sink.fileno())
    fresh.replace(file)


def read_json(file: Path) -> dict:
    """A small file of ours; empty where it is missing or not ours."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def sha256_of(file: Path) -> str:
    """The sha256 of a file as hex digits."""
    with file.open("rb") as source:
        digest = hashlib.sha256()
        while data := source.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()


def is_held(file: Path) -> bool:
    """Whether a run holds this lock now."""
    try:
        with file.open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def shown(count: float) -> str:
    """Bytes as a person reads them: 43 B, 5.0 MB, 70.1 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


class Progress:
    """Bytes so far, in a small file that others may read, and in lines where a person watches."""

    def __init__(self, file: Path, total: int, say=None, every_s: float = 10.0) -> None:
        """Write `file` at most every second and call `say(text)` every `every_s` seconds."""
        self.file, self.total, self.say, self.every_s = file, total, say, every_s
        self.done = self.fetched = 0
        self.started = self.said = time.monotonic()
        self.written = 0.0
        self.lock = threading.Lock()

    def add(self, count: int, fetched: bool = True) -> None:
        """Count bytes that lie on the disk; negative where a file begins anew."""
        with self.lock:
            self.done += count
            self.fetched += count if fetched else 0
            now = time.monotonic()
            if now - self.written > 1:
                self.written = now
                write_json(self.file, {"text": self.text(), "done": self.done, "total": self.total})
            if self.say and now - self.said > self.every_s:
                self.said = now
                self.say(self.text())

    def text(self) -> str:
        """As a person reads it: how much of how much, how fast, how long still."""
        rate = self.fetched / max(time.monotonic() - self.started, 1e-3)
        left = f", {(self.total - self.done) / rate / 60:.0f} min left" if rate > 0 else ""
        return f"{shown(self.done)} of {shown(self.total)}, {shown(rate)}/s{left}"


class Partial:
    """A file that is arriving, with the hashes of what is there: sha256, and git's blob sha1 for hubs' small files."""

    def __init__(self, file: Path, told: Told, progress: Progress) -> None:
        """Open it where an earlier run ended, and read what that left."""
        self.told, self.progress, self.size = told, progress, 0
        self.sink = file.open("a+b")
        self._begin()
        self.sink.seek(0)
        while data := self.sink.read(CHUNK):
            self._count(data, fetched=False)

    def _begin(self) -> None:
        self.sha256 = hashlib.sha256()
        self.blob = hashlib.sha1(b"blob %d\0" % self.told.size, usedforsecurity=False)

    def _count(self, data: bytes, fetched: bool) -> None:
        self.sha256.update(data)
        self.blob.update(data)
        self.size += len(data)
        self.progress.add(len(data), fetched)

    def write(self, data: bytes) -> None:
        """Append. Raises ModelProblem where the disk won't, or the source sends more than it told."""
        if self.size + len(data) > self.told.size:
            raise ModelProblem(f"{self.sink.name}: the source sends more than the {self.told.size} bytes it told")
        try:
            self.sink.write(data)
        except OSError as error:
            raise ModelProblem(f"{self.sink.name}: {error.strerror}; what has arrived is kept") from error
        self._count(data, fetched=True)

    def restart(self) -> None:
        """Throw away what is there."""
        self.sink.truncate(0)
        self.progress.add(-self.size, fetched=False)
        self.size = 0
        self._begin()

    def fault(self) -> str | None:
        """What is wrong with the whole file, or None. Without any hash to compare with, the size decides."""
        if self.size != self.told.size:
            return f"found {self.size} bytes, wanted {self.told.size}"
        pairs = [(self.told.sha256, self.sha256, "sha256"), (self.told.blob, self.blob, "git blob sha1")]
        wanted, seen, kind = next((pair for pair in pairs if pair[0]), (None, None, ""))
        return f"found {kind} {seen.hexdigest()}, wanted {wanted}" if wanted and seen.hexdigest() != wanted else None

    def close(self, whole: bool) -> None:
        """Close it; a whole file is brought to the disk first, since its size and time will vouch for it."""
        if whole:
            self.sink.flush()
            os.fsync(self.sink.fileno())
        self.sink.close()
