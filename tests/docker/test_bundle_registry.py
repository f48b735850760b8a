"""A bundle through a real registry: an artifact of our own kinds, byte for byte there and back, a version given once."""

import json
from pathlib import Path

import httpx
import pytest

from images.errors import BundleProblem, ImageProblem, Problem, UsageProblem
from images.registry import Wire
from recipes.adopted import Site
from recipes.bundle.fits import engine_findings
from recipes.bundle.layout import GB
from recipes.bundle.oci import ARTIFACT_TYPE, CONFIG_TYPE, LAYER_TYPE, pull_artifact, push_bundle
from recipes.bundle.read import Limits, unpacked
from recipes.bundle.write import Carried, bundle_entries, write_bundle
from recipes.load import load_recipe
from recipes.lock import Images
from tests.bundles import RUNG, tiny_bundle

PLAIN = Wire(plain_http=True)
LIMITS = Limits()
OCI = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture
def bundle(tmp_path) -> Path:
    return tiny_bundle(tmp_path)


def manifest_of(registry, name: str, tag: str) -> dict:
    answer = httpx.get(f"http://{registry.address}/v2/{name}/manifests/{tag}", headers={"accept": OCI})
    return answer.json()


def test_a_bundle_is_an_artifact_of_our_own_types_that_says_what_it_is_for(registry, bundle):
    pushed = push_bundle(bundle, f"{registry.address}/team/tiny", PLAIN, False, LIMITS)
    assert registry.tags("team/tiny") == ["1"]
    found = manifest_of(registry, "team/tiny", "1")
    assert (found["artifactType"], found["config"]["mediaType"]) == (ARTIFACT_TYPE, CONFIG_TYPE)
    assert [layer["mediaType"] for layer in found["layers"]] == [LAYER_TYPE]
    told = found["annotations"]
    assert told["org.opencontainers.image.title"] == "tiny/more" and told["org.opencontainers.image.version"] == "1"
    assert told["io.station-recipes.machine"] == "any" and told["io.station-recipes.engine"] == "cpu 0.32.0"
    assert pushed.reference == f"{registry.address}/team/tiny:1@{pushed.digest}"


def test_it_comes_back_byte_for_byte_by_version_and_by_digest(registry, bundle, tmp_path):
    pushed = push_bundle(bundle, f"{registry.address}/team/tiny:1", PLAIN, False, LIMITS)
    pull_artifact(f"{registry.address}/team/tiny:1", tmp_path / "a.tar", PLAIN, LIMITS)
    pull_artifact(f"{registry.address}/team/tiny@{pushed.digest}", tmp_path / "b.tar", PLAIN, LIMITS)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes() == bundle.read_bytes()


def test_pushing_it_again_is_the_same_and_another_content_under_its_version_is_refused(registry, bundle, tmp_path):
    to = f"{registry.address}/team/tiny"
    first = push_bundle(bundle, to, PLAIN, False, LIMITS)
    assert push_bundle(bundle, to, PLAIN, False, LIMITS) == first
    (tmp_path / "o").mkdir()
    other = tiny_bundle(tmp_path / "o", rung=RUNG.replace("max-num-seqs: 8", "max-num-seqs: 4"))
    with pytest.raises(ImageProblem, match="A version is never given twice"):
        push_bundle(other, to, PLAIN, False, LIMITS)
    moved = push_bundle(other, to, PLAIN, True, LIMITS)
    assert moved.digest != first.digest
    with pytest.raises(UsageProblem, match="the bundle is version 1, so that is its tag"):
        push_bundle(bundle, f"{to}:2", PLAIN, False, LIMITS)


def test_what_is_broken_is_not_pushed(registry, bundle):
    data = bytearray(bundle.read_bytes())
    data[5000] ^= 1
    bundle.write_bytes(data)
    with pytest.raises(BundleProblem):
        push_bundle(bundle, f"{registry.address}/team/tiny", PLAIN, False, LIMITS)
    assert registry.tags("team/tiny") == []


def test_a_registry_that_changes_a_byte_is_found_out_and_nothing_is_left(registry, bundle, tmp_path):
    push_bundle(bundle, f"{registry.address}/team/tiny", PLAIN, False, LIMITS)
    digest = manifest_of(registry, "team/tiny", "1")["layers"][0]["digest"][7:]
    blob = registry.folder / f"docker/registry/v2/blobs/sha256/{digest[:2]}/{digest}/data"
    data = bytearray(blob.read_bytes())
    data[5000] ^= 1
    blob.write_bytes(data)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(Problem):
        pull_artifact(f"{registry.address}/team/tiny:1", tmp_path / "a.tar", PLAIN, LIMITS)
    assert sorted(tmp_path.iterdir()) == before


def test_a_bundle_that_is_too_large_is_refused_before_it_is_pulled(registry, bundle, tmp_path):
    push_bundle(bundle, f"{registry.address}/team/tiny", PLAIN, False, LIMITS)
    with pytest.raises(BundleProblem, match="--max-gb"):
        pull_artifact(f"{registry.address}/team/tiny:1", tmp_path / "a.tar", PLAIN, Limits(total_bytes=1000))
    lying = manifest_of(registry, "team/tiny", "1")
    lying["layers"][0]["size"] = 50 * GB
    text = json.dumps(lying)
    put = f"http://{registry.address}/v2/team/tiny/manifests/big"
    answer = httpx.put(put, content=text, headers={"content-type": OCI})
    if answer.is_success:  # a registry may itself refuse a manifest that lies
        with pytest.raises(Problem):
            pull_artifact(f"{registry.address}/team/tiny:big", tmp_path / "a.tar", PLAIN, Limits(100 * GB))
    assert not (tmp_path / "a.tar").exists()


def test_an_image_is_no_bundle(registry, tmp_path, bundle):
    push_bundle(bundle, f"{registry.address}/team/tiny", PLAIN, False, LIMITS)
    found = manifest_of(registry, "team/tiny", "1")
    found["layers"][0]["mediaType"] = "application/vnd.oci.image.layer.v1.tar"
    put = f"http://{registry.address}/v2/team/tiny/manifests/image"
    assert httpx.put(put, content=json.dumps(found), headers={"content-type": OCI}).is_success
    with pytest.raises(BundleProblem, match="is no bundle of ours"):
        pull_artifact(f"{registry.address}/team/tiny:image", tmp_path / "a.tar", PLAIN, LIMITS)


def test_plain_http_is_only_for_registries_here_and_silence_is_said(registry, bundle, tmp_path):
    with pytest.raises(ImageProblem, match="--plain-http"):
        push_bundle(bundle, f"{registry.address}/team/tiny", Wire(), False, LIMITS)
    with pytest.raises(UsageProblem, match="anyone on the way"):
        push_bundle(bundle, "registry.example/team/tiny", PLAIN, False, LIMITS)
    registry.kill()
    with pytest.raises(ImageProblem, match="nothing answers there"):
        pull_artifact(f"{registry.address}/team/tiny:1", tmp_path / "a.tar", PLAIN, LIMITS)


def test_whether_the_image_that_a_lock_names_is_still_to_be_had_is_asked_of_it_and_of_mirrors(
    registry, bundle, tmp_path
):
    there = push_bundle(bundle, f"{registry.address}/team/engine", PLAIN, False, LIMITS)  # any manifest will do
    loaded = load_recipe("nemotron-3.5-super-vl")
    facts = {"slug": "x", "architecture": "aarch64", "gpus": [], "pci_gpus": []}
    for name, mirrors, ok, words in (
        (f"{registry.address}/team/engine", [], True, "upstream ok"),
        (f"{registry.address}/team/gone", [], False, "upstream gone"),
        (f"{registry.address}/team/gone", [f"{registry.address}/team/engine"], True, "upstream gone, mirror ok"),
    ):
        images = Images({"linux/arm64": f"{name}@{there.digest}"})
        entries, info = bundle_entries(loaded, "1", images, "a" * 40, Carried(), None)
        file = tmp_path / f"{len(words)}{ok}.tar"
        write_bundle(entries, info, None, file, False)
        with unpacked(file, tmp_path / file.stem, LIMITS) as read:
            found = next(
                each for each in engine_findings(loaded, read, facts, Site(mirrors=mirrors)) if each.id == "image"
            )
            assert (found.ok, words in found.found, name in found.found) == (ok, True, True), found


def test_the_catalogue_shows_what_a_registry_has_and_adopting_takes_it(registry, bundle, inv, tmp_path):
    env = {"STATION_RECIPES_STATE": str(tmp_path / "state")}
    pushed = inv("push", str(bundle), "--to", f"{registry.address}/team/tiny", "--plain-http", "--json")
    assert pushed.returncode == 0, pushed.stderr
    source = f"docker://{registry.address}/team/tiny"
    listed = inv("list", "--source", source, "--plain-http", "--json", **env)
    rows = [row for row in json.loads(listed.stdout)["recipes"] if row["where"] == "registry"]
    assert [(row["id"], row["title"]) for row in rows] == [
        (f"{source}:1", "the same with more sequences"),
    ]
    taken = inv("adopt", rows[0]["id"], "--plain-http", "--no-doctor", "--as", "theirs", **env)
    assert taken.returncode == 0 and "Adopted as tiny/more@theirs" in taken.stdout
    gone = inv("list", "--source", "docker://127.0.0.1:9/x", "--plain-http", "--json", **env)
    assert gone.returncode == 1 and len(json.loads(gone.stdout)["failed"]) == 1
