"""A model of a hub's repository in containers: the host's cache is mounted, and the load client finds the tokenizer."""

import json
from pathlib import Path

from tests.disturbed import failed
from tests.hub_model import COMMIT, REPO, door, fill_cache, hub_workshop
from tests.ladders import FAMILY
from tests.ports import free_port


def test_a_repository_s_model_is_measured_in_containers_from_the_host_s_cache(cpu_image, tmp_path: Path):
    shop, cache = hub_workshop(tmp_path / "shop"), tmp_path / "cache"
    for folder in (tmp_path, *tmp_path.parents[:2]):  # the engine's user must come to the cache
        folder.chmod(folder.stat().st_mode | 0o055)
    cache.mkdir()
    fill_cache(cache)
    said = ["--model-revision", f"{REPO}={COMMIT}", "--cache", str(cache), "--image", f"cpu={cpu_image.id}"]
    assert door(shop, "site", *said).returncode == 0
    asked = ["reproduce", "--recipe", f"{FAMILY}/base", "--runtime", "docker", "--port", str(free_port())]
    answer = door(shop, *asked, "--out", str(tmp_path / "runs"), "--json")
    assert answer.stdout.startswith("{"), answer.stderr
    verdict = json.loads(answer.stdout)
    assert f"Image: {cpu_image.id}" in answer.stderr, "the one that the site names, and said"
    assert verdict["setting"]["model_files_that_differ"] == []
    assert failed(verdict, "run") == set()
    argv = json.loads((Path(verdict["run"]) / "boots/1/argv.json").read_text())
    assert argv["live"] == argv["rendered"] and REPO in argv["live"]
