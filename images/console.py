"""Room images: how the project speaks. Results go to stdout, progress and notes to stderr."""

import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from images.table import Table

SHORT = 16  # letters that a table's column keeps on one line
HEARTBEAT_S = 30  # where there is no terminal, a line this often says that work goes on


class _Results(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the front door, which ends as a reader who has had enough wants it: not as a fault."""
        raise  # noqa: PLE0704 Rich calls this while it handles the BrokenPipeError


def out() -> Console:
    """The console for results. Wide when piped, so that scripts see whole lines."""
    console = _Results(highlight=False, markup=False)
    return console if console.is_terminal else _Results(highlight=False, markup=False, width=160)


def err() -> Console:
    """The console for progress and notes."""
    console = Console(stderr=True, highlight=False, markup=False)
    return console if console.is_terminal else Console(stderr=True, highlight=False, markup=False, width=160)


def note(message: str) -> None:
    """Print one line of progress."""
    err().print(message, markup=False)


def emit_json(value: object) -> None:
    """Print a value for a script: one line, sorted keys, nothing else on stdout."""
    print(json.dumps(value, sort_keys=True))


def echo_command(argv: Sequence[str]) -> None:
    """Show an external command, shell-quoted, before it runs."""
    err().print(f"$ {shlex.join(argv)}", style="dim", markup=False, soft_wrap=True)


def printable(text: str) -> str:
    """A stranger's text without what would move the cursor or change colours."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    whole: int = SHORT,
    below: Sequence[str] = (),
) -> Table:
    """Build the one kind of table used everywhere: a title line, a header unless it is empty, the rows.

    Where a terminal is too narrow, texts of more than `whole` letters are wrapped between words; columns that find no
    room even so stand below their rows, those named in `below` first.
    """
    cells = [[cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row] for row in rows]
    return Table(title, columns, cells, whole, below)


@contextmanager
def stage(description: str) -> Iterator[Callable[..., None]]:
    """Show one stage of work that takes longer than a moment, and how long it took.

    Yields `update(status="", done=None, total=None)`. On a terminal that moves a spinner or a bar;
    elsewhere only the stage's beginning and end are printed.
    """
    started = time.monotonic()
    console = err()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=30))
    columns += (TextColumn("{task.fields[status]}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as display:
        if not console.is_terminal:
            note(f"{description} …")
        task = display.add_task(description, total=None, status="")

        beat = started

        def update(status: str = "", done: float | None = None, total: float | None = None) -> None:
            nonlocal beat
            display.update(task, status=status, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - beat > HEARTBEAT_S:
                beat = time.monotonic()
                note(f"  … {time.monotonic() - started:.0f} s {status}".rstrip())

        yield update
    note(f"{description}: {time.monotonic() - started:.0f} s")
