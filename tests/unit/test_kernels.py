"""Compiled kernels put into a folder that the engine's user can write: root is led nowhere, and gives away no more."""

import os
from pathlib import Path

import pytest

from images.errors import BundleProblem
from recipes.bundle.carry import place_caches
from recipes.bundle.layout import CarriedCaches


def placing(folder: Path, cache: Path) -> int:
    """Put one kernel for a CPU, vllm/a/kernel.so, into a cache for the engine's user."""
    file = folder / "bundle/engine/caches/cpu/vllm/a/kernel.so"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"code")
    named = CarriedCaches(platform="linux/amd64", engine="cpu 0.32.0", device="cpu")
    return place_caches(folder / "bundle", (named,), cache, 1000, {"gpus": []})


def test_kernels_are_not_put_through_a_link_that_leads_nowhere(tmp_path):
    (tmp_path / "cache/vllm/a").mkdir(parents=True)
    (tmp_path / "cache/vllm/a/kernel.so").symlink_to(tmp_path / "elsewhere")
    assert placing(tmp_path, tmp_path / "cache") == 0
    assert not (tmp_path / "elsewhere").exists()


def test_a_kernel_that_was_cut_off_is_not_there(tmp_path, monkeypatch):
    def cut_off(source, target):
        target.write(source.read(2))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("recipes.bundle.carry.shutil.copyfileobj", cut_off)
        placing(tmp_path, tmp_path / "cache")
    assert placing(tmp_path, tmp_path / "cache") == 1
    assert (tmp_path / "cache/vllm/a/kernel.so").read_bytes() == b"code"


@pytest.mark.skipif(os.geteuid() != 0, reason="root gives files away")
def test_root_gives_the_engine_s_user_what_it_placed_and_nothing_else(tmp_path):
    (tmp_path / "secret").write_bytes(b"root's")
    (tmp_path / "cache/vllm/mine").mkdir(parents=True)
    (tmp_path / "cache/vllm/link").symlink_to(tmp_path / "secret")
    assert placing(tmp_path, tmp_path / "cache") == 1
    own = {path.name for path in [tmp_path / "secret", *(tmp_path / "cache").rglob("*")] if path.lstat().st_uid == 1000}
    assert own == {"a", "kernel.so"}
    assert placing(tmp_path, tmp_path / "new") == 1 and (tmp_path / "new").stat().st_uid == 1000


@pytest.mark.skipif(os.geteuid() != 0, reason="whom root could be led for")
def test_root_is_not_led_out_of_a_cache_by_a_link_to_a_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache/vllm").mkdir(parents=True)
    (tmp_path / "cache/vllm/a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleProblem, match="a is a link or a file"):
        placing(tmp_path, tmp_path / "cache")
    assert list((tmp_path / "elsewhere").iterdir()) == []
