"""Room recipes: what an engine compiles and tunes at its first boot, kept per engine identity, saved and restored.

Kernels of Triton and FlashInfer, torch.compile's graphs, autotuned tactics: a boot that finds them is faster, and two
autotunes of one engine may choose tactics that serve several percent apart. So each boot records what it found.
"""

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from images.engine import Engine
from images.errors import UsageProblem
from images.index import cache_root
from images.yaml_source import shown
from recipes.model_files import sha256

FOLDERS = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}
LABEL = "station-recipes-caches.json"
LARGEST_BYTES = 20_000_000_000
BLOCK_BYTES = 1_000_000
# All that reading a file which somebody changed, cut off or never made can end in.
DAMAGED = (OSError, tarfile.TarError, EOFError, KeyError, AttributeError, ValueError, zlib.error)


@dataclass(frozen=True)
class CacheState:
    """The caches as a boot finds them: cold, warm, or partly where they lacked something. `sha256` is over every
    file's path and content; None for a cold boot."""

    state: str
    files: int
    bytes: int
    sha256: str | None


def cache_home(engine: Engine) -> Path:
    """The folder of an engine's caches, present or not."""
    return cache_root() / "jit" / f"{engine.name}-{engine.identity}"


def cache_environment(engine: Engine) -> dict[str, str]:
    """The variables that keep an engine's caches in its own folder."""
    return {name: str(cache_home(engine) / folder) for name, folder in FOLDERS.items()}


def look(engine: Engine) -> CacheState:
    """Read the caches as they are now: cold where nothing is kept, else warm."""
    home = cache_home(engine)
    digest, count, size = hashlib.sha256(), 0, 0
    for file in sorted(path for path in home.rglob("*") if path.is_file() and not path.is_symlink()):
        try:
            inside = sha256(file)
            size += file.stat().st_size
        except OSError:  # a lock file of another process that has just gone
            continue
        digest.update(f"{file.relative_to(home).as_posix()}\0{inside}\n".encode())
        count += 1
    return CacheState("warm", count, size, digest.hexdigest()) if count else CacheState("cold", 0, 0, None)


def found(before: CacheState, after: CacheState) -> CacheState:
    """The caches as a boot found them, told by what it left: one that had to add to them found a part."""
    return replace(before, state="partly") if before.sha256 and before.sha256 != after.sha256 else before


def save(engine: Engine, file: Path) -> str:
    """Write an engine's caches into one file; returns its SHA-256.

    Raises UsageProblem where there is nothing to save, or the file can't be written.
    """
    home = cache_home(engine)
    if not home.is_dir():
        raise UsageProblem(f"{engine.name} {engine.version} has no caches yet: boot it once")
    label = json.dumps({"schema": 1, "engine": engine.name, "identity": engine.identity}).encode()
    partial = file.with_name(file.name + ".partial")
    try:
        with tarfile.open(partial, "w:gz", compresslevel=1) as packed:
            entry = tarfile.TarInfo(LABEL)
            entry.size = len(label)
            packed.addfile(entry, io.BytesIO(label))
            packed.add(home, arcname="caches", filter=lambda each: each if each.isfile() or each.isdir() else None)
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageProblem(f"{shown(file)}: can't be written: {error.strerror}") from error
    return sha256(file)


def restore(engine: Engine, file: Path) -> str:
    """Put saved caches in the place of an engine's; returns the file's SHA-256.

    Raises UsageProblem where the file isn't whole, is another engine's, or holds anything but plain files below it.
    """
    home = cache_home(engine)
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".restoring-") as name:
        try:
            with tarfile.open(file, "r:gz") as packed:
                label = json.loads(packed.extractfile(LABEL).read(4096))
                if (label.get("engine"), label.get("identity")) != (engine.name, engine.identity):
                    raise UsageProblem(
                        f"{shown(file)} holds caches of {label.get('engine')} {label.get('identity')}; this engine is "
                        f"{engine.name} {engine.identity}"
                    )
                members = [each for each in packed.getmembers() if each.name != LABEL]
                if any(not (each.isfile() or each.isdir()) for each in members):
                    raise UsageProblem(f"{shown(file)} holds something else than files and folders")
                if sum(each.size for each in members) > LARGEST_BYTES:
                    raise UsageProblem(f"{shown(file)} unpacks to more than {LARGEST_BYTES / 1e9:.0f} GB")
                packed.extractall(name, members=members, filter="data")
                while packed.fileobj.read(BLOCK_BYTES):  # to the end of the gzip: its checksum stands there
                    pass
        except DAMAGED as error:
            raise UsageProblem(f"{shown(file)}: no caches that were saved by this tool: {error}") from error
        unpacked = Path(name) / "caches"
        if not unpacked.is_dir():
            raise UsageProblem(f"{shown(file)} holds no caches")
        shutil.rmtree(home, ignore_errors=True)
        unpacked.replace(home)
    return sha256(file)
