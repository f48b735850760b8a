"""Room images: gzip: written so that the same content has the same bytes, read so that a bomb stays packed."""

import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO

LEVEL = 9


def gzipped(data: bytes) -> bytes:
    """Pack `data`: no time, no name and no system in the header, so the same bytes whenever and wherever it is run.

    (gzip.compress writes the system's number from Python 3.11 to 3.12. Another zlib may still pack otherwise.)
    """
    sink = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=sink, mtime=0) as packed:
        packed.write(data)
    return sink.getvalue()


def gunzipped(source: Path | BinaryIO, most: int) -> bytes | None:
    """Unpack a file; None where it holds more than `most` bytes: never more than these are unpacked.

    Raises ValueError where it is no gzip file, has no bytes, or is cut short.
    """
    try:
        with gzip.open(source) as packed:
            data = packed.read(most + 1)
            empty = not data and packed.fileobj.tell() == 0  # which gzip itself takes for nothing, well packed
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"not a gzip file: {error}") from error
    if empty:
        raise ValueError("not a gzip file: it has no bytes")
    return data if len(data) <= most else None
