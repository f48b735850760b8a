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


def cells(row: dict) -> list[str]:
    """A rung's row of ladder.json as the README's tables show it, from what was published to J/token."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    rate, ci95, gain, step95 = (row.get(name) for name in ("output_tok_s", "ci95", "step_gain", "step_ci95"))
    said = "does not apply" if row["applies"] else "no rate" if rate is None else f"{rate:,.0f}"
    if rate is not None:
        said += f", {ci95[0]:,.0f} to {ci95[1]:,.0f}" if ci95 else ", one boot"
        lost = sum(bool(boot["voided_by"]) for boot in row["boots"])
        said += f", {len(row['run'])} of {len(row['boots'])} boots" if lost else ""
    step = "–" if gain is None else f"{gain:+.1%} on {row['against']}"
    step += f", {step95[0]:+.1%} to {step95[1]:+.1%}" if step95 else ""
    step += ", below noise" if row.get("below_noise") else ""
    tpot = (row.get("latency_ms") or {}).get("tpot") if rate is not None else None
    took, busy = row.get("step_ms"), (row.get("gpu_busy_pct") or 0) / 100
    return [
        number(row["published_tok_s"], ",.0f"),
        said,
        step,
        number(row.get("acceptance_length"), ".3f"),
        f"{tpot['p50']:.1f} / {tpot['p95']:.1f}" if tpot else "–",
        f"{took * busy:.1f} + {took * (1 - busy):.1f}" if busy else number(took, ".1f"),
        number(row.get("power_w") if rate is not None else None, ".0f"),
        number(row.get("energy_j_per_token"), ".3g"),
    ]


def test_the_ladders_in_the_readme_are_the_linked_ones_figure_by_figure():
    links = list(re.finditer(r"\[the ladder\]\((results/[^)]+)\)", README))
    assert len(links) == 3
    for link in links:
        table = re.search(r"\n\| rung \|.*?\n\n", README[link.end() :], re.S)[0]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
        kept = json.loads((ROOT / link[1] / "ladder.json").read_text())["rungs"]
        assert [row[:9] for row in rows] == [[row["rung"], *cells(row)] for row in kept], link[1]
