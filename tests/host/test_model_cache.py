"""The role model_cache, as root: the cache belongs to the engine's uid, nobody else's is touched, the token stays secret."""

import os
import random
import tempfile
from pathlib import Path

import pytest

from tests.host.playbook import play
from tests.hub import REPO, REVISION, Hub, sha256

UID = 54321
FILES = {"config.json": b"{}", "model.safetensors": random.Random(3).randbytes(3_000_000)}
MODEL = {"repo": REPO, "revision": REVISION, "files": {name: sha256(data) for name, data in FILES.items()}}


@pytest.fixture
def hub():
    server = Hub(dict(FILES))
    yield server
    server.close()


@pytest.fixture
def ours(hub, tmp_path):
    """Variables of a host: a hub of ours, a folder of ours, in the open: the engine's uid may not look into pytest's."""
    with tempfile.TemporaryDirectory(prefix="station-recipes-test-") as folder:
        cache = f"{folder}/state/cache"
        yield {
            "model_cache_folder": cache,
            "model_cache_source": hub.url,
            "model_cache_models": [MODEL],
            "model_cache_owner": UID,
            "model_cache_group": UID,
            "model_cache_keep_free_gb": 0.1,
            "model_cache_progress_s": 2,
        }


def test_check_converge_again_check_again_tell_the_truth_each_time(hub, ours, tmp_path):
    cache = Path(ours["model_cache_folder"])
    checked = play(tmp_path, "model_cache", "--check", **ours)
    assert checked.code == 0, checked.text
    assert "would bring 3.0 MB of 3.0 MB in 2 files" in checked.text and checked.changed > 0
    assert not cache.parent.exists() and hub.sent == 0

    hub.pause_s = 0.25  # 46 parts of 64 KiB: long enough to be watched, on a busy host too
    applied = play(tmp_path, "model_cache", **ours)
    assert applied.code == 0, applied.text
    assert " of 3.0 MB, " in applied.text, "a long download is not silent"
    finished = cache / "models" / "maker--small-model" / REVISION
    assert {file.name: file.read_bytes() for file in finished.iterdir()} == FILES
    owners = {(file.lstat().st_uid, file.lstat().st_gid) for file in [cache, *cache.rglob("*")]}
    assert owners == {(UID, UID)} and cache.parent.stat().st_uid == 0

    asked = len(hub.seen)
    for options in ([], ["--check"]):
        again = play(tmp_path, "model_cache", *options, **ours)
        assert (again.code, again.changed, len(hub.seen)) == (0, 0, asked), again.text


def test_a_cache_of_somebody_else_is_left_as_it_is(ours, tmp_path):
    cache = Path(ours["model_cache_folder"])
    cache.mkdir(parents=True)
    os.chown(cache, 1234, 1234)
    for options in ([], ["--check"]):
        answer = play(tmp_path, "model_cache", *options, **ours)
        assert answer.code != 0 and f"found uid 1234, wanted {UID}, the engine's" in answer.text
    assert cache.stat().st_uid == 1234 and not list(cache.iterdir())


def test_a_link_that_the_engine_s_uid_plants_leads_root_nowhere(ours, tmp_path):
    cache, secret = Path(ours["model_cache_folder"]), tmp_path / "secret"
    secret.mkdir(mode=0o700)
    cache.mkdir(parents=True)
    (cache / "models").symlink_to(secret)
    for path in (cache, cache / "models"):
        os.chown(path, UID, UID, follow_symlinks=False)
    answer = play(tmp_path, "model_cache", **ours)
    assert answer.code != 0 and f"(as uid {UID})" in answer.text, answer.text
    assert not list(secret.iterdir())


def test_the_token_is_in_no_output_and_on_no_command_line(hub, ours, tmp_path):
    hub.token = "hf_very_secret"
    refused = play(tmp_path, "model_cache", **ours)
    assert refused.code != 0 and "put one into HF_TOKEN or the vault" in refused.text
    answer = play(tmp_path, "model_cache", "-vvv", environ={"HF_TOKEN": hub.token}, **ours)
    assert answer.code == 0, answer.text
    assert hub.token not in answer.text
    assert hub.command_lines and not any(hub.token in line for line in hub.command_lines)


def test_a_hub_that_fails_in_the_middle_fails_the_play_and_the_next_play_goes_on(hub, ours, tmp_path):
    hub.drop_after["model.safetensors"] = [1_000_000]
    hub.answers["/lfs/model.safetensors"] = [None, (404, {})]
    answer = play(tmp_path, "model_cache", **ours)
    assert answer.code != 0 and "status 404, it isn't there" in answer.text, answer.text
    assert not (Path(ours["model_cache_folder"]) / "models" / "maker--small-model" / REVISION).exists()
    hub.sent = 0
    assert play(tmp_path, "model_cache", **ours).code == 0
    assert hub.sent < 2_100_000, "the first third needn't come again"
