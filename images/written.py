"""Room images: a file is written whole or not at all."""

import os
import tempfile
from pathlib import Path

PARTIAL = ".partial"


def write_whole(file: Path, data: bytes, mode: int = 0o644, workshop: Path | None = None) -> None:
    """Write a file of an existing folder whole or not at all; never through a link, and two at once don't mix.

    `workshop`: where it is written first, on the same disk, if its own folder may hold nothing else meanwhile.
    What was there stays where it fails, and nothing half written. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=PARTIAL, dir=workshop or file.parent)
    try:
        with open(descriptor, "wb") as sink:
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        Path(name).chmod(mode)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
