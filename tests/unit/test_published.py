"""Published ladders: their tables come out of their runs, and the README's out of theirs."""

import shutil
from pathlib import Path

import pytest

from bench.ladder.join import remake
from tests.published import LADDER, with_ladders
from tests.unit.test_readme import README, ROOT


def test_the_ladders_in_the_readme_are_the_linked_ones():
    assert len(LADDER.findall(README)) >= 2
    assert with_ladders(README) == README


@pytest.mark.parametrize("folder", sorted((ROOT / "results").rglob("ladder-*")), ids=lambda folder: folder.name)
def test_a_published_ladder_s_table_is_made_again_to_the_same_bytes(folder: Path, tmp_path: Path):
    again = tmp_path / folder.name
    shutil.copytree(folder, again)
    (again / "ladder.json").unlink()
    remake(again)
    assert (again / "ladder.json").read_bytes() == (folder / "ladder.json").read_bytes()
