"""A file that a family keeps packed is there, whole, whenever its recipe is used; else one error says why not."""

import gzip
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from images.errors import Problem
from recipes.load import LIBRARY, Loaded, load_recipe
from recipes.model_files import differing_files, observed_files

ROOT = LIBRARY.parent.parent
FAMILY = "nemotron-h-synthetic"
NAME = "tokenizer.json"
GENUINE = gzip.decompress((LIBRARY / FAMILY / "packed" / f"{NAME}.gz").read_bytes())


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """The library as a fresh clone has it."""
    copy = tmp_path / "library"
    for family in (FAMILY, "micro"):
        shutil.copytree(LIBRARY / family, copy / family, ignore=shutil.ignore_patterns(NAME, "*.safetensors"))
    for module in ("recipes.load", "recipes.model_files"):
        monkeypatch.setattr(f"{module}.LIBRARY", copy)
    return copy


def of(library: Path, rung: str = "base") -> Loaded:
    return load_recipe(f"{FAMILY}/{rung}", library)


def differing(loaded: Loaded) -> list[str]:
    return differing_files(loaded.recipe.model.files, observed_files(loaded))


def test_a_fresh_clone_has_the_files_that_the_recipe_names_and_nothing_new_for_git(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is nothing to clone")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--shared", ROOT, clone], check=True, capture_output=True)
    code = f"from recipes.load import load_recipe; load_recipe('{FAMILY}/mtp3')"
    subprocess.run([sys.executable, "-c", code], cwd=clone, check=True)
    assert (clone / "recipes/library" / FAMILY / "model" / NAME).read_bytes() == GENUINE
    told = subprocess.run(["git", "status", "--porcelain"], cwd=clone, check=True, capture_output=True, text=True)
    assert told.stdout == ""


def test_rungs_share_the_unpacked_file(library):
    assert differing(of(library, "mtp3")) == differing(of(library)) == []


def _look(library: Path) -> list[str]:
    import recipes.model_files

    recipes.model_files.LIBRARY = library
    loaded = load_recipe(f"{FAMILY}/base", library)
    return differing_files(loaded.recipe.model.files, observed_files(loaded))


def test_many_at_once_see_the_file_whole_and_no_unfinished_one(library):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        for _ in range(10):
            (library / FAMILY / "model" / NAME).unlink(missing_ok=True)
            assert pool.map(_look, [library] * 4) == [[]] * 4
    (library / FAMILY / "packed" / f".{NAME}.killed.partial").write_bytes(b"half")
    assert differing(of(library)) == []


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-9], lambda data: b"", lambda data: b"no gzip", lambda data: gzip.compress(b"{}")],
)
def test_a_damaged_packed_file_is_one_error_and_stops_nothing_that_needs_no_model(library, damage):
    packed = library / FAMILY / "packed" / f"{NAME}.gz"
    sound = packed.read_bytes()
    packed.write_bytes(damage(sound))
    loaded = of(library)
    with pytest.raises(Problem, match=rf"the model's file .*{NAME}.*git restores it"):
        observed_files(loaded)
    assert not (library / FAMILY / "model" / NAME).exists()
    packed.write_bytes(sound)
    assert differing(loaded) == []


@pytest.mark.parametrize("spoil", [lambda file: file.write_text("of somebody's own"), Path.mkdir])
def test_what_is_not_the_recipe_s_is_left_and_named_with_the_remedy(library, spoil):
    target = library / FAMILY / "model" / NAME
    spoil(target)
    loaded = of(library)
    with pytest.raises(Problem, match=r"is not the recipe's: delete it, and it is unpacked from"):
        observed_files(loaded)
    assert target.is_dir() or target.read_text() == "of somebody's own"


def test_what_a_bundle_brings_packed_stays_packed(library, tmp_path):
    theirs = tmp_path / "bundle"
    shutil.copytree(library, theirs)
    loaded = load_recipe(f"{FAMILY}/base", theirs)
    assert observed_files(loaded)[NAME] is None
    assert not (theirs / FAMILY / "model" / NAME).exists()
