"""The README's tables of ladders are those of the ladders it links."""

from tests.published import LADDER, with_ladders
from tests.unit.test_readme import README


def test_the_ladders_in_the_readme_are_the_linked_ones():
    assert len(LADDER.findall(README)) >= 2
    assert with_ladders(README) == README
