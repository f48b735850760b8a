"""A model's files come whole or not at all: from a hub whose connections drop, a mirror, a folder; told by their hashes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from recipes.model_files import told_files
from tests.ansible_module import load
from tests.hub import REPO, REVISION, Hub, sha256

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "ansible" / "library" / "model_files.py"
FILES = {
    "config.json": b'{"architectures": ["NemotronHForCausalLM"]}',
    "model-00001-of-00002.safetensors": random.Random(1).randbytes(3_000_000),
    "model-00002-of-00002.safetensors": random.Random(2).randbytes(2_000_000),
    "nested/empty.json": b"",
}
FIRST = "model-00001-of-00002.safetensors"
HASHES = {name: sha256(data) for name, data in FILES.items()}
TOTAL = sum(map(len, FILES.values()))


@pytest.fixture
def hub():
    server = Hub(dict(FILES))
    yield server
    server.close()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def start(cache: Path, source: str, *options: str, files: dict | None = HASHES, token: str = "") -> subprocess.Popen:
    argv = [
        sys.executable,
        str(SCRIPT),
        "--cache",
        str(cache),
        "--repo",
        REPO,
        "--revision",
        REVISION,
        "--source",
        source,
    ]
    argv += ["--backoff-s", "0.01", "--keep-free-gb", "0", *options]
    argv += [f"--file={name}={digest}" for name, digest in (files or {}).items()]
    plain = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    env = {**plain, "HF_TOKEN": token}
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def bring(cache: Path, source: str, *options: str, **more) -> dict:
    process = start(cache, source, *options, **more)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return json.loads(out)


def refused(cache: Path, source: str, *options: str, **more) -> str:
    process = start(cache, source, *options, **more)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == "", out
    assert "Traceback" not in err
    return err


def finished(cache: Path) -> Path:
    return cache / "models" / REPO.replace("/", "--") / REVISION


def assert_whole(cache: Path) -> None:
    folder = finished(cache)
    assert {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()} == FILES
    manifest = json.loads(folder.with_name(f"{REVISION}.json").read_text())
    assert {name: each["sha256"] for name, each in manifest["files"].items()} == HASHES
    assert all(file.stat().st_mode & 0o222 == 0 for file in [folder, *folder.rglob("*")])


def test_a_model_comes_whole_and_a_second_run_asks_nobody_anything(hub, cache):
    first = bring(cache, hub.url)
    assert (first["changed"], first["bytes_total"], first["bytes_fetched"]) == (True, TOTAL, TOTAL)
    assert_whole(cache)
    asked = len(hub.seen)
    second = bring(cache, hub.url)
    assert (second["changed"], second["complete"], len(hub.seen)) == (False, True, asked)


def test_without_hashes_in_the_recipe_the_hub_s_own_decide_sha256_or_git_blob(hub, cache):
    bring(cache, hub.url, files=None)
    assert_whole(cache)
    for name in ("config.json", FIRST):
        hub.alter[name] = bytes(len(FILES[name]))
        assert "thrown away" in refused(cache.with_name(f"cache of {name}"), hub.url, files=None)
        del hub.alter[name]


def test_check_tells_how_much_would_come_and_touches_nothing(hub, cache):
    told = bring(cache, hub.url, "--check")
    assert (told["changed"], told["complete"], told["bytes_to_fetch"]) == (True, False, TOTAL)
    assert not cache.exists() and hub.sent == 0


def test_a_connection_that_drops_again_and_again_is_taken_up_where_it_ended(hub, cache):
    hub.drop_after[FIRST] = [500_000] * 5
    answer = bring(cache, hub.url, "--retries", "1")
    assert_whole(cache)
    ranges = [headers["Range"] for _, path, headers, _ in hub.seen if path == f"/lfs/{FIRST}" and "Range" in headers]
    assert ranges == [f"bytes={at}-" for at in range(500_000, 3_000_000, 500_000)]
    assert answer["bytes_fetched"] == hub.sent == TOTAL, "no byte came twice"


def test_a_run_that_is_killed_leaves_no_finished_folder_and_the_next_one_goes_on(hub, cache):
    hub.pause_s = 0.02
    process = start(cache, hub.url)
    staging = finished(cache).with_name(f".{REVISION}.partial")
    deadline = time.monotonic() + 20
    while hub.sent < 1_000_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not finished(cache).exists() and list(staging.rglob("*.safetensors.partial"))
    assert not list(staging.rglob("*.safetensors")), "a name without .partial is a promise"
    time.sleep(0.2)  # until the hub has noticed
    hub.pause_s, hub.sent = 0, 0
    told = bring(cache, hub.url, "--check")
    assert 0 < told["bytes_to_fetch"] < TOTAL - 500_000
    assert bring(cache, hub.url)["bytes_fetched"] == told["bytes_to_fetch"] == hub.sent
    assert_whole(cache)


def test_a_server_that_ignores_ranges_is_read_from_the_start(hub, cache):
    hub.ranges = False
    hub.drop_after[FIRST] = [500_000]
    bring(cache, hub.url)
    assert_whole(cache)
    assert hub.sent == TOTAL + 500_000


def test_wrong_content_is_thrown_away_and_said_with_both_hashes(hub, cache):
    hub.alter[FIRST] = bytes(3_000_000)
    error = refused(cache, hub.url)
    assert f"found sha256 {sha256(bytes(3_000_000))}, wanted {HASHES[FIRST]}" in error
    assert not finished(cache).exists()
    hub.alter.clear()
    bring(cache, hub.url)
    assert_whole(cache)


def test_a_partial_file_of_another_content_is_begun_anew(hub, cache):
    staging = finished(cache).with_name(f".{REVISION}.partial")
    staging.mkdir(parents=True)
    (staging / f"{FIRST}.partial").write_bytes(b"x" * 100_000)
    (staging / "config.json").write_bytes(b"x" * 1000)
    bring(cache, hub.url)
    assert_whole(cache)


def test_a_hub_that_has_another_file_than_the_recipe_is_refused_before_a_byte_comes(hub, cache):
    error = refused(cache, hub.url, files={**HASHES, FIRST: "0" * 64})
    assert f"sha256 {HASHES[FIRST]}, wanted {'0' * 64}; nothing was fetched" in error and hub.sent == 0
    hub.told = {"sha": "f" * 40}
    assert f"found revision {'f' * 40}" in refused(cache, hub.url)


def test_a_source_that_sends_without_end_is_cut_off_at_the_size_it_told(hub, cache):
    hub.alter["config.json"] = FILES["config.json"] + b"x" * 5_000_000
    assert "the source sends more than the" in refused(cache, hub.url)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "put one into HF_TOKEN or the vault"),
        (403, "put one into HF_TOKEN"),
        (404, "check repo, revision and file names"),
    ],
)
def test_a_refusal_says_what_to_do_and_is_not_tried_again(hub, cache, status, says):
    path = f"/{REPO}/resolve/{REVISION}/config.json"
    hub.answers[path] = [(status, {})]
    assert says in refused(cache, hub.url)
    assert sum(seen[1] == path for seen in hub.seen) == 1


def test_a_busy_hub_is_waited_for_as_long_as_it_asks(hub, cache):
    for asked in (lambda: "1", lambda: formatdate(time.time() + 3, usegmt=True)):
        after = asked()  # now: a date that was made before the first download may be over after it
        hub.answers[f"/lfs/{FIRST}"] = [(429, {"Retry-After": after})]
        began = time.monotonic()
        bring(cache.with_name(f"cache{len(after)}"), hub.url)
        assert 0.9 < time.monotonic() - began < 10
    hub.answers[f"/lfs/{FIRST}"] = [(429, {"Retry-After": "7200"})]
    assert "a wait of 7200 s is asked for" in refused(cache.with_name("third"), hub.url)


def test_a_hub_that_stays_down_is_given_up_with_its_reason(cache):
    assert "Connection refused, 3 times in a row" in refused(cache, "http://127.0.0.1:9", "--retries", "2")


def test_the_token_reaches_the_hub_and_nobody_else(hub, cache):
    hub.token = "hf_secret"
    assert "status 401 without a token" in refused(cache, hub.url)
    assert "the token may not read it" in refused(cache, hub.url, token="hf_other")
    bring(cache, hub.url, token="hf_secret")
    assert_whole(cache)
    with_token = {at_hub for _, _, headers, at_hub in hub.seen if headers.get("Authorization") == "Bearer hf_secret"}
    at_network = [headers for _, _, headers, at_hub in hub.seen if not at_hub]
    assert with_token == {True} and at_network and not any("Authorization" in headers for headers in at_network)
    assert not any("hf_secret" in line for line in hub.command_lines), "a command line is for everyone to read"
    assert "isn't encrypted" in refused(cache, "http://mirror.example", token="hf_secret")


def test_a_mirror_without_an_api_serves_a_recipe_with_hashes(hub, cache):
    hub.api = False
    assert "status 404" in refused(cache, hub.url, files=None)
    bring(cache, hub.url)
    assert_whole(cache)


def test_two_runs_at_once_bring_every_byte_once(hub, cache):
    hub.pause_s = 0.01
    runs = [start(cache, hub.url), start(cache, hub.url)]
    answers = [json.loads(run.communicate(timeout=60)[0]) for run in runs]
    assert sorted(answer["changed"] for answer in answers) == [False, True]
    assert hub.sent == TOTAL
    assert_whole(cache)


def test_a_cache_that_another_run_makes_at_the_same_moment_is_no_error(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.syspath_prepend(str(ROOT / "ansible" / "module_utils"))
    model_disk = load("module_utils/model_disk.py")
    seen = iter([False])
    monkeypatch.setattr(Path, "exists", lambda self: next(seen, True))
    with model_disk.inside(cache, os.geteuid(), os.getegid(), make=True) as there:
        assert there


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        file = tmp_path / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return tmp_path / "source"


def test_a_folder_is_copied_with_its_hashes_checked_and_stays_as_it_was(folder, cache):
    before = {file: (file.stat().st_mode, file.stat().st_mtime_ns) for file in folder.rglob("*")}
    bring(cache, str(folder), files=None)
    assert_whole(cache)
    assert {file: (file.stat().st_mode, file.stat().st_mtime_ns) for file in folder.rglob("*")} == before
    (folder / FIRST).write_bytes(b"other")
    assert f"wanted {HASHES[FIRST]}" in refused(cache.with_name("other"), str(folder))
    assert "is not a folder of this host" in refused(cache.with_name("other"), "/nonexistent")


def test_a_folder_s_files_get_a_second_name_where_that_is_asked_for(folder, cache):
    mode = (folder / FIRST).stat().st_mode
    bring(cache, str(folder), "--link")
    assert (finished(cache) / FIRST).samefile(folder / FIRST) and (folder / FIRST).stat().st_mode == mode
    assert not bring(cache, str(folder), "--link")["changed"]
    (folder / FIRST).write_bytes(bytes(3_000_000))
    assert bring(cache, str(folder), "--check", files=None)["faults"] == {FIRST: "has another content"}


def test_a_second_name_that_an_earlier_run_left_is_never_written_through(folder, cache):
    staging = finished(cache).with_name(f".{REVISION}.partial")
    staging.mkdir(parents=True)
    os.link(folder / FIRST, staging / FIRST)
    mode = (folder / FIRST).stat().st_mode
    bring(cache, str(folder))
    assert_whole(cache)
    assert not (finished(cache) / FIRST).samefile(folder / FIRST) and (folder / FIRST).stat().st_mode == mode


def test_a_damaged_file_is_found_and_only_that_one_comes_again(hub, cache):
    bring(cache, hub.url)
    file = finished(cache) / FIRST
    seen = file.stat()
    file.chmod(0o644)
    file.write_bytes(bytes(3_000_000))
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert bring(cache, hub.url)["complete"], "same size and time: only reading it all can tell"
    assert bring(cache, hub.url, "--verify", "full", "--check")["bytes_to_fetch"] == 3_000_000
    hub.sent = 0
    assert bring(cache, hub.url, "--verify", "full")["bytes_fetched"] == hub.sent == 3_000_000
    assert_whole(cache)


def test_a_file_that_nobody_fetched_is_reported_and_not_removed(hub, cache):
    bring(cache, hub.url)
    finished(cache).chmod(0o755)
    (finished(cache) / "tokenizer.json").write_text("{}")
    assert "holds tokenizer.json, which nobody fetched: remove it" in refused(cache, hub.url)
    assert (finished(cache) / "tokenizer.json").exists()


def test_a_full_disk_is_said_before_a_byte_comes(hub, cache):
    error = refused(cache, hub.url, "--keep-free-gb", "1e6")
    assert " free, wanted 1000.0 TB: 5.0 MB to come" in error and hub.sent == 0


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a//b", "a/../../b", "x.partial", "a\\b"])
def test_no_name_of_a_hub_leads_out_of_the_model_s_folder(hub, cache, name):
    hub.files[name] = b"evil"
    assert "wanted a path below the model's folder" in refused(cache, hub.url, files=None)
    assert "wanted a path below the model's folder" in refused(cache, hub.url, files={name: sha256(b"evil")})


def test_the_hub_s_own_library_finds_the_model_by_its_name_offline(hub, cache):
    bring(cache, hub.url)
    question = "import sys, huggingface_hub as h; print(h.snapshot_download(sys.argv[1], revision=sys.argv[2]))"
    env = {**os.environ, "HF_HOME": str(cache / "huggingface"), "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-c", question, REPO, REVISION]
    answer = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert Path(answer.stdout.strip()).resolve() == finished(cache).resolve()


def test_what_a_cache_knows_of_its_files_is_told_and_of_a_changed_one_it_is_not(hub: Hub, cache: Path, tmp_path: Path):
    bring(cache, hub.url)
    folder = finished(cache)
    (link,) = (cache / "huggingface/hub").rglob(f"snapshots/{REVISION}")
    assert told_files(link) == HASHES
    (folder / FIRST).chmod(0o644)
    (folder / FIRST).write_bytes(b"something else")
    assert told_files(link).keys() == HASHES.keys() - {FIRST}
    folder.chmod(0o755)
    (folder / FIRST).unlink()
    assert told_files(link).keys() == HASHES.keys() - {FIRST}
    hubs = tmp_path / "snapshots" / REVISION
    hubs.mkdir(parents=True)
    (hubs / FIRST).symlink_to(f"../../blobs/{HASHES[FIRST]}")
    assert told_files(hubs) == {FIRST: HASHES[FIRST]} and told_files(tmp_path / "none") == {}
