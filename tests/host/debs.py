"""Tests: package archives for apt, made of .deb files: an index, and a signature where one is wanted."""

import gzip
import hashlib
import subprocess
from pathlib import Path


def index_packages(folder: Path) -> None:
    """Write the Packages index of a flat archive beside its .deb files."""
    entries = []
    for file in sorted(folder.glob("*.deb")):
        control = subprocess.run(["dpkg-deb", "-f", str(file)], capture_output=True, text=True, check=True).stdout
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        extra = f"Filename: ./{file.name}\nSize: {file.stat().st_size}\nSHA256: {digest}\n"
        entries.append(control.rstrip("\n") + "\n" + extra)
    text = "\n".join(entries).encode()
    (folder / "Packages").write_bytes(text)
    (folder / "Packages.gz").write_bytes(gzip.compress(text, mtime=0))
