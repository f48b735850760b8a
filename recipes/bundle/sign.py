"""Room recipes: minisign signatures of bundles: over SHA256SUMS, so over every file; the same bytes every time."""

import os
import sys
from getpass import getpass
from pathlib import Path

import minisign

from images.errors import BundleProblem, UsageProblem
from images.yaml_source import shown

COMMENT = "signature of a station-recipes bundle"
PASSWORD = "STATION_RECIPES_MINISIGN_PASSWORD"  # noqa: S105 the variable's name
MAX_KEY_BYTES = 4096


def secret_key(file: Path) -> minisign.SecretKey:
    """Read a minisign secret key; asks for its password where it has one (or takes it from the environment).

    Raises UsageProblem when it is none, or the password is wrong.
    """
    try:
        key = minisign.SecretKey.from_bytes(_small(file))
        if key.is_encrypted():
            key.decrypt(_password(file))
    except (ValueError, IndexError) as error:
        raise UsageProblem(
            f"{shown(file)}: no minisign secret key that can be used: {error}. `minisign -G` makes one"
        ) from None
    return key


def _password(file: Path) -> str:
    given = os.environ.get(PASSWORD)
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise UsageProblem(f"{shown(file)} has a password: give it in {PASSWORD}, or run this in a terminal")
    return getpass(f"Password of {shown(file)}: ")


def public_text(key: minisign.SecretKey) -> str:
    """The public key of a secret one, in base64 as minisign prints it."""
    return key.get_public_key().to_base64().decode()


def sign(sums: bytes, key: minisign.SecretKey, comment: str) -> bytes:
    """The signature file of SHA256SUMS. `comment` is signed too."""
    signature = key.sign(sums, untrusted_comment=COMMENT, trusted_comment=comment)
    return bytes(signature) + b"\n"


def trusted_comment(recipe: str, version: str) -> str:
    """What a signature says that it is of."""
    return f"{recipe} version {version}"


def verify(sums: bytes, signature: bytes, public: str, comment: str, what: str) -> None:
    """Raise BundleProblem unless `signature` is the public key's over SHA256SUMS, byte for byte as we write it."""
    try:
        found = minisign.Signature.from_bytes(signature)
        minisign.PublicKey.from_base64(public).verify(sums, found)
    except (ValueError, IndexError) as error:
        raise BundleProblem(f"{what}: its signature is wrong: {error}. It was altered after it was signed") from None
    if bytes(found) + b"\n" != signature or found.untrusted_comment != COMMENT or found.trusted_comment != comment:
        raise BundleProblem(f"{what}: its signature file is altered: it is not the one we write")


def read_public_key(text: str) -> str:
    """A public key as a person gives it, a file or its base64 line: in base64.

    Raises UsageProblem when it is none.
    """
    file = Path(text)
    try:
        if len(text) < 500 and file.is_file():
            return minisign.PublicKey.from_bytes(_small(file)).to_base64().decode()
        return minisign.PublicKey.from_base64(text).to_base64().decode()
    except (ValueError, IndexError, OSError) as error:
        raise UsageProblem(
            f"--pubkey {text[:100]!r}: wanted a minisign public key: its file, or its line beginning with RW ({error})"
        ) from None


def _small(file: Path) -> bytes:
    try:
        with file.open("rb") as source:
            data = source.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise UsageProblem(f"{shown(file)}: can't be read: {error.strerror}") from None
    if len(data) > MAX_KEY_BYTES:
        raise ValueError(f"more than {MAX_KEY_BYTES} bytes")
    return data
