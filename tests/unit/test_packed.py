"""A file that a family keeps packed is there, whole, whenever its recipe is used; else one error says why not."""

import gzip
import shutil

import pytest

from images.errors import Problem
from recipes.load import LIBRARY, load_recipe
from recipes.model_files import differing_files, observed_files

FAMILY = "nemotron-h-synthetic"
NAME = "tokenizer.json"


@pytest.fixture
def library(tmp_path):
    """A library as a fresh clone has it."""
    copy = tmp_path / "library"
    shutil.copytree(LIBRARY / FAMILY, copy / FAMILY, ignore=shutil.ignore_patterns(NAME))
    assert not (copy / FAMILY / "model" / NAME).exists()
    return copy


def test_a_fresh_clone_has_the_files_that_the_recipe_names(library):
    loaded = load_recipe(f"{FAMILY}/mtp3", library)
    assert differing_files(loaded.recipe.model.files, observed_files(loaded)) == []


def test_a_file_that_is_there_is_left_as_it_is(library):
    target = library / FAMILY / "model" / NAME
    target.write_text("of somebody's own")
    loaded = load_recipe(f"{FAMILY}/base", library)
    assert target.read_text() == "of somebody's own"
    assert differing_files(loaded.recipe.model.files, observed_files(loaded)) == [NAME]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"no gzip", lambda data: data[:50] + b"x" * 99]
)
def test_a_damaged_packed_file_is_one_error_and_stops_nothing_that_needs_no_model(library, damage):
    packed = library / FAMILY / "packed" / f"{NAME}.gz"
    packed.write_bytes(damage(packed.read_bytes()))
    loaded = load_recipe(f"{FAMILY}/base", library)
    with pytest.raises(Problem, match=rf"the model's file .*{NAME} can't be unpacked from .*git restores"):
        observed_files(loaded)
    assert not (library / FAMILY / "model" / NAME).exists()
    packed.write_bytes(gzip.compress((LIBRARY / FAMILY / "model" / NAME).read_bytes()))
    assert differing_files(loaded.recipe.model.files, observed_files(loaded)) == []
