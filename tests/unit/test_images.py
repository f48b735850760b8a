"""Images without a Docker engine: what is declared, what is pinned for whom, and what is said when something lacks."""

import hashlib
import http.server
import json
import threading
import zipfile
from pathlib import Path

import pytest

from images import base, verify
from images.base import ensure_base
from images.build import Built, Order, _check_disk, build_image, explain
from images.declaration import MACHINE_OF, Declaration, Wheel, declaration, known_images
from images.docker_engine import DockerEngine, DockerProblem, docker_engine, engine_host, is_remote
from images.errors import EngineProblem, UsageProblem
from images.pins_file import pins_for, read_pins
from images.secrets import kinds
from images.validate import validate
from images.verify_checks import MACHINES as MACHINES_INSIDE
from images.verify_checks import Finding
from images.wheels import explain as explain_pip
from images.wheels import fetch_wheel
from images.yaml_source import Mark
from recipes.run.docker import connect
from recipes.run.tunnel import ssh_target

ROOT = Path(__file__).resolve().parent.parent.parent
PLATFORMS = ("linux/amd64", "linux/arm64")


@pytest.fixture
def fake_docker(tmp_path, monkeypatch):
    """A `docker` program that prints what a test wants; no engine is near."""

    def make(script: str) -> None:
        program = tmp_path / "docker"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return make


def version(number: str) -> str:
    server = {"Server": {"Version": number, "Arch": "amd64", "Os": "linux"}}
    return f"echo '{json.dumps(server)}'"


def test_a_machine_without_docker_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DockerProblem, match=r"apt install docker.io\), or run the recipe as a process"):
        docker_engine()


def test_an_engine_that_does_not_answer_is_named(fake_docker, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    fake_docker("echo 'Cannot connect to the Docker daemon at unix:///nowhere.sock.' >&2; exit 1")
    with pytest.raises(DockerProblem, match=r"no Docker engine answers at unix:///nowhere.sock. Start it"):
        docker_engine()


def test_a_user_who_may_not_use_docker_is_told_how(fake_docker):
    fake_docker("echo 'permission denied while trying to connect to the Docker daemon socket' >&2; exit 1")
    with pytest.raises(DockerProblem, match="Join the group `docker` and start a new login"):
        docker_engine()


def test_an_engine_that_is_too_old_is_refused_with_both_versions(fake_docker):
    fake_docker(version("19.03.15"))
    with pytest.raises(DockerProblem, match=r"is 19\.03\.15; wanted 20\.10 or newer"):
        docker_engine()


@pytest.mark.parametrize(("number", "cdi"), [("20.10.24+dfsg1", False), ("24.0.9", False), ("26.1.5", True)])
def test_whether_devices_can_be_named_by_cdi_follows_the_version(fake_docker, number, cdi):
    fake_docker(version(number))
    assert docker_engine().devices_by_cdi is cdi


def test_a_docker_context_that_leads_to_another_machine_is_one_for_all_who_ask(fake_docker, monkeypatch):
    fake_docker("echo ssh://root@station:2222")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    assert (engine_host(), is_remote()) == ("ssh://root@station:2222", True)
    assert ssh_target(engine_host()) == ["-p", "2222", "--", "root@station"]
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/docker.sock")  # as in `docker` itself, it goes before the context
    assert not is_remote()


def test_an_engine_behind_a_bare_port_is_refused_at_once_with_the_way_to_it(fake_docker, monkeypatch):
    fake_docker(version("26.1.5"))
    monkeypatch.setenv("DOCKER_HOST", "tcp://station:2376")
    with pytest.raises(DockerProblem, match=r"is at tcp://station:2376, .* Reach it by ssh: DOCKER_HOST=ssh://"):
        connect()


def test_no_disk_of_this_machine_stands_for_the_disk_of_another_machine_s_engine(fake_docker, monkeypatch, tmp_path):
    monkeypatch.setenv("STATION_RECIPES_CACHE", str(tmp_path / "cache"))
    fake_docker("echo /")
    build = declaration("cpu").sources.build.model_copy(update={"disk_gb": 10**9})
    monkeypatch.setenv("DOCKER_HOST", "ssh://root@station")
    _check_disk(build)
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/docker.sock")
    with pytest.raises(EngineProblem, match="the build needs 1000000000 GB in /,"):
        _check_disk(build)


def test_a_proof_without_a_gpu_does_not_count_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setenv("STATION_RECIPES_CACHE", str(tmp_path))
    asked = []

    def inside(_built: Built, device: str | None) -> list[Finding]:
        asked.append(device)
        return [Finding("engine", True if device else None, "", "8 tokens")]

    monkeypatch.setattr(verify, "inside", inside)
    monkeypatch.setattr(verify, "layers", lambda _: [])
    built = Built("cuda", "build", f"sha256:{'1' * 64}", None, "id", "0.32.0", "linux/amd64", 1, False, ())
    for device in (None, None, "nvidia.com/gpu=A", "nvidia.com/gpu=A", None):
        verify.verify_image(built, device=device)
    assert asked == [None, "nvidia.com/gpu=A"]


def test_no_source_is_taken_silently_instead_of_another(fake_docker):
    fake_docker(version("26.1.5"))
    with pytest.raises(UsageProblem, match="cpu can't come from source 'pull'; image.yaml declares: build"):
        build_image(Order("cpu", source="pull"))
    with pytest.raises(UsageProblem, match="no engine image 'cuad': wanted one of cuda"):
        build_image(Order("cuad"))


def test_an_image_s_own_verify_knows_the_same_platforms_as_its_build():
    """It runs inside the image, where nothing else of ours is."""
    assert MACHINES_INSIDE == MACHINE_OF


def test_a_build_from_a_commit_needs_the_wheel_of_every_platform():
    data = declaration("cuda").model_dump(by_alias=True)
    data["sources"]["build"] |= {"release": None, "commit": "a" * 40}
    with pytest.raises(UsageProblem, match="a build from a commit needs the wheel"):
        validate(Declaration, data, {(): Mark(Path("image.yaml"), 1)})


@pytest.mark.parametrize("name", known_images())
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_platform_has_the_engine_s_pin_and_torch_s(name, platform, python):
    file = ROOT / "images" / name / "pins.txt"
    assert file.is_file()
    pins = {pin.name: pin.version for pin in pins_for(file, platform, python)}
    facts = declaration(name)
    assert pins[facts.distribution] == facts.sources.build.release
    assert "torch" in pins and "colorama" not in pins, "nothing of other systems"


def test_a_pin_with_a_marker_is_taken_for_its_platform_alone():
    file = ROOT / "images/cpu/pins.txt"
    amd, arm = ({pin.name for pin in pins_for(file, platform, "3.11")} for platform in PLATFORMS)
    assert "intel-openmp" in amd and "intel-openmp" not in arm


def test_a_pin_s_line_is_what_pip_reads():
    for pin in pins_for(ROOT / "images/cpu/pins.txt", "linux/amd64", "3.11"):
        assert pin.line.startswith(f"{pin.name}=={pin.version} \\\n") and pin.line.count("--hash=") == len(pin.hashes)


def test_a_line_without_a_hash_is_no_pin(tmp_path):
    (tmp_path / "pins.txt").write_text("httpx==1.0\n")
    with pytest.raises(EngineProblem, match=r"'httpx==1.0' is no exact pin with a hash"):
        read_pins(tmp_path / "pins.txt")


@pytest.mark.parametrize(
    ("program", "keys", "said"),
    [
        (False, False, r"apt install mmdebstrap debian-archive-keyring\)"),
        (True, False, r"apt install debian-archive-keyring\)"),
        (False, True, r"apt install mmdebstrap\)"),
        (True, True, "E: no mirror\n\nThe Debian root could not be made"),
    ],
)
def test_a_base_that_can_t_be_made_here_names_every_package_that_is_missing(
    fake_docker, tmp_path, monkeypatch, program, keys, said
):
    fake_docker("echo 'Error: No such image' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("STATION_RECIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(base, "KEYRING", tmp_path / "debian.gpg")
    if program:
        (tmp_path / "mmdebstrap").write_text("#!/bin/sh\necho 'E: no mirror'\nexit 25\n")
        (tmp_path / "mmdebstrap").chmod(0o755)
    if keys:
        (tmp_path / "debian.gpg").touch()
    build = declaration("cpu").sources.build
    with pytest.raises(EngineProblem, match=said):
        ensure_base(build, None, DockerEngine("26.1.5", "linux/amd64"), tmp_path / "log")


@pytest.fixture
def served(tmp_path):
    """A wheel served on loopback: (address, sha256)."""
    folder = tmp_path / "served"
    folder.mkdir()
    with zipfile.ZipFile(folder / "engine-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("engine.py", "")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **named):
            super().__init__(*args, directory=str(folder), **named)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    digest = hashlib.sha256((folder / "engine-1-py3-none-any.whl").read_bytes()).hexdigest()
    yield f"http://127.0.0.1:{server.server_port}/engine-1-py3-none-any.whl", digest
    server.shutdown()
    server.server_close()


def test_a_commit_s_wheel_is_fetched_by_its_hash(served, tmp_path):
    url, digest = served
    assert fetch_wheel(Wheel(url=url, sha256=digest), tmp_path).name == "engine-1-py3-none-any.whl"


def test_another_file_than_the_declared_wheel_is_thrown_away(served, tmp_path):
    with pytest.raises(EngineProblem, match="not the declared wheel; it was thrown away"):
        fetch_wheel(Wheel(url=served[0], sha256="0" * 64), tmp_path)
    assert list(tmp_path.glob("*.whl*")) == []


def test_a_wheel_that_is_gone_is_said(served, tmp_path):
    with pytest.raises(EngineProblem, match=r"can't be downloaded: HTTP Error 404"):
        fetch_wheel(Wheel(url=served[0] + "x", sha256="0" * 64), tmp_path)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "a downloaded wheel is not the pinned one"),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "lacks a pinned wheel for this platform"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
    ],
)
def test_pip_s_words_end_in_what_to_do(said, remedy):
    assert remedy in explain_pip(said)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("write /wheels/torch.whl: no space left on device", "the disk of the Docker engine is full"),
        ("exec /bin/sh: exec format error", "the base is for another architecture"),
        ("something else", "Docker's last words are above"),
    ],
)
def test_docker_s_words_end_in_what_to_do(tmp_path, said, remedy):
    (tmp_path / "log").write_text(f"Step 1/9\n{said}\n")
    assert remedy in explain(tmp_path / "log")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"token hf_{'Ab1' * 11}x ", "a Hugging Face token"),
        (f"ghp_{'a1' * 18}", "a GitHub token"),
        ("https://user:s3cretpw@host.example", "an address with a password"),
        ("AKIA" + "B2" * 8, "an AWS key"),
        ("-----BEGIN PRIVATE KEY-----\n" + "MIIEvQIBADAN" * 12, "a private key"),
    ],
)
def test_a_secret_is_known_by_its_kind(text, kind):
    assert kinds(text.encode()) == [kind]


def test_a_file_s_hash_in_a_package_s_record_is_no_key_even_if_it_begins_like_one():
    """Seen: one of the 7,304 hashes of a package began with `sk-`."""
    value = "sk-" + "e5nEBSDO" * 5
    assert kinds(f"view.h,sha256={value},9569\n".encode()) == []
    assert kinds(f"KEY={value}\n".encode()) == ["an API key"]


@pytest.mark.parametrize("text", ["hf_xxx", "https://user:pass@host.example", "AKIAIOSFODNN7EXAMPLE", "http://a:80/b"])
def test_a_placeholder_is_no_secret(text):
    assert kinds(text.encode()) == []
