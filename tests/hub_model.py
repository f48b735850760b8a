"""micro as a model of a hub's repository: its recipe in a copy of this repository, and its files in a cache."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from recipes.load import LIBRARY, load_recipe
from recipes.weights import snapshot
from tests.ladders import FAMILY, Workshop

REPO, COMMIT = "team/micro", "0123456789abcdef0123456789abcdef01234567"
ENGINE_UID = 1000
CHANGES = ["benchmark.output_len", "benchmark.prompts", "model.path", "model.repo"]


def hub_workshop(folder: Path) -> Workshop:
    """A copy of the repository whose family quick serves micro from a repository at no confirmed commit."""
    document = {
        "schema": 1,
        "id": f"{FAMILY}/base",
        "title": "micro as a hub has it",
        "extends": "micro/base",
        "model": {"path": None, "repo": REPO},
        "benchmark": {"output_len": 32, "prompts": 80},
        "delta": {"changes": CHANGES, "reason": "a test", "source": "a test"},
    }
    return Workshop(folder, {}, document)


def fill_cache(cache: Path) -> Path:
    """Lay micro's files out as provisioning does, for the engine's user; returns the model's folder."""
    model = load_recipe("micro/base").recipe.model.model_copy(update={"repo": REPO, "revision": COMMIT})
    folder, files = snapshot(cache, model), Path("models") / REPO.replace("/", "--") / COMMIT
    shutil.copytree(LIBRARY / "micro" / "model", cache / files)
    folder.parent.mkdir(parents=True)
    folder.symlink_to(Path("../../../..") / files)
    if os.geteuid() == 0:
        for path in (cache, *cache.rglob("*")):
            os.chown(path, ENGINE_UID, ENGINE_UID)
    return folder


def door(shop: Workshop, *arguments: str) -> subprocess.CompletedProcess:
    """Run a task of the copy, with its own state and the engines of everybody."""
    environ = {**os.environ, "STATION_RECIPES_STATE": str(shop.folder / "state")}
    argv = [sys.executable, "tasks.py", *arguments]
    return subprocess.run(argv, cwd=shop.folder, env=environ, capture_output=True, text=True, check=False, timeout=900)
