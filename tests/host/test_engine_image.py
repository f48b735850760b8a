"""The role engine_image on a machine: archives whole and cut short, another architecture's, a registry and its mirrors."""

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from images.archive import digest_of, write_archive
from tests.host.machine import Machine
from tests.host.playbook import Played, play

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
HERE = f"linux/{ARCHITECTURE}"
ELSEWHERE = {"amd64": "arm64", "arm64": "amd64"}[ARCHITECTURE]


@dataclass(frozen=True)
class Saved:
    """An archive as `./inv image.save` writes it."""

    file: Path
    id: str
    manifest: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.file.read_bytes()).hexdigest()

    def variables(self, **more: object) -> dict:
        about = {"engine_image_reference": self.id, "engine_image_ids": [self.manifest], "engine_image_platform": HERE}
        return {**about, "engine_image_archive": str(self.file), "engine_image_sha256": self.sha256, **more}


def save(folder: Path, architecture: str, content: bytes) -> Saved:
    """Write a small image's archive; its layer is one file."""
    blobs = folder / "blobs"
    blobs.mkdir(parents=True)
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        entry = tarfile.TarInfo("content")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    rootfs = {"type": "layers", "diff_ids": [digest_of(layer.getvalue())]}
    config = json.dumps(
        {"os": "linux", "architecture": architecture, "config": {"Cmd": ["/x"]}, "rootfs": rootfs}
    ).encode()
    kinds = {"config": "application/vnd.oci.image.config.v1+json", "layer": "application/vnd.oci.image.layer.v1.tar"}
    for data in (layer.getvalue(), config):
        (blobs / digest_of(data)[7:]).write_bytes(data)
    parts = {
        "config": {"mediaType": kinds["config"], "digest": digest_of(config), "size": len(config)},
        "layers": [
            {"mediaType": kinds["layer"], "digest": digest_of(layer.getvalue()), "size": len(layer.getvalue())},
        ],
    }
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, **parts}).encode()
    file = folder / "image.tar"
    with file.open("wb") as sink:
        write_archive(blobs, manifest, f"small.example/{architecture}:1", sink, lambda _count: None)
    return Saved(file, digest_of(config), digest_of(manifest))


@pytest.fixture(scope="module")
def machine(provisioned_layers: list[Path]) -> Iterator[Machine]:
    with Machine("images", provisioned_layers) as booted:
        yield booted


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return save(tmp_path / "saved", ARCHITECTURE, os.urandom(3_000_000))


@pytest.fixture
def bring(machine: Machine, tmp_path: Path):
    """Apply the role to the machine."""

    def run(*options: str, **variables: object) -> Played:
        where = {key: value for key, value in machine.inventory().items() if key != "ansible_python_interpreter"}
        return play(tmp_path, "engine_image", *options, **where, **variables)

    return run


def images(machine: Machine) -> set[str]:
    return set(machine.run("docker", "image", "ls", "--all", "--no-trunc", "--quiet").stdout.split())


def test_an_archive_is_foretold_loaded_whole_and_not_touched_again(machine: Machine, saved: Saved, bring):
    before = images(machine)
    foretold = bring("--check", **saved.variables())
    assert (foretold.code, images(machine)) == (0, before), foretold.text
    assert foretold.changed > 0
    assert bring(**saved.variables()).code == 0
    assert images(machine) - before == {saved.id}
    assert not list((machine.upper / "var/lib/station-recipes/incoming").iterdir())
    for options in ((), ("--check",)):
        again = bring(*options, **saved.variables())
        assert (again.code, again.changed) == (0, 0), again.text


def test_a_folder_of_somebody_that_is_named_for_the_archive_stays_as_it_is_with_all_that_is_in_it(
    machine: Machine, saved: Saved, bring
):
    machine.run("sh", "-c", "mkdir -p /srv/images && echo 1 >/srv/images/theirs.tar && chown -R 1234:1234 /srv/images")
    about = ["sh", "-c", "cd /srv/images && stat -c '%n %a %u' . * && cat theirs.tar"]
    before = machine.run(*about).stdout
    brought = bring(**saved.variables(engine_image_folder="/srv/images"))
    assert brought.code == 0, brought.text
    assert saved.id in images(machine)
    assert machine.run(*about).stdout == before


def test_an_archive_that_docker_saved_is_loaded_too(machine: Machine, saved: Saved, bring):
    machine.run("sh", "-c", "mkdir -p /srv/t && echo 1 >/srv/t/one && tar -C /srv/t -c . | docker import - kept:1")
    there = machine.run("docker", "image", "inspect", "--format", "{{.Id}}", "kept:1").stdout.strip()
    machine.run("sh", "-c", "docker save kept:1 -o /srv/kept.tar && docker image rm kept:1")
    digest = machine.run("sha256sum", "/srv/kept.tar").stdout.split()[0]
    about = {
        "engine_image_reference": there,
        "engine_image_archive_here": "/srv/kept.tar",
        "engine_image_sha256": digest,
    }
    brought = bring(**about)
    assert brought.code == 0, brought.text
    assert there in images(machine)
    assert machine.run("test", "-f", "/srv/kept.tar").returncode == 0, "it is somebody's, so it stays"


def test_an_archive_cut_short_on_its_way_is_told_and_the_engine_keeps_nothing(machine: Machine, saved: Saved, bring):
    before = images(machine)
    machine.write("/srv/short.tar", saved.file.read_bytes()[:2_000_000])
    refused = bring(**saved.variables(engine_image_archive_here="/srv/short.tar"))
    assert refused.code != 0
    assert "2000000 bytes with the SHA-256" in refused.text
    assert "cut short or altered on its way" in refused.text
    assert images(machine) == before


def test_an_image_of_another_architecture_is_refused_before_it_is_loaded(machine: Machine, tmp_path: Path, bring):
    before = images(machine)
    other = save(tmp_path / "other", ELSEWHERE, b"1")
    refused = bring(**other.variables())
    assert refused.code != 0
    assert f"found an image for linux/{ELSEWHERE}, wanted {HERE}, this host's" in refused.text
    assert images(machine) == before


def test_a_disk_without_room_for_it_is_told_before_anything_is_copied(machine: Machine, saved: Saved, bring):
    refused = bring(**saved.variables(engine_image_need_gb=1_000_000))
    assert refused.code != 0
    assert "GB are free where the image goes; wanted 1000000" in refused.text
    assert not (machine.upper / f"var/lib/station-recipes/incoming/{saved.sha256}.tar").exists()


def test_an_id_that_the_host_lacks_is_told_with_the_ways_to_bring_it(saved: Saved, bring):
    refused = bring(engine_image_reference=saved.id, engine_image_platform=HERE)
    assert refused.code != 0
    assert "is not in this host's Docker engine, and an id alone can't be brought from anywhere" in refused.text


REGISTRY = """version: 0.1
storage: {{filesystem: {{rootdirectory: "{folder}"}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def test_a_registry_s_image_comes_by_digest_from_the_first_mirror_that_has_it(
    machine: Machine, saved: Saved, tmp_path: Path, bring
):
    """A real registry on the machine's own loopback; the mirror that is asked first is dead."""
    config = tmp_path / "registry.yml"
    config.write_text(REGISTRY.format(folder=tmp_path / "registry", port=5651))
    within = ["nsenter", f"--net=/proc/{machine.pid}/ns/net"]
    with subprocess.Popen([*within, "docker-registry", "serve", str(config)], stderr=subprocess.DEVNULL) as registry:
        try:
            copy = [
                "skopeo",
                "copy",
                "--dest-tls-verify=false",
                "--retry-times=10",
                "--preserve-digests",
                f"oci-archive:{saved.file}",
            ]
            subprocess.run([*within, *copy, "docker://127.0.0.1:5651/small:1"], check=True, capture_output=True)
            mirrors = ["127.0.0.1:5652/small", "127.0.0.1:5651/small"]
            about = {"engine_image_reference": f"127.0.0.1:5653/small@{saved.manifest}", "engine_image_platform": HERE}
            brought = bring(**about, engine_image_mirrors=mirrors)
            assert brought.code == 0, brought.text
            again = bring(**about, engine_image_mirrors=mirrors)
            assert (again.code, again.changed) == (0, 0), again.text
            assert saved.id in images(machine)
        finally:
            registry.terminate()
