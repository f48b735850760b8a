"""Images saved, loaded and mirrored by the real engine, a real registry and skopeo; and what happens when one is lost."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import images.registry
from images.archive import read_archive, write_archive
from images.errors import ImageProblem, Problem, UsageProblem
from images.mirror import mirror_image
from images.registry import Wire, digest_of, reachable, retention
from images.transport import load_image, save_image
from tests.docker.small_images import RANDOM_MB, docker, layer

PLAIN = Wire(plain_http=True)
ROOT = Path(__file__).resolve().parent.parent.parent


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_sha256(file: Path) -> None:
    file.with_name(file.name + ".sha256").write_text(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n")


def only_programs(folder: Path, *names: str) -> str:
    """A PATH with nothing on it but these programs."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


@pytest.fixture(scope="module")
def saved(small, tmp_path_factory) -> Path:
    """The small image's archive, with its checksum."""
    file = tmp_path_factory.mktemp("saved") / "small.oci.tar"
    save_image(small, file)
    return file


def copy_of(saved: Path, folder: Path) -> Path:
    """The archive without its checksum, to be spoiled."""
    return Path(shutil.copy(saved, folder / "spoiled.oci.tar"))


# save and load


def test_two_saves_of_an_image_are_the_same_bytes_and_other_tools_accept_them(inv, small, saved, engine, tmp_path):
    answer = inv("image.save", small, "--out", str(tmp_path / "again.oci.tar"), "--json")
    assert answer.returncode == 0, answer.stderr
    said = json.loads(answer.stdout)
    assert (tmp_path / "again.oci.tar").read_bytes() == saved.read_bytes()
    subprocess.run(["sha256sum", "--check", "again.oci.tar.sha256"], cwd=tmp_path, check=True, capture_output=True)
    raw = subprocess.run(["skopeo", "inspect", "--raw", f"oci-archive:{saved}"], check=True, capture_output=True).stdout
    assert said["manifest_digest"] == digest_of(raw)
    assert said["image_id"] == engine.id(small)
    assert left(tmp_path) == ["again.oci.tar", "again.oci.tar.sha256"]


def test_a_loaded_image_has_the_id_and_the_whole_configuration_that_was_saved(small, engine, tmp_path):
    name, file = engine.name(), tmp_path / "image.oci.tar"
    (tmp_path / "Dockerfile").write_text(f"FROM {small}\nLABEL only=here\n")
    docker("build", "--quiet", "--network", "none", "--tag", name, str(tmp_path))
    before = json.loads(docker("image", "inspect", name))[0]
    save_image(name, file)
    engine.forget(name)
    assert engine.id(before["Id"]) is None
    loaded = load_image(file)
    after = json.loads(docker("image", "inspect", name))[0]
    assert (loaded.image_id, loaded.tag) == (before["Id"], name)
    assert (after["Id"], after["Config"], after["RootFS"]) == (before["Id"], before["Config"], before["RootFS"])
    assert after["Config"]["Healthcheck"]["Interval"] == 7e9  # what a conversion to OCI by other tools loses


def test_an_image_that_is_there_already_is_only_tagged(saved, small, engine):
    name = engine.name()
    loaded = load_image(saved, tag=name)
    assert loaded.already_there
    assert engine.id(name) == engine.id(small)


def test_a_registrys_image_is_kept_byte_for_byte_in_an_archive_and_on_to_another_registry(
    small, saved, registry, second_registry, tmp_path
):
    there = mirror_image(small, f"{registry.address}/engines/vllm:v1", PLAIN)
    kept = save_image(f"docker://{registry.address}/engines/vllm:v1", tmp_path / "kept.oci.tar", wire=PLAIN)
    assert kept.manifest_digest == kept.source_digest == there.digest
    assert read_archive(saved, None).manifest_digest == there.digest
    registry.kill()  # upstream is gone: the file is enough
    back = mirror_image(str(tmp_path / "kept.oci.tar"), f"{second_registry.address}/vllm", PLAIN, verify=True)
    assert back.reference == f"{second_registry.address}/vllm@{there.digest}"
    assert back.tag == "v1"


@pytest.mark.parametrize("name", ["image.oci.tar", "image.oci.tar.sha256"])
def test_an_existing_file_is_never_replaced(small, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageProblem, match="nothing is replaced"):
        save_image(small, tmp_path / "image.oci.tar")
    assert (tmp_path / name).read_text() == "mine"
    assert left(tmp_path) == [name]


def test_of_two_saves_to_one_file_at_once_one_writes_it_and_the_other_says_so(inv, small, saved, tmp_path):
    answers = []

    def save() -> None:
        answers.append(inv("image.save", small, "--out", str(tmp_path / "image.oci.tar")))

    threads = [threading.Thread(target=save) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.returncode for answer in answers) == [0, 2], [answer.stderr for answer in answers]
    loser = next(answer for answer in answers if answer.returncode == 2)
    assert "is being written by another command" in loser.stderr
    assert left(tmp_path) == ["image.oci.tar", "image.oci.tar.sha256"]
    assert (tmp_path / "image.oci.tar").read_bytes() == saved.read_bytes()


def started(arguments: list[str], folder: Path) -> subprocess.Popen:
    """A front door command that has begun to write into `folder`."""
    process = subprocess.Popen(
        [str(ROOT / "inv"), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for _ in range(3000):
        if any(path.stat().st_size for path in folder.rglob("*") if path.is_file()):
            return process
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.005)
    raise AssertionError("it never began")


def test_ctrl_c_in_the_middle_of_a_save_leaves_nothing(small, tmp_path):
    process = started(["image.save", small, "--out", str(tmp_path / "image.oci.tar")], tmp_path)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "interrupted" in said
    assert "Traceback" not in said
    assert left(tmp_path) == []


@contextmanager
def small_disk(folder: Path, megabytes: int):
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_without_room_is_said_before_anything_is_written(small, tmp_path):
    with small_disk(tmp_path / "disk", RANDOM_MB) as disk:
        with pytest.raises(ImageProblem, match=r"needs \d+ MB in .*, 1\d MB are free"):
            save_image(small, disk / "image.oci.tar")
        assert left(disk) == []


def test_a_disk_that_fills_up_in_the_middle_of_a_save_leaves_nothing_of_it(small, tmp_path):
    with small_disk(tmp_path / "disk", 3 * RANDOM_MB + 32) as disk:
        process = started(["image.save", small, "--out", str(disk / "image.oci.tar")], disk)
        process.send_signal(signal.SIGSTOP)
        with (disk / "others").open("wb", buffering=0) as sink:
            try:
                while sink.write(bytes(1 << 20)):
                    pass
            except OSError:
                pass
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "is full" in said
        assert "Traceback" not in said
        assert left(disk) == ["others"]


def test_an_unknown_image_or_a_folder_that_is_not_there_is_one_clear_error(inv, engine, small, tmp_path):
    answer = inv("image.save", small[:-1], "--out", str(tmp_path / "x.oci.tar"))
    assert answer.returncode == 1
    assert f"Did you mean {small}" in answer.stderr
    assert f"docker://{small[:-1]}" in answer.stderr
    assert inv("image.save", "Not/An Image", "--out", str(tmp_path / "x.oci.tar")).returncode == 2
    with pytest.raises(UsageProblem, match="can't be written"):
        save_image(small, tmp_path / "nowhere" / "x.oci.tar")
    assert left(tmp_path) == []


def spoil_checksum(file: Path, _engine) -> None:
    file.with_name(file.name + ".sha256").write_text(f"{'0' * 64}  {file.name}\n")


def spoil_end(file: Path, _engine) -> None:
    os.truncate(file, file.stat().st_size - 200_000)
    write_sha256(file)


def spoil_byte(file: Path, _engine) -> None:
    found = read_archive(file, None)
    with file.open("r+b") as sink:
        sink.seek(found.layers[0].offset + 1_000_000)
        sink.write(b"\0\1\2\3")
    write_sha256(file)


def spoil_kind(file: Path, _engine) -> None:
    file.write_bytes(b"no tar at all" * 1000)
    write_sha256(file)


def no_checksum(_file: Path, _engine) -> None:
    return


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_checksum, "is not the file that was saved"),
        (no_checksum, "give --sha256"),
        (spoil_end, "is missing or has another size|cut short"),
        (spoil_byte, "cut short or altered"),
        (spoil_kind, "no whole OCI archive"),
    ],
)
def test_an_archive_that_is_not_what_was_saved_is_refused_and_the_engine_keeps_nothing(
    saved, engine, tmp_path, spoil, said, small
):
    file, name = copy_of(saved, tmp_path), engine.name()
    found = read_archive(file, None)
    # Another configuration, so that the engine does not have the image yet and each layer is really sent.
    config = json.dumps({**json.loads(found.config), "created": "2001-01-01T00:00:00Z"}).encode()
    remake(file, found, config, tmp_path / "content")
    spoil(file, engine)
    before = engine.ids()
    with pytest.raises(Problem, match=said):
        load_image(file, tag=name)
    assert engine.ids() == before
    assert engine.id(name) is None


def remake(file: Path, found, config: bytes, folder: Path) -> None:
    """Write an archive anew with another configuration."""
    folder.mkdir()
    manifest = json.loads(found.manifest)
    manifest["config"] |= {"digest": digest_of(config), "size": len(config)}
    with file.open("rb") as source:
        for blob in found.layers:
            source.seek(blob.offset)
            (folder / blob.digest[7:]).write_bytes(source.read(blob.size))
    (folder / digest_of(config)[7:]).write_bytes(config)
    with file.open("wb") as sink:
        write_archive(folder, json.dumps(manifest).encode(), None, sink, lambda _count: None)


def test_an_image_for_another_architecture_is_refused_unless_asked_for(engine, tmp_path):
    name, file = engine.load([layer(("a", b"a"))], architecture="s390x"), tmp_path / "image.oci.tar"
    assert save_image(name, file).platform == "linux/s390x"
    with pytest.raises(
        ImageProblem, match="is an image for linux/amd64, not|is an image for linux/s390x, not linux/arm64"
    ):
        save_image(name, tmp_path / "other.oci.tar", platform="linux/arm64")
    engine.forget(name)
    with pytest.raises(ImageProblem, match="is an image for linux/s390x, this engine runs linux/"):
        load_image(file)
    assert engine.id(name) is None
    assert load_image(file, any_platform=True).tag == name
    assert engine.id(name)


def test_a_tag_that_is_another_image_is_left_alone(saved, twin, engine):
    before = engine.id(twin)
    with pytest.raises(UsageProblem, match="is another image in this engine.*left alone"):
        load_image(saved, tag=twin)
    assert engine.id(twin) == before


def test_a_tool_that_is_missing_is_named_with_its_package(small, saved, tmp_path, monkeypatch):
    with_docker, with_skopeo = (only_programs(tmp_path / name, name) for name in ("docker", "skopeo"))
    monkeypatch.setenv("PATH", with_docker)
    with pytest.raises(ImageProblem, match="apt install skopeo"):
        save_image(small, tmp_path / "image.oci.tar")
    monkeypatch.setenv("PATH", with_skopeo)
    for action in (lambda: save_image(small, tmp_path / "image.oci.tar"), lambda: load_image(saved)):
        with pytest.raises(Problem, match=r"apt install docker\.io"):
            action()
    assert left(tmp_path) == ["docker", "skopeo"]


def test_an_engine_that_is_away_is_one_clear_error(inv, small, saved, tmp_path):
    away = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    for arguments in (
        ["image.save", small, "--out", str(tmp_path / "image.oci.tar")],
        ["image.load", str(saved)],
        ["image.diff", small, small],
        ["image.software", small],
        ["image.mirror", small, "--to", "127.0.0.1:5349/x", "--plain-http"],
    ):
        answer = inv(*arguments, **away)
        assert answer.returncode == 1
        assert "no Docker engine answers" in answer.stderr or "nothing answers there" in answer.stderr
        assert "Traceback" not in answer.stderr
    assert left(tmp_path) == []


# mirror


def test_docker_itself_pulls_the_mirrored_image_by_the_digest_that_was_said(inv, small, engine, registry):
    to = f"{registry.address}/vllm:v1"
    answer = inv("image.mirror", small, "--to", to, "--plain-http", "--verify", "--json")
    assert answer.returncode == 0, answer.stderr
    said = json.loads(answer.stdout)
    docker("pull", "--quiet", said["reference"])
    try:
        assert engine.id(said["reference"]) == said["image_id"] == engine.id(small)
    finally:
        engine.forget(said["reference"])
    again = inv("image.mirror", small, "--to", to, "--plain-http", "--json")
    assert json.loads(again.stdout)["digest"] == said["digest"]


def index_of(engine, registry, name: str) -> tuple[str, dict[str, str]]:
    """An index of two platforms in a registry: its digest, and each platform's."""
    found = {}
    for architecture in ("amd64", "arm64"):
        image = engine.load([layer(("a", architecture.encode()))], architecture=architecture)
        found[f"linux/{architecture}"] = mirror_image(image, f"{registry.address}/{name}:{architecture}", PLAIN)
    import httpx

    base = f"http://{registry.address}/v2/{name}/manifests"
    entries = []
    for platform, one in found.items():
        accept = "application/vnd.oci.image.manifest.v1+json"
        size = len(httpx.get(f"{base}/{one.digest}", headers={"Accept": accept}).content)
        system, architecture = platform.split("/")
        entries.append(
            {
                "mediaType": accept,
                "digest": one.digest,
                "size": size,
                "platform": {"os": system, "architecture": architecture},
            }
        )
    kind = "application/vnd.oci.image.index.v1+json"
    body = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": entries}).encode()
    assert httpx.put(f"{base}/all", content=body, headers={"Content-Type": kind}).status_code == 201
    return digest_of(body), {platform: one.digest for platform, one in found.items()}


def test_an_index_is_mirrored_whole_or_one_platform_of_it_each_under_its_own_digest(
    engine, registry, second_registry, tmp_path
):
    index, of = index_of(engine, registry, "multi")
    source, target = f"docker://{registry.address}/multi:all", second_registry.address
    whole = mirror_image(source, f"{target}/whole:v1", PLAIN, every=True, verify=True)
    assert (whole.digest, whole.platforms) == (index, ("linux/amd64", "linux/arm64"))
    one = mirror_image(source, f"{target}/one:v1", PLAIN, platform="linux/arm64", verify=True)
    assert (one.digest, one.platforms) == (of["linux/arm64"], ("linux/arm64",))
    kept = save_image(source, tmp_path / "arm.oci.tar", platform="linux/arm64", wire=PLAIN)
    assert (kept.manifest_digest, kept.source_digest) == (of["linux/arm64"], index)
    with pytest.raises(ImageProblem, match="has no image for linux/riscv64: it has linux/amd64, linux/arm64"):
        mirror_image(source, f"{target}/none:v1", PLAIN, platform="linux/riscv64")
    assert second_registry.tags("none") == []


def test_a_tag_that_has_moved_is_an_error_that_names_both_digests(small, twin, registry, second_registry, tmp_path):
    name = f"{registry.address}/vllm"
    first = mirror_image(small, f"{name}:nightly", PLAIN)
    with pytest.raises(ImageProblem, match=f"names {first.digest}, this is sha256:"):
        mirror_image(twin, f"{name}:nightly", PLAIN)  # a tag of the target is not moved by accident either
    second = mirror_image(twin, f"{name}:nightly", PLAIN, move_tag=True)
    moved = f"has moved: it names {second.digest} now, recorded is {first.digest}"
    target = f"{second_registry.address}/vllm:nightly"
    with pytest.raises(ImageProblem, match=moved):
        mirror_image(f"docker://{name}:nightly@{first.digest}", target, PLAIN)
    with pytest.raises(ImageProblem, match=moved):
        mirror_image(f"docker://{name}:nightly", target, PLAIN, expect=first.digest)
    with pytest.raises(ImageProblem, match=moved):
        save_image(f"docker://{name}:nightly@{first.digest}", tmp_path / "image.oci.tar", wire=PLAIN)
    assert second_registry.tags("vllm") == []
    assert mirror_image(f"docker://{name}@{first.digest}", target, PLAIN).digest == first.digest
    with pytest.raises(ImageProblem, match="has moved: the engine has"):
        save_image(f"{small}@sha256:{'0' * 64}", tmp_path / "image.oci.tar")
    assert left(tmp_path / "registry")  # and the registry's own files are all that is there
    assert not list(tmp_path.glob("image*"))


def test_a_registry_that_dies_in_the_middle_of_a_push_is_said_and_no_tag_appears(inv, small, registry):
    process = subprocess.Popen(
        [str(ROOT / "inv"), "image.mirror", small, "--to", f"{registry.address}/vllm:v1", "--plain-http"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not registry.receiving():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.001)
    registry.freeze()
    assert registry.tags("vllm") == []  # it was in the middle
    registry.kill()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the registry went away in the middle" in said or "nothing answers there" in said
    assert "Traceback" not in said
    registry.start()
    assert registry.tags("vllm") == []
    assert mirror_image(small, f"{registry.address}/vllm:v1", PLAIN).tag == "v1"  # and the next one is whole


def test_a_registry_that_is_down_is_said_before_the_image_is_read(inv, small, registry):
    registry.kill()
    answer = inv("image.mirror", small, "--to", f"{registry.address}/vllm:v1", "--plain-http")
    assert answer.returncode == 1
    assert "nothing answers there: is the registry running?" in answer.stderr
    assert "docker save" not in answer.stderr


def test_plain_http_is_for_this_machine_or_for_a_registry_that_is_named(inv, small, registry):
    without = inv("image.mirror", small, "--to", f"{registry.address}/vllm:v1")
    assert without.returncode == 1
    assert "speaks plain http" in without.stderr
    elsewhere = inv("image.mirror", small, "--to", "mirror.example:5000/vllm:v1", "--plain-http")
    assert elsewhere.returncode == 2
    assert "--plain-http-host mirror.example:5000" in elsewhere.stderr
    named = Wire(plain_http_host=registry.address)
    assert mirror_image(small, f"{registry.address}/vllm:v1", named).tag == "v1"


def test_the_preflight_line_says_upstream_gone_mirror_ok(inv, small, registry, second_registry):
    upstream = mirror_image(small, f"{registry.address}/up/vllm:v1", PLAIN)
    mirror = mirror_image(f"docker://{upstream.reference}", f"{second_registry.address}/vllm:v1", PLAIN)
    refs = [upstream.reference, mirror.reference]
    assert retention(reachable(refs, PLAIN)) == "upstream ok, mirror ok"
    shutil.rmtree(registry.folder / "docker/registry/v2/repositories/up/vllm/_manifests")
    answer = inv("image.where", "--ref", refs[0], "--ref", refs[1], "--plain-http", "--json")
    assert answer.returncode == 0
    assert json.loads(answer.stdout)["summary"] == "upstream gone, mirror ok"
    registry.kill()
    assert retention(reachable(refs, PLAIN)) == "upstream unreachable, mirror ok"
    second_registry.kill()
    answer = inv("image.where", "--ref", refs[0], "--ref", refs[1], "--plain-http")
    assert answer.returncode == 1
    assert answer.stdout.strip().endswith("upstream unreachable, no mirror answers")


def test_a_registry_that_hangs_costs_its_seconds_and_not_more(registry, monkeypatch):
    assert images.registry.ASK_TIMEOUT_S == 10
    monkeypatch.setattr(images.registry, "ASK_TIMEOUT_S", 1)
    registry.freeze()
    begun = time.monotonic()
    (state,) = reachable([f"{registry.address}/vllm:v1"], PLAIN)
    assert state.state == "unreachable"
    assert time.monotonic() - begun < 5
