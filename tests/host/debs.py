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


def build_deb(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """Build a package of executable text files, DEBIAN/postinst among them if there is one; returns the .deb."""
    tree = folder / f"{name}-{version}"
    for path, text in {**files, "DEBIAN/control": _control(name, version)}.items():
        file = tree / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o644 if path == "DEBIAN/control" else 0o755)
    deb = folder / f"{name}_{version}_all.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Znone", "-b", str(tree), str(deb)], check=True, capture_output=True
    )
    return deb


def _control(name: str, version: str) -> str:
    return f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: tests\nDescription: a stub\n"


class SigningKey:
    """A key made for a test: signs an archive, and shows its public half."""

    def __init__(self, home: Path, name: str) -> None:
        home.mkdir(mode=0o700)
        self._gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--pinentry-mode", "loopback"]
        made = [*self._gpg, "--passphrase", "", "--quick-generate-key", name, "rsa2048", "sign", "never"]
        subprocess.run(made, check=True, capture_output=True)
        export = subprocess.run([*self._gpg, "--armor", "--export"], check=True, capture_output=True, text=True)
        self.public = export.stdout
        subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)

    def sign(self, folder: Path) -> None:
        """Index a flat archive and sign the index."""
        index_packages(folder)
        lines = ["Origin: tests", "Suite: /", "SHA256:"]
        for name in ("Packages", "Packages.gz"):
            data = (folder / name).read_bytes()
            lines.append(f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}")
        (folder / "Release").write_text("\n".join(lines) + "\n")
        sign = [*self._gpg, "--passphrase", "", "--yes", "--clearsign", "-o", str(folder / "InRelease")]
        subprocess.run([*sign, str(folder / "Release")], check=True, capture_output=True)
