"""How two images differ, read from the real engine's own stream; the flattening is held against the engine's export."""

import hashlib
import io
import json
import random
import subprocess
import tarfile

import pytest

from images.differences import differences
from images.layers import read_images
from tests.docker.small_images import docker, layer

RUNTIME = {".dockerenv", "dev", "dev/console", "dev/pts", "dev/shm", "proc", "sys", "etc/hostname", "etc/hosts"}
RUNTIME |= {"etc/mtab", "etc/resolv.conf"}  # what the engine itself puts into each container


def exported(image: str) -> dict[str, tuple]:
    """What the engine says a container of this image has: path → kind, mode, owner, content or target."""
    container = docker("create", "--network", "none", image)
    try:
        data = subprocess.run(["docker", "export", container], check=True, capture_output=True).stdout
    finally:
        docker("rm", "--force", container)
    found, contents = {}, {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            path = member.name.strip("/")
            if member.isreg():
                contents[path] = hashlib.sha256(tar.extractfile(member).read()).hexdigest()
            elif member.islnk():
                contents[path] = contents[member.linkname]
            kind = "directory" if member.isdir() else "link" if member.issym() else "file"
            target = member.linkname if member.issym() else ""
            found[path] = (kind, member.mode & 0o7777, member.uid, member.gid, contents.get(path, ""), target)
    return found


NAMES = ["a", "b", "c/a", "c/b", "c/d/a", "c/d/b", "c/d/e/f", "c/d", "g/h", "g"]
WHATS = ["file", "file", "link", "hidden", "opaque", "folder", "twins"]


def random_layers(seed: int) -> list[bytes]:
    """Five layers over the same few names: files, folders, links, hard links, whiteouts and opaque folders."""
    chance = random.Random(seed)
    layers, there = [], set()
    for number in range(5):
        members: dict[str, tuple] = {}
        for path in chance.sample(NAMES, 6):
            parents = [path[:end] for end in range(len(path)) if path[end] == "/"]
            if any(above in members and members[above][1] is not None for above in parents):
                continue  # a layer has no file below its own file
            if any(below.startswith((f"{path}/", f"{path.rpartition('/')[0]}/.wh.")) for below in members):
                continue
            what = chance.choice(WHATS)
            if what == "hidden" and path not in there:
                continue
            for above in parents:
                members.setdefault(above, (above, None, {"mode": chance.choice([0o755, 0o700])}))
            for member in random_members(chance, path, what, number):
                members[member[0]] = member
            (there.discard if what == "hidden" else there.add)(path)
        layers.append(layer(*members.values(), (f"layer{number}", b"")))
    return layers


def random_members(chance: random.Random, path: str, what: str, number: int) -> list[tuple]:
    """What a layer has for one path."""
    folder, _, name = path.rpartition("/")
    owner = {"mode": chance.choice([0o644, 0o4755]), "uid": chance.randrange(3)}
    file = (path, f"{path} {number}".encode(), owner)
    found = {
        "file": [file],
        "hidden": [(f"{folder}/.wh.{name}".strip("/"), b"")],
        "opaque": [(f"{folder}/.wh..wh..opq", b""), file] if folder else [file],
        "folder": [(path, None, {"uid": number})],
        "link": [(path, b"", {"type": tarfile.SYMTYPE, "linkname": "../x", "mode": 0o777})],
        "twins": [file, (f"{path}-twin", b"", {**owner, "type": tarfile.LNKTYPE, "linkname": path})],
    }
    return found[what]


@pytest.mark.parametrize("seed", range(8))
def test_layers_flatten_to_what_the_engine_itself_gives_a_container(engine, seed):
    image = engine.load(random_layers(seed))
    (flat,) = read_images([image])
    ours = {
        path: (entry.kind, entry.mode, entry.uid, entry.gid, entry.sha256, entry.target)
        for path, entry in flat.entries.items()
    }
    theirs = {path: entry for path, entry in exported(image).items() if path not in RUNTIME and path != "etc"}
    assert ours == theirs


def test_two_builds_differ_in_the_one_file_that_differs_and_in_nothing_that_is_allowed(inv, small, twin):
    found = differences(small, twin)
    assert [change.path for change in found.files] == ["opt/added"]
    assert "sha256" in found.files[0].fields
    assert not found.config
    assert not found.packages
    assert not found.equal
    allowed = differences(small, twin, ["/opt/*"])
    assert allowed.equal
    assert [change.path for change in allowed.allowed] == ["opt/added"]
    assert inv("image.diff", small, small).returncode == 0
    assert inv("image.diff", small, twin, "--allow", "opt/*").returncode == 0
    answer = inv("image.diff", small, twin)
    assert answer.returncode == 3
    assert "opt/added" in answer.stdout


def test_every_kind_of_change_is_named(inv, engine):
    status = b"Package: libc6\nStatus: install ok installed\nVersion: %s\nArchitecture: amd64\n\n"
    site = "usr/lib/python3/site-packages"
    metadata = b"Metadata-Version: 2.1\nName: Torch\nVersion: %s\n\nbody"

    def image(version: bytes, environment: list[str], *more: tuple, **config) -> str:
        return engine.load(
            [
                layer(
                    ("var/lib/dpkg/status", status % version),
                    (f"{site}/torch-{version.decode()}.dist-info/METADATA", metadata % version),
                    *more,
                )
            ],
            Env=environment,
            **config,
        )

    a = image(
        b"1.0", ["A=1", "B=2"], ("same", b"x"), ("mode", b"x"), ("owner", b"x"), ("old", b"x"), Labels={"pin": "1"}
    )
    b = image(
        b"2.0",
        ["A=1", "B=3"],
        ("same", b"x", {"mtime": 99}),
        ("mode", b"x", {"mode": 0o755}),
        ("owner", b"x", {"uid": 5}),
        *((f"many/{number:03}", b"x") for number in range(60)),
        User="10001",
        Labels={"pin": "2"},
    )
    answer = inv("image.diff", a, b, "--json")
    assert answer.returncode == 3
    said = json.loads(answer.stdout)
    assert {(change["name"], change["a"], change["b"]) for change in said["config"]} == {
        ("Env B", "2", "3"),
        ("Label pin", "1", "2"),
        ("User", None, "10001"),
    }
    assert [(change["name"], change["a"], change["b"]) for change in said["packages"]] == [
        ("deb libc6 (amd64)", "1.0", "2.0"),
        (f"pypi torch ({site})", "1.0", "2.0"),
    ]
    fields = {change["path"]: change["fields"] for change in said["files"]}
    assert (fields["mode"], fields["owner"], fields["old"]) == (["mode"], ["uid"], [])
    assert "same" not in fields
    assert sum(path.startswith("many/") for path in fields) == 60
    table = inv("image.diff", a, b).stdout
    assert f"files          {len(fields)}" in table
    assert "the first 40 (--json has all)" in table
    assert table.count("only in b") < 41


@pytest.mark.parametrize("count", ["3000000", "300000000"])
def test_a_stream_that_ends_early_or_with_an_error_is_not_a_smaller_image(small, tmp_path, monkeypatch, count):
    real = subprocess.run(["which", "docker"], capture_output=True, text=True, check=True).stdout.strip()
    stub = tmp_path / "docker"
    stub.write_text(f'#!/bin/sh\n[ "$1" = save ] || exec {real} "$@"\n{real} "$@" | head -c {count}\nexit 1\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(Exception, match="did not give .* out whole"):
        read_images([small])
