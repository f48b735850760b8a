"""What a host is told to serve: the same bytes from every checkout, one GPU by its UUID, an image that was checked."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from images.archive import digest_of, write_archive
from images.errors import Problem, UsageProblem
from recipes.hosts import PLAYBOOKS
from recipes.load import Loaded, load_recipe, with_options
from recipes.serving import HostImage, host_image, platform_of, service, weights_variables

ID = "sha256:" + "a" * 64
IMAGE = HostImage(ID)
WANTED = {"cache": "/var/lib/station-recipes/cache", "gpu": "", "device": ""}
H200 = {"name": "NVIDIA H200", "pci_id": "10de:2335", "memory_mib": 143771, "memory_used_mib": 4}


def facts(*uuids: str, architecture: str = "x86_64") -> dict:
    gpus = [{**H200, "uuid": uuid} for uuid in uuids]
    return {"architecture": architecture, "gpus": gpus, "pci_gpus": gpus}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Loaded:
    """micro/base as another checkout of this repository has it."""
    loaded = load_recipe("micro/base")
    (tmp_path / "micro").mkdir()
    (tmp_path / "micro/model").symlink_to(loaded.folder / "model")
    return replace(loaded, folder=tmp_path / "micro")


def test_a_unit_and_its_lock_are_the_same_from_every_checkout_and_at_every_moment(elsewhere: Loaded):
    here = service(load_recipe("micro/base"), IMAGE, facts(), WANTED)
    busy = facts()
    busy["memory_mib"] = 1
    assert asdict(service(elsewhere, IMAGE, busy, WANTED)) == asdict(here)
    assert str(load_recipe("micro/base").folder) not in json.dumps(asdict(here))
    assert here.unit.count(here.model_path) == 3  # source and target of the mount, and the engine's argument


def test_another_model_gets_another_folder_so_that_what_runs_is_never_written_to(elsewhere: Loaded):
    model = elsewhere.recipe.model
    files = {**model.files, "config.json": "0" * 64}
    other = elsewhere.recipe.model_copy(update={"model": model.model_copy(update={"files": files})})
    with pytest.raises(UsageProblem, match="config.json differ"):
        service(replace(elsewhere, recipe=other), IMAGE, facts(), WANTED)


def test_the_gpu_is_the_only_one_or_the_one_that_the_inventory_names():
    loaded = load_recipe("nemotron-h-synthetic/base")
    assert service(loaded, IMAGE, facts("GPU-1"), WANTED).device == "nvidia.com/gpu=GPU-1"
    with pytest.raises(UsageProblem, match="exactly one GPU"):
        service(loaded, IMAGE, facts("GPU-1", "GPU-2"), WANTED)
    assert service(loaded, IMAGE, facts("GPU-1", "GPU-2"), {**WANTED, "gpu": "GPU-2"}).device == "nvidia.com/gpu=GPU-2"
    with pytest.raises(UsageProblem, match="no NVIDIA GPU"):
        service(loaded, IMAGE, facts("GPU-1", "GPU-2"), {**WANTED, "gpu": "GPU-3"})
    with pytest.raises(UsageProblem, match="needs an NVIDIA GPU"):
        service(loaded, IMAGE, facts(), WANTED)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive with its checksum, of an image for arm64 with one empty layer."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    layer = b"\0" * 1024
    about = {"os": "linux", "architecture": "arm64", "rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]}}
    config = json.dumps(about).encode()
    for data in (layer, config):
        (blobs / digest_of(data)[7:]).write_bytes(data)
    parts = {
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": digest_of(config),
            "size": len(config),
        },
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest_of(layer), "size": 1024}],
    }
    kind = "application/vnd.oci.image.manifest.v1+json"
    file = tmp_path / "image.tar"
    with file.open("wb") as sink:
        written = write_archive(
            blobs,
            json.dumps({"schemaVersion": 2, "mediaType": kind, **parts}).encode(),
            None,
            sink,
            lambda _count: None,
        )
    Path(f"{file}.sha256").write_text(f"{written.hash.hexdigest()}  image.tar\n")
    return file


def test_an_archive_is_known_by_its_ids_before_any_host_is_touched(archive: Path):
    loaded = load_recipe("micro/base")
    found = host_image(str(archive), loaded, "linux/arm64")
    assert (found.platform, found.size, len(found.ids)) == ("linux/arm64", archive.stat().st_size, 1)
    with pytest.raises(UsageProblem, match="is an image for linux/arm64, the host runs linux/amd64"):
        host_image(str(archive), loaded, "linux/amd64")
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-1024] + b"1" * 1024)
    with pytest.raises(Problem, match="is not the file that was saved"):
        host_image(str(archive), loaded, "linux/arm64")
    archive.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(Problem, match="is no whole OCI archive"):
        host_image(str(archive), loaded, "linux/arm64")
    archive.write_bytes(whole)
    Path(f"{archive}.sha256").unlink()
    with pytest.raises(UsageProblem, match=r"has no image.tar.sha256 beside it"):
        host_image(str(archive), loaded, "linux/arm64")


def test_monitoring_watches_the_port_that_the_recipe_is_served_on(tmp_path: Path):
    recipe = with_options(load_recipe("micro/base"), port=9123)
    told = ["-e", json.dumps({"station_ports": weights_variables(recipe)["station_ports"]})]
    asked = ["all", "-i", "here,", "-c", "local", "-m", "debug", "-a", "var=monitoring_targets", "--playbook-dir"]
    argv = [sys.executable, "-m", "ansible", "adhoc", *asked, str(PLAYBOOKS), *told]
    env = {**os.environ, "LC_ALL": "C.UTF-8", "ANSIBLE_HOME": str(tmp_path)}
    answer = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    assert json.loads(answer.stdout.partition("=> ")[2]) == {"monitoring_targets": ["127.0.0.1:9123"]}


@pytest.mark.parametrize("text", ["vllm/vllm-openai:latest", "nosuch.tar", "sha256:123", None])
def test_an_image_that_no_digest_fixes_is_refused_with_the_ways_to_name_one(text: str | None):
    with pytest.raises(UsageProblem, match=r"NAME@sha256:….*sha256:… of"):
        host_image(text, load_recipe("micro/base"), "linux/amd64")


@pytest.mark.parametrize("architecture", ["riscv64", "{{ lookup('pipe', 'id') }}", ""])
def test_a_host_of_an_architecture_that_no_image_is_made_for_is_refused_and_its_words_go_no_further(architecture: str):
    with pytest.raises(UsageProblem, match="wanted x86_64 or aarch64") as refused:
        platform_of({"architecture": architecture})
    assert repr(architecture) in str(refused.value)
