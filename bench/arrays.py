"""Room bench: client.npz: a window's raw arrays, written and read."""

import lzma
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np

from images.errors import RunProblem

FILE = "client.npz"
MAX_BYTES = 400_000_000  # all arrays of a window together, unpacked
TICKS, TICK = "gap_ticks", "tick_us"  # in the place of gaps_us: a window's gaps, and how long a tick is
TICKS_US = (100, 250, 500, 1000)  # the longest that is at most FINE of the median gap, else the shortest
FINE = 1 / 64
# What a damaged, odd or encrypted archive makes zipfile and numpy raise.
UNREADABLE = (OSError, ValueError, EOFError, KeyError, MemoryError, OverflowError, NotImplementedError, RuntimeError)
UNREADABLE += (zipfile.BadZipFile, zlib.error, lzma.LZMAError)
NAMES = {
    "start_s": np.floating,
    "ttft_s": np.floating,
    "e2e_s": np.floating,
    "input_tokens": np.integer,
    "output_tokens": np.integer,
    "chunks": np.integer,
    "gaps_us": np.integer,
    "error": np.str_,
}
OPTIONAL = {"looping": np.bool_, "client": np.int16}  # windows of the first schema lack them


def save_window(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write client.npz whole or not at all. LZMA: numpy reads it as any, and it takes half the space of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = _in_ticks(arrays)
    partial = folder / f"{FILE}.partial"
    with partial.open("wb") as sink:
        with zipfile.ZipFile(sink, "w", zipfile.ZIP_LZMA) as packed:
            for name, array in arrays.items():
                with packed.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, np.ascontiguousarray(array), allow_pickle=False)
        sink.flush()
        os.fsync(sink.fileno())
    partial.rename(folder / FILE)


def _in_ticks(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays with `gap_ticks` (G, uint16 where they fit) and `tick_us` in the place of `gaps_us`.

    It is the time since a request's first chunk that is rounded, not each gap: the errors of a request's gaps don't
    add up. A finer clock would keep the noise of the client's own event loop, which is most of such a file.
    """
    gaps, count = arrays["gaps_us"].astype(np.int64), _gaps_of_requests(arrays)
    tick = max((each for each in TICKS_US[1:] if gaps.size and each <= FINE * np.median(gaps)), default=TICKS_US[0])
    elapsed = np.concatenate([[0], np.cumsum(gaps)])
    begins = np.repeat(np.cumsum(count) - count, count)
    moments = (2 * (elapsed[1:] - elapsed[begins]) + tick) // (2 * tick)
    before = np.concatenate([[0], moments[:-1]])
    before[begins == np.arange(len(gaps))] = 0
    ticks = moments - before
    kind = np.uint16 if not ticks.size or ticks.max() <= np.iinfo(np.uint16).max else np.uint32
    others = {name: array for name, array in arrays.items() if name != "gaps_us"}
    return {**others, TICKS: ticks.astype(kind), TICK: np.array([tick], np.uint16)}


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """Read the arrays a verdict needs, each a list (see load.compact); `gaps_us` in µs, however it was kept.

    Raises RunProblem for a file that holds anything else.
    """
    try:
        arrays = _unpacked(file)
    except UNREADABLE as error:
        raise RunProblem(f"{file}: not a window's raw arrays: {error}") from error
    for name, kind in NAMES.items():
        array = arrays[name]
        if not np.issubdtype(array.dtype, kind) or array.dtype.kind not in "fiuU" or array.ndim != 1:
            raise RunProblem(f"{file}: wanted {name!r} as a list of {kind.__name__}")
        if kind is not np.str_ and not (np.isfinite(array).all() and (array >= 0).all()):
            raise RunProblem(f"{file}: {name!r} holds numbers that are negative or not finite")
    requests = {len(arrays[name]) for name in NAMES if name != "gaps_us"}
    if len(requests) != 1 or int(_gap_count(arrays)) != len(arrays["gaps_us"]):
        raise RunProblem(f"{file}: the arrays' lengths don't agree")
    for name, kind in OPTIONAL.items():
        if name in arrays and (arrays[name].dtype != kind or arrays[name].shape != arrays["start_s"].shape):
            raise RunProblem(f"{file}: wanted {name!r} as a list of {kind.__name__}, one a request")
    return arrays


def _unpacked(file: Path) -> dict[str, np.ndarray]:
    """The arrays that are wanted, and no others; sizes are looked at before anything is unpacked."""
    with zipfile.ZipFile(file) as packed:
        sizes = {entry.filename: entry.file_size for entry in packed.infolist()}
    gaps = [TICKS, TICK] if f"{TICKS}.npy" in sizes else ["gaps_us"]
    wanted = [
        *(name for name in NAMES if name != "gaps_us"),
        *gaps,
        *(name for name in OPTIONAL if f"{name}.npy" in sizes),
    ]
    for name in wanted:
        if f"{name}.npy" not in sizes:
            raise ValueError(f"array {name!r} is missing")
    widened = sizes.get(f"{TICKS}.npy", 0)  # a tick may have two bytes, a gap in µs has four
    if sum(sizes[f"{name}.npy"] for name in wanted) + widened > MAX_BYTES:
        raise ValueError(f"the arrays have more than {MAX_BYTES} bytes")
    with np.load(file, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in wanted}
    if TICKS in arrays:
        arrays["gaps_us"] = _in_us(arrays.pop(TICKS), arrays.pop(TICK))
    return arrays


def _in_us(ticks: np.ndarray, tick: np.ndarray) -> np.ndarray:
    if ticks.dtype not in (np.uint16, np.uint32) or tick.dtype != np.uint16 or tick.shape != (1,) or tick[0] == 0:
        raise ValueError(f"wanted {TICKS!r} as a list of uint16 or uint32, and {TICK!r} as one uint16 above 0")
    if ticks.size and int(ticks.max()) * int(tick[0]) > np.iinfo(np.uint32).max:
        raise ValueError(f"{TICKS!r} holds a gap of more than an hour")
    return ticks.astype(np.uint32) * np.uint32(tick[0])


def _gaps_of_requests(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """How many gaps each request has: one fewer than chunks, since the first chunk's time is `ttft_s`."""
    return arrays["chunks"].astype(np.int64) - (arrays["ttft_s"] > 0)


def _gap_count(arrays: dict[str, np.ndarray]) -> int:
    gaps = _gaps_of_requests(arrays) if len(arrays["chunks"]) == len(arrays["ttft_s"]) else np.array([-1])
    return int(gaps.sum()) if (gaps >= 0).all() else -1
