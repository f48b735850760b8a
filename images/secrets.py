"""Room images: looks for secrets in an image: in every layer, its history, its environment and its labels."""

import base64
import csv
import hashlib
import posixpath
import re
import tarfile
from dataclasses import dataclass, field

from images.layers import Peeked, read_stream, saved_by_engine

BUFFER = 1 << 20
SMALL_BYTES = 1 << 20  # a secret lies in a small text file
# The tokens of hubs, forges, clouds and registries, private keys, and addresses with a password: for each, the bytes
# that it can't do without (looking for those first is ten times as fast) and its whole shape.
PATTERNS = {
    "a Hugging Face token": (b"hf_", rb"\bhf_[A-Za-z0-9]{34}\b"),
    "a GitHub token": (b"gh", rb"\bgh[pousr]_[A-Za-z0-9]{36}\b|\bgithub_pat_[A-Za-z0-9_]{60,}\b"),
    "an NVIDIA key": (b"nvapi-", rb"\bnvapi-[A-Za-z0-9_-]{60,}"),
    "an AWS key": (b"AKIA", rb"\bAKIA(?![A-Z0-9]{9}EXAMPLE)[A-Z0-9]{16}\b"),
    "an API key": (b"sk-", rb"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{40,}"),
    "a package index token": (b"pypi-AgEI", rb"\bpypi-AgEIcHlwaS5vcmc[A-Za-z0-9_-]{50,}"),
    "a private key": (
        b" PRIVATE KEY-----",
        rb"-----BEGIN (?:RSA |EC |OPENSSH |DSA )?PRIVATE KEY-----\s+[A-Za-z0-9+/=\s]{100}",
    ),
    "an address with a password": (
        b"://",
        rb"://[A-Za-z0-9._-]{1,64}:(?!pass|secret|pw\b)[^\s/@'\"<>{}$:]{6,}@[A-Za-z0-9.-]+\.[a-z]{2,}",
    ),
}
# The hash of a file in a package's RECORD: 43 letters by chance, which may begin like a key.
RECORD_HASH = re.compile(rb",sha256=[A-Za-z0-9_-]{43},")
SHAPES = {kind: (sign, re.compile(shape)) for kind, (sign, shape) in PATTERNS.items()}
NAMES = re.compile(
    r"(^|/)(\.netrc|\.pypirc|\.git-credentials|\.docker/config\.json|id_(rsa|ed25519|ecdsa)|\.huggingface/token)$"
)


@dataclass
class _Found:
    """What the layers hold: places that look like secrets, and what each package says its files are."""

    places: list[tuple[str, str, str]] = field(default_factory=list)  # kind, path, sha256 of the file
    published: set[tuple[str, str]] = field(default_factory=set)  # path, sha256


def secrets_in(reference: str) -> list[str]:
    """What looks like a secret in an image: one line each, naming kind and place, never the value.

    A file that a package's own RECORD lists with the same hash is public: examples in it are nobody's secrets.
    Raises ImageProblem when the image, or one of its layers, can't be read.
    """
    found = _Found()

    def take(stream: Peeked, mode: str) -> None:
        _layer(stream, mode, found)

    _, _, blobs = saved_by_engine([reference], [reference], lambda source: read_stream(source, take))
    for name, content in blobs.items():
        if content[:1] in {b"{", b"["}:
            found.places += [(kind, f"in the image's configuration ({name})", "") for kind in kinds(content)]
    return sorted(
        {f"{kind} {place}" for kind, place, digest in found.places if (place[3:], digest) not in found.published}
    )


def _layer(stream: Peeked, mode: str, found: _Found) -> None:
    with tarfile.open(fileobj=stream, mode=mode, bufsize=BUFFER) as layer:
        for member in layer:
            layer.members = []  # the list would hold every header
            if not member.isfile():
                continue
            path = "/" + member.name.removeprefix("./")
            if NAMES.search(path):
                found.places.append(("a file of credentials:", path, ""))
            if member.size > SMALL_BYTES or path.endswith((".so", ".pyc")):
                continue
            content = layer.extractfile(member).read()
            if path.endswith(".dist-info/RECORD"):
                found.published |= _recorded(path, content)
            seen = kinds(content)
            if seen:
                digest = hashlib.sha256(content).hexdigest()
                found.places += [(kind, f"in {path}", digest) for kind in seen]


def _recorded(path: str, content: bytes) -> set[tuple[str, str]]:
    """The files of a package, as its RECORD lists them: path, sha256 in hex. Format: PEP 376, PEP 427."""
    root = path.rsplit("/", 2)[0]
    rows = csv.reader(content.decode(errors="replace").splitlines())
    listed = [(row[0], row[1][7:]) for row in rows if len(row) >= 2 and row[1].startswith("sha256=")]
    return {(posixpath.normpath(f"{root}/{name}"), _hex(value)) for name, value in listed}


def _hex(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
    except ValueError:
        return ""


def kinds(content: bytes) -> list[str]:
    """The kinds of secrets that a content seems to hold."""
    content = RECORD_HASH.sub(b",,", content)
    return sorted(kind for kind, (sign, shape) in SHAPES.items() if sign in content and shape.search(content))
