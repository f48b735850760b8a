"""The README shows what really came out: its block is the linked run's verdict, its links lead somewhere."""

import io
import json
import re
from pathlib import Path

from rich.console import Console

from bench.report.text import print_verdict
from tasks import ns

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
WIDTH = 112


def shown(run: Path) -> str:
    """What `./inv verdict` prints for a run in a terminal of WIDTH columns, without the spaces at line ends."""
    sink = io.StringIO()
    print_verdict(
        json.loads((run / "verdict.json").read_text()), Console(file=sink, width=WIDTH, highlight=False, markup=False)
    )
    return "\n".join(line.rstrip() for line in sink.getvalue().strip().splitlines())


def test_the_output_in_the_readme_is_the_linked_run_s():
    linked = re.search(r"\[the run\]\((results/[^)]+)\)", README)[1]
    block = re.search(r"```\n(.*?)```", README[README.index("[the run]") :], re.S)[1]
    assert block.strip() == shown(ROOT / linked)


def test_every_link_in_the_readme_and_the_results_leads_somewhere():
    for file in (ROOT / "README.md", ROOT / "results" / "README.md", ROOT / "recipes/library/micro/MODEL_CARD.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", file.read_text()):
            assert target.startswith("http") or (file.parent / target).exists(), (file.name, target)


def test_every_task_is_named_in_the_readme():
    assert len(ns.task_names) >= 14
    for name in ns.task_names:
        assert f"./inv {name}" in README, name
