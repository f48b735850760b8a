"""A model of a hub's repository, at a commit that a person confirmed, from the cache that this machine names."""

import json
from pathlib import Path

from tests.disturbed import failed
from tests.hub_model import COMMIT, REPO, door, fill_cache, hub_workshop
from tests.ladders import FAMILY
from tests.ports import free_port


def test_a_repository_s_model_is_asked_for_step_by_step_and_then_measured_offline(tmp_path: Path):
    shop = hub_workshop(tmp_path / "shop")
    port = str(free_port())
    asked = ["reproduce", "--recipe", f"{FAMILY}/base", "--port", port, "--out", str(tmp_path / "runs"), "--json"]
    refused = door(shop, *asked)
    assert refused.returncode == 2 and f"./inv site --model-revision {REPO}=COMMIT" in refused.stderr
    cache = tmp_path / "cache"
    assert door(shop, "site", "--model-revision", f"{REPO}={COMMIT}", "--cache", str(cache)).returncode == 0
    refused = door(shop, *asked)
    assert refused.returncode == 2 and f"is not in {cache}/huggingface" in refused.stderr
    assert "provision --recipe quick/base --no-serve" in refused.stderr
    fill_cache(cache)
    answer = door(shop, *asked)
    verdict = json.loads(answer.stdout)
    run = Path(verdict["run"])
    assert verdict["setting"]["model_files_that_differ"] == []
    assert failed(verdict, "run") == set()
    argv = json.loads((run / "boots/1/argv.json").read_text())["live"]
    assert argv[argv.index("--revision") + 1] == COMMIT and REPO in argv
    for file in run.rglob("*.json"):
        assert str(tmp_path) not in file.read_text(), "nobody's folders in a run"
