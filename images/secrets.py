"""Room images: looks for secrets in an image: in every layer, its history, its environment and its labels."""

import re
import subprocess
import tarfile
from collections.abc import Iterator
from typing import IO

from images.docker_engine import DockerProblem

SMALL_BYTES = 1 << 20  # a secret lies in a small text file
# The tokens of hubs, forges, clouds and registries, private keys, and addresses with a password.
PATTERNS = {
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{34}\b",
    "a GitHub token": rb"\bgh[pousr]_[A-Za-z0-9]{36}\b|\bgithub_pat_[A-Za-z0-9_]{60,}\b",
    "an NVIDIA key": rb"\bnvapi-[A-Za-z0-9_-]{60,}",
    "an AWS key": rb"\bAKIA(?![A-Z0-9]{9}EXAMPLE)[A-Z0-9]{16}\b",
    "an API key": rb"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{40,}",
    "a package index token": rb"\bpypi-AgEIcHlwaS5vcmc[A-Za-z0-9_-]{50,}",
    "a private key": rb"-----BEGIN (?:RSA |EC |OPENSSH |DSA )?PRIVATE KEY-----\s+[A-Za-z0-9+/=\s]{100}",
    "an address with a password": rb"\bhttps?://[A-Za-z0-9._-]{1,64}:(?!pass|secret|pw\b)[^\s/@'\"<>{}$:]{6,}@[A-Za-z0-9.-]+\.[a-z]{2,}",
}
WANTED = re.compile(b"|".join(b"(?P<p%d>%s)" % (number, each) for number, each in enumerate(PATTERNS.values())))
NAMES = re.compile(
    r"(^|/)(\.netrc|\.pypirc|\.git-credentials|\.docker/config\.json|id_(rsa|ed25519|ecdsa)|\.huggingface/token)$"
)


def secrets_in(reference: str) -> list[str]:
    """What looks like a secret in an image: one line each, naming kind and place, never the value.

    Raises DockerProblem when the image can't be read.
    """
    with subprocess.Popen(["docker", "save", reference], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|", bufsize=1 << 20) as saved:
                found = [
                    line
                    for member in saved
                    if member.isfile()
                    for line in _member(saved.extractfile(member), member.name)
                ]
        except tarfile.TarError as error:
            process.kill()
            said = process.stderr.read().decode(errors="replace").strip()
            raise DockerProblem(f"{reference} can't be read: {said or error}") from error
        finally:
            process.stdout.close()
            process.kill()
    return sorted(set(found))


def _member(source: IO[bytes], name: str) -> Iterator[str]:
    """A member of the saved image: a layer (a tar), or the image's configuration (JSON)."""
    head = source.read(512)
    if head[257:262] == b"ustar":
        yield from _layer(_Rejoined(head, source))
    elif len(head) == 512 or head[:1] in b"{[":
        yield from (f"{kind} in the image's configuration ({name})" for kind in kinds(head + source.read(SMALL_BYTES)))


class _Rejoined:
    """A stream whose first bytes were already read."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = head, rest

    def read(self, size: int) -> bytes:
        """Read the next bytes, at most `size`."""
        head, self._head = self._head[:size], self._head[size:]
        return head + self._rest.read(size - len(head)) if len(head) < size else head


def _layer(stream: _Rejoined) -> Iterator[str]:
    with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20) as layer:
        for member in layer:
            if not member.isfile():
                continue
            path = "/" + member.name.removeprefix("./")
            if NAMES.search(path):
                yield f"a file of credentials: {path}"
            if member.size <= SMALL_BYTES and not path.endswith((".so", ".pyc")):
                yield from (f"{kind} in {path}" for kind in kinds(layer.extractfile(member).read()))


def kinds(content: bytes) -> list[str]:
    """The kinds of secrets that a content seems to hold."""
    names = list(PATTERNS)
    return sorted({names[int(match.lastgroup[1:])] for match in WANTED.finditer(content)})
