"""An archive of an image is somebody else's file: it reads as what it is, or as one error, and writes nothing."""

import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from images.archive import oci_manifest, read_archive, unpack, write_archive
from images.errors import ImageProblem
from images.registry import digest_of

LAYERS = (b"first layer" * 400, b"second" * 90)
SLOW = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def image(folder: Path) -> bytes:
    """A tiny image as skopeo's dir: would hold it; its manifest."""
    folder.mkdir(exist_ok=True)
    config = json.dumps({"os": "linux", "architecture": "arm64", "rootfs": {"diff_ids": ["sha256:1", "sha256:2"]}})
    parts = [config.encode(), *LAYERS]
    for part in parts:
        (folder / digest_of(part)[7:]).write_bytes(part)
    first, *layers = ({"mediaType": "x", "digest": digest_of(part), "size": len(part)} for part in parts)
    return json.dumps({"schemaVersion": 2, "config": first, "layers": layers}).encode()


def archive(folder: Path, name: str | None = "vllm:v1") -> Path:
    manifest, file = image(folder / "content"), folder / "image.oci.tar"
    with file.open("wb") as sink:
        write_archive(folder / "content", manifest, name, sink, lambda _count: None)
    return file


def with_members(folder: Path, *members: tuple) -> Path:
    """The archive with these members (name, content, attributes) at its end."""
    file = archive(folder)
    with tarfile.open(file, "a") as tar:
        for name, content, attributes in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            for key, value in attributes.items():
                setattr(header, key, value)
            tar.addfile(header, io.BytesIO(content))
    return file


def test_what_was_written_is_read_and_unpacked_to_the_same_blobs(tmp_path):
    found = read_archive(archive(tmp_path), None)
    assert (found.name, found.platform) == ("vllm:v1", "linux/arm64")
    (tmp_path / "back").mkdir()
    unpack(found, tmp_path / "back", lambda _count: None)
    manifest = image(tmp_path / "again")
    assert (tmp_path / "back" / "manifest.json").read_bytes() == manifest
    for file in (tmp_path / "again").iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


def test_the_same_image_gives_the_same_bytes_whenever_it_is_written(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = archive(tmp_path / "a"), archive(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as tar:
        assert {(member.mtime, member.uid, member.gid) for member in tar} == {(0, 0, 0)}


def test_an_altered_blob_is_noticed_while_it_is_written(tmp_path):
    manifest = image(tmp_path / "content")
    (tmp_path / "content" / digest_of(LAYERS[0])[7:]).write_bytes(LAYERS[0][:-1] + b"!")
    with pytest.raises(ImageProblem, match="altered"):
        write_archive(tmp_path / "content", manifest, None, io.BytesIO(), lambda _count: None)


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (("../evil", b"x", {}), "holds '../evil'"),
        (("/etc/cron.d/evil", b"x", {}), "holds '/etc/cron.d/evil'"),
        (("blobs/sha256/../../../evil", b"x", {}), "holds"),
        ((f"blobs/sha256/{'a' * 64}", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}), "holds"),
        ((f"blobs/sha256/{'a' * 64}", b"", {"type": tarfile.LNKTYPE, "linkname": "oci-layout"}), "holds"),
        (("blobs", b"", {"type": tarfile.CHRTYPE}), "holds"),
        (("index.json", b"{}", {}), "twice"),
        (("\x1b[2Jevil", b"x", {}), "holds"),
    ],
)
def test_a_tar_with_anything_but_an_oci_layout_is_refused_and_nothing_is_written(tmp_path, member, said):
    file = with_members(tmp_path, member)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ImageProblem, match=said) as problem:
        read_archive(file, None)
    assert "\x1b" not in str(problem.value)
    assert sorted(tmp_path.rglob("*")) == before


@SLOW
@given(st.data())
def test_a_truncated_archive_is_refused_whole(tmp_path, data):
    whole = archive(tmp_path).read_bytes()
    content = len(whole.rstrip(b"\0"))
    file = tmp_path / "short.oci.tar"
    file.write_bytes(whole[: data.draw(st.integers(0, content - 1))])
    with pytest.raises(ImageProblem):
        unpack_all(file, tmp_path)


@SLOW
@given(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=30))
def test_an_archive_with_bytes_changed_gives_the_same_image_or_one_error(tmp_path, where, change):
    whole = bytearray(archive(tmp_path).read_bytes())
    where %= len(whole)
    whole[where : where + len(change)] = change
    file = tmp_path / "changed.oci.tar"
    file.write_bytes(whole)
    try:
        digest = unpack_all(file, tmp_path)
    except ImageProblem:
        return
    assert digest == digest_of(image(tmp_path / "again"))


@SLOW
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(["manifests", "digest", "config", "layers", "platform", "size"]), inner)
        ),
        max_leaves=8,
    ),
    st.booleans(),
)
def test_any_json_in_place_of_the_index_or_the_manifest_is_one_error(tmp_path, value, as_manifest):
    manifest = json.dumps(value).encode()
    index = {"manifests": [{"digest": digest_of(manifest)}]} if as_manifest else value
    file = tmp_path / "odd.oci.tar"
    with tarfile.open(file, "w") as tar:
        members = {
            "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
            "index.json": json.dumps(index).encode(),
            f"blobs/sha256/{digest_of(manifest)[7:]}": manifest,
        }
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    with pytest.raises(ImageProblem):
        read_archive(file, "linux/amd64")


def unpack_all(file: Path, folder: Path) -> str:
    target = folder / "unpacked"
    target.mkdir(exist_ok=True)
    found = read_archive(file, None)
    unpack(found, target, lambda _count: None)
    for part in (*found.layers, found.config):
        name = digest_of(part) if isinstance(part, bytes) else part.digest
        assert digest_of((target / name[7:]).read_bytes()) == name  # whatever is written is what its name says
    return found.manifest_digest


def test_a_manifest_of_docker_keeps_configuration_and_layers_and_becomes_oci():
    gzip = "application/vnd.docker.image.rootfs.diff.tar.gzip"
    config = {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": "sha256:c", "size": 1}
    manifest = {"schemaVersion": 2, "config": config, "layers": [{"mediaType": gzip, "digest": "sha256:l", "size": 2}]}
    found = json.loads(oci_manifest(json.dumps(manifest).encode()))
    assert found["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert found["config"] == {**config, "mediaType": "application/vnd.oci.image.config.v1+json"}
    assert found["layers"][0]["mediaType"] == "application/vnd.oci.image.layer.v1.tar+gzip"
