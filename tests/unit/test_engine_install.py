"""Installing the engine: pins are whole, interrupted builds are never used, pip's settings reach uv."""

import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from images.engine import MARKER, engine_home, ensure_engine, find_engine, torch_source
from images.errors import EngineProblem, UsageProblem
from images.index import pip_settings, uv_environment

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("pins", ["pins.txt", "images/cpu/pins.txt"])
def test_every_pin_is_exact_and_hashed(pins):
    blocks = re.split(r"\n(?=[a-z0-9])", re.sub(r"^#.*\n", "", (ROOT / pins).read_text(), flags=re.M))
    assert len(blocks) > 40
    for block in blocks:
        assert re.match(r"^[a-z0-9.-]+==\S+", block), block[:80]
        assert "--hash=sha256:" in block, block[:80]


def test_the_cpu_torch_has_a_hash_for_each_python_on_both_architectures():
    block = re.search(r"^torch==2\.13\.0\+cpu(.*?)^(?=[a-z])", (ROOT / "images/cpu/pins.txt").read_text(), re.M | re.S)
    assert block[1].count("--hash=sha256:") == 8


@pytest.mark.parametrize("package", ["torchvision", "torchaudio", "torchcodec", "triton", "nvidia-"])
def test_nothing_that_breaks_a_cpu_torch_is_pinned(package):
    assert not re.search(rf"^{package}", (ROOT / "images/cpu/pins.txt").read_text(), re.M)


def test_an_interrupted_build_is_never_used(tmp_path, monkeypatch):
    monkeypatch.setenv("STATION_RECIPES_CACHE", str(tmp_path))
    (engine_home("cpu") / "bin").mkdir(parents=True)
    (engine_home("cpu") / "bin" / "python").symlink_to("/bin/true")
    assert find_engine("cpu") is None
    (engine_home("cpu") / MARKER).write_text("{}")
    assert find_engine("cpu") is not None


def test_two_builds_at_once_build_once(tmp_path, monkeypatch):
    monkeypatch.setenv("STATION_RECIPES_CACHE", str(tmp_path))
    built = []

    def slow_build(_name: str, home: Path, _wheels: Path | None) -> None:
        built.append(home)
        threading.Event().wait(0.3)
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").symlink_to("/bin/true")
        (home / MARKER).write_text("{}")

    monkeypatch.setattr("images.engine._build", slow_build)
    threads = [threading.Thread(target=ensure_engine, args=("cpu",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_too_little_disk_is_said_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("STATION_RECIPES_CACHE", str(tmp_path))
    monkeypatch.setattr("images.engine.shutil.disk_usage", lambda _: SimpleNamespace(free=1e9))
    with pytest.raises(EngineProblem, match=r"needs 3 GB in .*, 1.0 GB are free"):
        ensure_engine("cpu")


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STATION_RECIPES_CACHE", str(tmp_path / "file"))
    with pytest.raises(EngineProblem, match="Set STATION_RECIPES_CACHE to another folder"):
        ensure_engine("cpu")


def test_an_unknown_engine_image_is_named():
    with pytest.raises(UsageProblem, match="no engine image 'cuda9'"):
        find_engine("cuda9")


def test_pytorch_s_index_is_added_only_where_the_configured_index_lacks_the_cpu_build(tmp_path):
    import sys

    closed = {**os.environ, "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(tmp_path), "UV_NO_CONFIG": "1"}
    assert torch_source("torch==2.13.0+cpu", Path(sys.executable), closed) == ["--torch-backend", "cpu"]
    assert torch_source("pytest", Path(sys.executable), closed) == [], "an index that has the package is enough"


def test_pip_s_settings_are_read_as_pip_reads_them(tmp_path):
    first, second = tmp_path / "a.conf", tmp_path / "b.conf"
    first.write_text("[global]\nindex-url = https://one/simple\nfind-links =\n  /x\n  /y\n")
    second.write_text("[install]\nindex-url = https://two/simple\n")
    settings = pip_settings({"PIP_CERT": "/ca.pem"}, [first, second, tmp_path / "missing"])
    assert settings == {"index-url": "https://two/simple", "find-links": "\n/x\n/y", "cert": "/ca.pem"}


def test_uv_gets_pip_s_settings_unless_it_has_its_own(tmp_path):
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://one/simple\nextra-index-url = https://a https://b\nfind-links = /x /y\n"
    )
    environ = {"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(config), "XDG_CONFIG_DIRS": str(tmp_path)}
    translated = uv_environment(environ)
    assert translated["UV_DEFAULT_INDEX"] == "https://one/simple"
    assert translated["UV_INDEX"] == "https://a https://b"
    assert translated["UV_FIND_LINKS"] == "/x,/y"
    assert uv_environment({**environ, "UV_DEFAULT_INDEX": "https://mine"})["UV_DEFAULT_INDEX"] == "https://mine"
