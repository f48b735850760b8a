"""Room bench: client.npz: a window's raw arrays, written and read."""

import os
import zipfile
import zlib
from pathlib import Path

import numpy as np

from images.errors import RunProblem

FILE = "client.npz"
MAX_BYTES = 400_000_000  # all arrays of a window together, unpacked
TICK_US = 100  # a chunk's moment is kept to this
TICKS = "gap_ticks"  # uint16, in the place of gaps_us
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
    """The arrays with `gap_ticks` (G, uint16, of TICK_US each) in the place of `gaps_us`: a third less in a file.

    Gaps that aren't on the grid, or are longer than 6.5 s, stay as they are.
    """
    gaps = arrays["gaps_us"]
    if np.any(gaps % TICK_US) or np.any(gaps > np.iinfo(np.uint16).max * TICK_US):
        return arrays
    others = {name: array for name, array in arrays.items() if name != "gaps_us"}
    return {**others, TICKS: (gaps // TICK_US).astype(np.uint16)}


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """Read the arrays a verdict needs, each a list (see load.compact); `gaps_us` in µs, however it was kept.

    Raises RunProblem for a file that holds anything else.
    """
    try:
        arrays = _unpacked(file)
    except (OSError, ValueError, EOFError, KeyError, MemoryError, OverflowError, zipfile.BadZipFile) as error:
        raise RunProblem(f"{file}: not a window's raw arrays: {error}") from error
    except (NotImplementedError, RuntimeError, zlib.error) as error:  # odd compression, encrypted
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
    gaps = TICKS if f"{TICKS}.npy" in sizes else "gaps_us"
    needed = [gaps if name == "gaps_us" else name for name in NAMES]
    wanted = [*needed, *(name for name in OPTIONAL if f"{name}.npy" in sizes)]
    for name in wanted:
        if f"{name}.npy" not in sizes:
            raise ValueError(f"array {name!r} is missing")
    if sum(sizes[f"{name}.npy"] for name in wanted) > MAX_BYTES:
        raise ValueError(f"the arrays have more than {MAX_BYTES} bytes")
    with np.load(file, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in wanted}
    if gaps == TICKS:
        arrays["gaps_us"] = _in_us(arrays.pop(TICKS))
    return arrays


def _in_us(ticks: np.ndarray) -> np.ndarray:
    if ticks.dtype != np.uint16:
        raise ValueError(f"wanted {TICKS!r} as a list of uint16")
    return ticks.astype(np.uint32) * np.uint32(TICK_US)


def _gap_count(arrays: dict[str, np.ndarray]) -> int:
    first = (arrays["ttft_s"] > 0).astype(np.int64)
    gaps = arrays["chunks"].astype(np.int64) - first if len(arrays["chunks"]) == len(first) else np.array([-1])
    return int(gaps.sum()) if (gaps >= 0).all() else -1
