"""Room images: how a table is laid out: nothing breaks inside a word, and what is too wide stands below its row."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions
from rich.text import Text

GAP = 2  # letters between columns
INDENT = 2  # of what stands below a row
ROOMY = 20  # letters that a text needs, to be read in a column
LONG = 40  # letters of a list that are kept together
NOTHING = frozenset({"", "–"})
# Words with the space behind them; the first with what is before it.
WORDS = re.compile(r"^\s*\S+\s*|\S+\s*|^\s+$")
# What is between the commas of a JSON value, a list of plain values being one thing; and between any commas.
MEMBERS, ITEMS = re.compile(r"(?:\[[^\[\]]*\]|[^,])+,?|,"), re.compile(r"[^,]*,|[^,]+")


@dataclass(frozen=True)
class Table:
    """A title, a header and rows of texts, laid out for the width of whatever they are printed on.

    A text is broken at spaces, and JSON behind commas. Texts of up to `whole` letters aren't broken at all, unless the
    header is. Columns that find no room go below their rows: those named in `below` first, in that order, and as soon
    as they couldn't be read well; then the widest, but never the first.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Text]]
    whole: int
    below: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """The lines of the table, for Rich."""
        if self.title:
            yield Text(self.title, style="italic")
        rows = [[row[at] if at < len(row) else Text() for at in range(len(self.columns))] for row in self.rows]
        least, longest = self._measure(rows)
        kept = self._kept(least, longest, options.max_width)
        widths = self._widths({at: least[at] for at in kept}, longest, options.max_width)
        if any(self.columns):
            header = [wrapped(Text(self.columns[at]), widths[at]) for at in kept]
            high = max(len(cell) for cell in header)
            yield from _lines([[Text()] * (high - len(cell)) + cell for cell in header], list(widths.values()), "bold")
        for row in rows:
            yield from _lines([wrapped(row[at], widths[at]) for at in kept], list(widths.values()))
            for at, name in enumerate(self.columns):
                if at not in kept and row[at].plain not in NOTHING:
                    yield from _below(name, row[at], options.max_width)

    def _measure(self, rows: Sequence[Sequence[Text]]) -> tuple[list[int], list[int]]:
        """Of each column, in letters: the least it needs, and its longest line of text."""
        least, longest = [], []
        for at, name in enumerate(self.columns):
            lines = [line for row in rows for line in row[at].plain.split("\n")]
            longest.append(max((cell_len(line) for line in lines), default=0))
            words = max((cell_len(piece.rstrip()) for line in [name, *lines] for piece in pieces(line)), default=0)
            least.append(max(words, min(longest[at], self.whole)))
        return least, longest

    def _kept(self, least: Sequence[int], longest: Sequence[int], room: int) -> list[int]:
        """The columns that stay in their rows."""
        kept = list(range(len(self.columns)))
        well = [
            max(needs, min(text, ROOMY)) if name in self.below else needs
            for name, needs, text in zip(self.columns, least, longest, strict=True)
        ]
        for name in self.below:
            if _total(kept, well) > room:
                kept.remove(self.columns.index(name))
        while _total(kept, least) > room and len(kept) > 1:
            kept.remove(max(reversed(kept[1:]), key=lambda at: least[at]))
        return kept

    def _widths(self, widths: dict[int, int], longest: Sequence[int], room: int) -> dict[int, int]:
        """The columns' widths once the room that is left is shared out: names first, then texts, then long names."""
        spare = room - sum(widths.values()) - GAP * (len(widths) - 1)
        for high, most in ((2, room), (1, self.whole), (0, room), (1, room)):
            if high == 0:
                widths, spare = _levelled(widths, longest, spare)
                continue
            lacking = {at: _width_for(self.columns[at], high, width) - width for at, width in widths.items()}
            for at in sorted(lacking, key=lacking.get):
                if lacking[at] <= spare and widths[at] + lacking[at] <= max(most, widths[at]):
                    widths[at] += lacking[at]
                    spare -= lacking[at]
        return widths


def _width_for(name: str, high: int, least: int) -> int:
    """The width in which a column's name has at most `high` lines."""
    return next(width for width in range(least, least + cell_len(name) + 1) if len(wrapped(Text(name), width)) <= high)


def _levelled(widths: dict[int, int], longest: Sequence[int], spare: int) -> tuple[dict[int, int], int]:
    """Columns with more room for their texts, each letter of it for the narrowest that lacks one; and what is left."""
    widths = dict(widths)
    while spare > 0 and (hungry := [at for at in widths if widths[at] < longest[at]]):
        widths[min(hungry, key=widths.get)] += 1
        spare -= 1
    return widths, spare


def _total(kept: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[at] for at in kept) + GAP * (len(kept) - 1)


def _lines(cells: Sequence[Sequence[Text]], widths: Sequence[int], style: str = "") -> Iterator[Text]:
    for number in range(max(len(cell) for cell in cells)):
        line = Text(style=style, no_wrap=True, overflow="ignore")
        for cell, width in zip(cells, widths, strict=True):
            part = cell[number] if number < len(cell) else Text()
            line.append_text(part)
            line.append(" " * (width + GAP - part.cell_len))
        line.rstrip()
        yield line


def _below(name: str, text: Text, room: int) -> Iterator[Text]:
    """One cell on lines of its own: after its column's name, or on the next line where a word needs that room."""
    label = Text(f"{' ' * INDENT}{name}: " if name else " " * INDENT, style="bold")
    words = max(cell_len(piece.rstrip()) for line in text.plain.split("\n") for piece in pieces(line))
    hang = label.cell_len
    if hang + words > room:
        if name:
            yield Text(label.plain.rstrip(), style="bold")
        label, hang = Text(" " * 2 * INDENT), 2 * INDENT
    for line in wrapped(text, max(room - hang, 1)):
        whole = Text(no_wrap=True, overflow="ignore").append_text(label).append_text(line)
        label = Text(" " * hang)
        yield whole


def pieces(line: str) -> list[str]:
    """A line, cut wherever it may be broken: behind spaces, and in JSON behind commas. Joined, they are the line."""
    found: list[str] = []
    for word in WORDS.findall(line):
        if "[" not in word and "{" not in word:
            found.append(word)
            continue
        for member in MEMBERS.findall(word):
            found += ITEMS.findall(member) if len(member) > LONG else [member]
    return found


def wrapped(text: Text, width: int) -> list[Text]:
    """A text in lines of at most `width` letters; only where one piece of it is wider, inside that."""
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        at, start, cuts = 0, 0, []
        for piece in pieces(line.plain):
            if at > start and cell_len(line.plain[start:at] + piece.rstrip()) > width:
                cuts.append(at)
                start = at
            at += len(piece)
            while cell_len(line.plain[start:at].rstrip()) > width:
                start += max(len(chop_cells(line.plain[start:at], width)[0]), 1)
                cuts.append(start)
        for part in line.divide(cuts):
            part.rstrip()
            lines.append(part)
    return lines
