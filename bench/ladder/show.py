"""Room bench: a ladder's table on the terminal or as JSON, and the exit code that goes with it."""

from pathlib import Path

from bench.ladder.exits import exit_code
from bench.ladder.join import remake
from bench.ladder.setting import FILE
from bench.report.ladder import print_ladder_table
from images.console import emit_json, out
from images.yaml_source import shown


def is_ladder(folder: Path) -> bool:
    """Whether a folder is a ladder's."""
    return (folder / FILE).is_file()


def judge_ladder(folder: Path, as_json: bool) -> int:
    """Make a ladder's table again from its folder alone, and show it."""
    return show(folder, remake(folder), as_json)


def show(folder: Path, table: dict, as_json: bool) -> int:
    """Print a ladder's table, the folder as the last line; returns the exit code."""
    if as_json:
        emit_json({**table, "folder": shown(folder)})
    else:
        print_ladder_table(table, out())
        out().print(f"\n{shown(folder)}", markup=False, soft_wrap=True)
    return exit_code(table)
