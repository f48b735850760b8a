"""Tables on terminals of any width: no word is broken, nothing is lost, and what finds no room stands below its row."""

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from images.console import table
from images.table import pieces
from recipes.compare import ladder_rows
from recipes.machine import machine_facts

ROOT = Path(__file__).resolve().parent.parent.parent
FAMILY = "nemotron-h-synthetic"
LADDER = max((ROOT / "results" / "h200" / FAMILY).glob("ladder-*/ladder.json"))  # the newest
WORD = st.text(st.sampled_from("abcdef-/"), min_size=1, max_size=14)
TEXT = st.lists(WORD, max_size=12).map(" ".join)


def printed(width: int, *given_, **options) -> list[str]:
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as kept:
        console.print(table(*given_, **options))
    return kept.get().splitlines()


def test_wide_letters_count_as_what_they_take():
    lines = printed(20, "", ("", ""), [("名前", "機械学習の推論を測る道具")])
    assert [cell_len(line) for line in lines] == [4, 20, 12]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 5).flatmap(
        lambda count: st.lists(st.lists(TEXT, min_size=count, max_size=count), min_size=1, max_size=4)
    ),
    st.integers(24, 120),
)
@example([["a", "bbbbbbbbbbbbbb", "cccccccccccccc"]], 24)
def test_at_any_width_every_word_of_a_table_is_whole_and_no_line_is_wider(rows, width):
    columns = [f"x{number}" for number in range(len(rows[0]))]
    lines = printed(width, "", columns, rows, below=["x1"])
    assert all(len(line) <= width for line in lines)
    shown = sorted(word for line in lines[1:] for word in line.split() if not re.fullmatch(r"x\d:", word))
    assert shown == sorted(word for row in rows for text in row for word in text.split())


VALUES = st.recursive(
    st.integers() | st.text(st.characters(exclude_characters=" ", exclude_categories=["C", "Z"]), max_size=12),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text("ab_", max_size=30), inner, max_size=5),
    max_leaves=40,
)


@given(VALUES)
def test_json_may_be_broken_behind_its_commas_and_nowhere_else(value):
    text = json.dumps(value, separators=(",", ":"))
    cut = pieces(f"--flag {text}")
    assert "".join(cut) == f"--flag {text}"
    assert all(piece.endswith(",") for piece in cut[1:-1])


@pytest.mark.parametrize("word", ["11,840", "base,mtp3,async-scheduling,flashinfer-mamba,fp16-mamba-state"])
def test_what_is_no_json_is_one_word_with_its_commas(word):
    assert pieces(f"{word} (claimed)") == [f"{word} ", "(claimed)"]


def test_columns_go_below_their_row_in_the_order_said_and_only_as_many_as_must():
    columns, row = ("name", "change", "step"), ("base", "--a-long-option-of-30-letters.", "a step of 20 letters")
    below = ("change", "step")
    assert printed(60, "", columns, [row], below=below) == [
        "name  change                          step",
        "base  --a-long-option-of-30-letters.  a step of 20 letters",
    ]
    assert printed(50, "", columns, [row], below=below) == [
        "name  step",
        "base  a step of 20 letters",
        "  change: --a-long-option-of-30-letters.",
    ]
    assert printed(24, "", columns, [row, ("mtp1", "–", "")], below=below) == [
        "name",
        "base",
        "  change:",
        "    --a-long-option-of-3",
        "    0-letters.",
        "  step: a step of 20",
        "        letters",
        "mtp1",
    ]


def on_a_terminal(columns: int, *arguments: str) -> list[str]:
    """What a task prints on a terminal that is so wide, without colours."""
    leading, following = pty.openpty()
    environ = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    with subprocess.Popen(
        [ROOT / "inv", *arguments], cwd=ROOT, env=environ, stdout=following, stderr=subprocess.DEVNULL
    ) as task:
        os.close(following)
        told = b""
        try:
            while part := os.read(leading, 1 << 16):
                told += part
        except OSError:  # how a terminal's end is told on Linux
            pass
        os.close(leading)
    assert task.returncode in {0, 5, 7}
    return re.sub(r"\x1b\[[0-9;]*m", "", told.decode()).replace("\r", "").splitlines()


SHOWN = [
    (["ladder", "--show", "--recipe", FAMILY], lambda: ladder_rows(FAMILY, machine_facts())),
    (["verdict", str(LADDER.parent)], lambda: json.loads(LADDER.read_text())["rungs"]),
]


@pytest.mark.parametrize("columns", [80, 100, 160])
@pytest.mark.parametrize(("task", "rows"), SHOWN, ids=["shown", "measured"])
def test_a_ladder_breaks_no_option_and_no_figure_on_a_terminal(columns, task, rows):
    lines, rows = on_a_terminal(columns, *task), rows()
    said = [piece.strip() for row in rows for change in row["delta"] for piece in pieces(change)]
    said += [row["rung"] for row in rows]
    times = [row["latency_ms"]["ttft"] for row in rows if row.get("latency_ms")]
    said += [f"{each['p50']:,.1f} / {each['p95']:,.1f}" for each in times]
    assert {"--enable-mamba-cache-stochastic-rounding", "--mamba-ssm-cache-dtype"} <= set(said)
    assert [each for each in said if each not in "\n".join(lines)] == []
    tables = [block for block in "\n".join(lines).split("\n\n") if "\nrung " in f"\n{block}"]
    assert tables and max(len(line) for block in tables for line in block.splitlines()) <= columns
