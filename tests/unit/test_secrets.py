"""The search for secrets reads every layer of an image, however the engine keeps it, or says that it could not."""

import gzip
import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from images.errors import ImageProblem
from images.layers import read_images
from images.secrets import secrets_in
from tests.docker.small_images import layer

TOKEN = "hf_" + "a1B2" * 8 + "zZ"
LEAKS = layer(("srv/token.txt", f"token={TOKEN}\n".encode()))
CLEAN = layer(("srv/motd", b"hello\n"))
NOTHING = bytes(10240)  # a tar without members
ZSTD = b"\x28\xb5\x2f\xfd" + bytes(600)
Save = Callable[..., None]


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    """save(blobs, links) → a `docker` program whose `save` writes an image of these layers, listed in this order."""

    def make(*blobs: bytes, links: dict[str, str] | None = None, left_out: int | None = None) -> None:
        names = [f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}" for blob in blobs]
        config = json.dumps({"config": {}, "rootfs": {"type": "layers"}}).encode()
        image = f"sha256:{hashlib.sha256(config).hexdigest()}"
        contents = [{"Config": "config.json", "RepoTags": ["x:1"], "Layers": [*names, *(links or {})]}]
        members = [
            (name, blob) for number, (name, blob) in enumerate(zip(names, blobs, strict=True)) if number != left_out
        ]
        members += [(name, b"", {"type": b"2", "linkname": target}) for name, target in (links or {}).items()]
        members += [("config.json", config), ("manifest.json", json.dumps(contents).encode())]
        (tmp_path / "saved.tar").write_bytes(layer(*members))
        shown = json.dumps([{"Id": image, "Size": 1, "Os": "linux", "Architecture": "amd64", "Config": {}}])
        version = json.dumps({"Server": {"Version": "29.0.0", "Arch": "amd64", "Os": "linux"}})
        program = tmp_path / "docker"
        program.write_text(
            f'#!/bin/sh\ncase "$1" in save) cat {tmp_path}/saved.tar;; version) echo {shlex.quote(version)};; '
            f"*) echo {shlex.quote(shown)};; esac\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return make


@pytest.mark.parametrize("kept", [LEAKS, gzip.compress(LEAKS)], ids=["plain", "gzip"])
def test_a_token_is_found_however_the_engine_keeps_the_layer(save: Save, kept: bytes):
    save(CLEAN, kept, gzip.compress(CLEAN), NOTHING)
    assert secrets_in("x:1") == ["a Hugging Face token in /srv/token.txt"]


def test_an_image_without_a_secret_is_clean_in_both_forms(save: Save):
    save(CLEAN, gzip.compress(CLEAN), NOTHING)
    assert secrets_in("x:1") == []


def test_a_layer_that_can_t_be_unpacked_is_a_problem_and_never_a_clean_image(save: Save):
    save(CLEAN, ZSTD)
    with pytest.raises(ImageProblem, match=r"blobs/sha256/\w{64} is compressed with zstd, which can't be read here"):
        secrets_in("x:1")


@pytest.mark.parametrize("read", [secrets_in, lambda name: read_images([name])], ids=["secrets", "differences"])
@pytest.mark.parametrize("left_out", [1, None], ids=["absent", "of an unknown kind"])
def test_fewer_layers_than_the_manifest_lists_are_a_problem(save: Save, read: Callable, left_out: int | None):
    save(CLEAN, b"\xfd7zXZ" + bytes(600), left_out=left_out)
    with pytest.raises(ImageProblem, match=r"lists the layer blobs/sha256/\w{64}; found no tar under that name"):
        read("x:1")


def test_an_archive_cut_short_in_a_layer_is_a_problem(save: Save):
    whole = gzip.compress(LEAKS)
    save(CLEAN, whole[: len(whole) // 2])
    with pytest.raises(ImageProblem, match="did not give x:1 out whole"):
        secrets_in("x:1")


def test_equal_layers_that_the_engine_writes_as_a_link_count_as_read(save: Save):
    target = f"../blobs/sha256/{hashlib.sha256(LEAKS).hexdigest()}"
    save(LEAKS, links={"other/layer.tar": target})
    assert secrets_in("x:1") == ["a Hugging Face token in /srv/token.txt"]
