"""References to images, which registries may be asked in the open, and what the preflight says of them."""

import pytest

from images.errors import ImageProblem, UsageProblem
from images.registry import RefState, Wire, cause, is_loopback, of_platform, parse_reference, retention
from images.staging import parse_source

DIGEST = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("text", "host", "name", "tag", "digest"),
    [
        ("ubuntu", "docker.io", "ubuntu", None, None),
        ("vllm/vllm-openai:v0.32.0", "docker.io", "vllm/vllm-openai", "v0.32.0", None),
        ("localhost:5000/x", "localhost:5000", "localhost:5000/x", None, None),
        (f"ghcr.io/a/b_c:t@{DIGEST}", "ghcr.io", "ghcr.io/a/b_c", "t", DIGEST),
        (f"[::1]:5000/x@{DIGEST}", "[::1]:5000", "[::1]:5000/x", None, DIGEST),
    ],
)
def test_a_reference_is_read_as_docker_reads_it(text, host, name, tag, digest):
    found = parse_reference(text)
    assert (found.host, found.name, found.tag, found.digest) == (host, name, tag, digest)
    assert str(found) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-v",
        "--all",
        "UPPER",
        "a b",
        "a@sha256:12",
        "a:b:c",
        "../x",
        "a//b",
        "a/",
        f"a@{DIGEST}0",
        "a\nb",
        "x" * 600,
    ],
)
def test_what_is_no_reference_never_reaches_a_command_line(text):
    with pytest.raises(UsageProblem, match="no image reference"):
        parse_reference(text)


def test_where_an_image_comes_from_is_said_by_its_name_alone():
    assert parse_source("docker://ghcr.io/a/b:c").reference.name == "ghcr.io/a/b"
    assert parse_source("ghcr.io/a/b:c").engine == "ghcr.io/a/b:c"
    assert parse_source("docker-daemon:a:b").engine == "a:b"
    assert parse_source("folder/engine.oci.tar").archive.name == "engine.oci.tar"
    assert parse_source("a" * 64).engine == "a" * 64
    both = parse_source(f"a:b@{DIGEST}")
    assert (both.engine, both.recorded) == ("a:b", DIGEST)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost:5000", True),
        ("127.0.0.1", True),
        ("127.9.9.9:80", True),
        ("[::1]:5000", True),
        ("localhost.example", False),
        ("127.0.0.1.example:5000", False),
        ("10.0.0.1", False),
        ("docker.io", False),
    ],
)
def test_only_this_machine_s_own_addresses_are_loopback(host, loopback):
    assert is_loopback(host) is loopback


def test_plain_http_never_reaches_beyond_this_machine_unless_that_registry_is_named():
    near, far = parse_reference("localhost:5000/x"), parse_reference("mirror.example:5000/x")
    assert Wire().options(near) == ["--tls-verify=true"]
    plain = Wire(plain_http=True)
    assert plain.options(near, "dest-") == ["--dest-tls-verify=false"]
    assert plain.options(far, "src-") == ["--src-tls-verify=true"]
    plain.require_use([far, near])
    with pytest.raises(UsageProblem, match=r"--plain-http-host mirror\.example:5000"):
        plain.require_use([far])
    named = Wire(plain_http_host="mirror.example:5000")
    assert named.options(far) == ["--tls-verify=false"]
    assert named.options(near) == ["--tls-verify=true"]
    with pytest.raises(UsageProblem, match="none of this command's registries"):
        named.require_use([near])


def states(*names: str) -> list[RefState]:
    return [RefState("x", name, None, "") for name in names]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (("ok",), "upstream ok, no mirror declared"),
        (("gone",), "upstream gone, no mirror declared"),
        (("ok", "ok"), "upstream ok, mirror ok"),
        (("ok", "gone"), "upstream ok, mirror gone"),
        (("gone", "ok"), "upstream gone, mirror ok"),
        (("gone", "unreachable"), "upstream gone, no mirror answers"),
        (("gone", "gone", "ok"), "upstream gone, 1 of 2 mirrors ok"),
        (("unreachable", "gone", "refused"), "upstream unreachable, no mirror answers"),
        ((), "no reference is declared"),
    ],
)
def test_the_preflight_line_says_what_is_left(answers, said):
    assert retention(states(*answers)) == said


def test_a_platform_is_found_in_an_index_and_attestations_are_not_platforms():
    index = {
        "manifests": [
            {"digest": "sha256:1", "platform": {"os": "linux", "architecture": "amd64"}},
            {"digest": "sha256:2", "platform": {"os": "linux", "architecture": "arm64", "variant": "v8"}},
            {"digest": "sha256:3", "platform": {"os": "unknown", "architecture": "unknown"}},
            "junk",
        ]
    }
    assert of_platform(index, "linux/arm64", "x") == "sha256:2"
    with pytest.raises(ImageProblem, match="it has linux/amd64, linux/arm64/v8. --platform"):
        of_platform(index, "linux/arm64/v9", "x")


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("reading manifest v1 in x: manifest unknown: manifest unknown", "gone"),
        ("requested access to the resource is denied", "refused"),
        ("dial tcp 127.0.0.1:5301: connect: connection refused", "unreachable"),
        ("context deadline exceeded", "unreachable"),
        ("http: server gave HTTP response to HTTPS client", "plain"),
        ("write blob: no space left on device", "full"),
        ("something else", "failed"),
    ],
)
def test_skopeo_s_words_have_a_cause(said, state):
    assert cause(said)[0] == state
