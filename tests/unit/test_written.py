"""A file is written whole or not at all: what was there stays, and nothing half written."""

import errno
import os
from pathlib import Path

import pytest

from images.written import write_whole


def test_what_a_full_disk_cuts_off_leaves_the_file_of_before_and_nothing_else(tmp_path: Path, monkeypatch):
    file = tmp_path / "run.sh"
    write_whole(file, b"whole", 0o755)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"whole", 0o755)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, b"longer than before")
    assert file.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [file]


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path):
    (tmp_path / "theirs").write_bytes(b"theirs")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    write_whole(tmp_path / "link", b"ours")
    assert (tmp_path / "theirs").read_bytes() == b"theirs" and not (tmp_path / "link").is_symlink()
