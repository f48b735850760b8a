"""A bundle that carries the engine's image: into the Docker engine and under its id into the site's overlay."""

import json
from pathlib import Path

import pytest

from images.errors import Problem
from recipes.adopted import find_adopted
from recipes.load import load_recipe


@pytest.fixture
def adopted_image(inv, small, engine, tmp_path) -> tuple[str, dict, dict]:
    """A small image bundled, forgotten by the engine, and adopted: its id, what adopt said, the environment."""
    image_id = engine.id(small)
    file, env = tmp_path / "micro.tar", {"STATION_RECIPES_STATE": str(tmp_path / "state")}
    bundled = inv("bundle", "--recipe", "micro", "--out", str(file), "--with-image", small)
    assert bundled.returncode == 0, bundled.stderr
    engine.forget(small)
    assert image_id not in engine.ids()
    answer = inv("adopt", str(file), "--as", "theirs", "--no-doctor", "--json", **env)
    assert answer.returncode == 0, answer.stderr
    return image_id, json.loads(answer.stdout), env


def test_an_image_that_comes_with_a_bundle_is_the_one_that_the_site_runs(adopted_image, engine, inv, monkeypatch):
    image_id, told, env = adopted_image
    assert image_id in engine.ids()
    assert told["info"]["archive"] == {"platform": "linux/amd64", "image_id": image_id}
    monkeypatch.setenv("STATION_RECIPES_STATE", env["STATION_RECIPES_STATE"])
    assert find_adopted("micro/mtp1@theirs").site.image == image_id
    assert load_recipe("micro/mtp1@theirs").site.image == image_id
    # It is no engine of ours, and so it is not run: a bundle decides nothing about which image counts as the engine.
    refused = inv("reproduce", "--recipe", "micro/mtp1@theirs", "--runtime", "docker", **env)
    assert refused.returncode == 1 and "is not this version's cpu image" in refused.stderr


def test_an_image_that_isnt_there_is_said_and_nothing_is_written(inv, tmp_path):
    answer = inv("bundle", "--recipe", "micro", "--out", str(tmp_path / "x.tar"), "--with-image", "nobody/nothing:1")
    assert answer.returncode != 0 and "nobody/nothing" in answer.stderr and "Traceback" not in answer.stderr
    assert list(Path(tmp_path).iterdir()) == []


def test_two_bundles_with_one_image_are_the_same_bytes(small, tmp_path):
    from bench.handover.bundling import Wanted, write

    first, second = (write(Wanted("micro", str(tmp_path / name), archive=small)) for name in ("a.tar", "b.tar"))
    assert first.content == second.content
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with pytest.raises(Problem):
        write(Wanted("micro", str(tmp_path / "c.tar"), archive="nobody/nothing:1"))
