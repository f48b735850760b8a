"""Judge every published run again and show the README's again: run after a change of the verdict (python -m tests.published)."""

import json
import re
from pathlib import Path

from bench.ladder.join import remake
from bench.ladder.setting import FILE as PLAN
from bench.report.ladder import STEP, step_parts
from bench.statistics import power_table
from bench.verdict import write_verdict
from tests.unit.test_readme import README, ROOT, shown

LADDER = re.compile(r"\[the ladder\]\((results/[^)]+)\).*?\n\n(\|.*?\n)(?=\n)", re.S)


def ladder_table(folder: Path) -> str:
    """A published ladder as the README's Markdown table."""
    found = json.loads((folder / "ladder.json").read_text())
    head = ["rung", "published tok/s (claimed)", f"tok/s ({found['status']})", "step", "acceptance", "TPOT p50/p95, ms"]
    head += [STEP, "W", "J/token", "quality", "effect"]
    lines = [head, ["---", *["---:"] * (len(head) - 3), "---", "---"]]
    for row in found["rungs"]:
        rate = row.get("output_tok_s")
        lines.append([row["rung"], *(_measured(row) if rate is not None else _absent(row))])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _measured(row: dict) -> list[str]:
    interval = f", {row['ci95'][0]:,.0f} to {row['ci95'][1]:,.0f}" if row["ci95"] else ", one boot"
    lost = len(row["failed"]) + sum(bool(boot["voided_by"]) for boot in row["boots"])
    interval += f", {len(row['run'])} of {len(row['run']) + lost} boots" if lost else ""
    gain = "–" if row["step_gain"] is None else f"{row['step_gain']:+.1%}"
    gain += f" on {row['against']}" if row["step_gain"] is not None else ""
    gain += f", {row['step_ci95'][0]:+.1%} to {row['step_ci95'][1]:+.1%}" if row["step_ci95"] else ""
    gain += ", below noise" if row["below_noise"] else ""
    tpot = row["latency_ms"]["tpot"]
    return [
        _number(row["published_tok_s"], ",.0f"),
        f"{row['output_tok_s']:,.0f}{interval}",
        gain,
        _number(row["acceptance_length"], ".3f"),
        f"{tpot['p50']:.1f} / {tpot['p95']:.1f}",
        step_parts(row),
        _number(row["power_w"], ".0f"),
        _number(row["energy_j_per_token"], ".3g"),
        _quality(row),
        _proved(row),
    ]


def _absent(row: dict) -> list[str]:
    """A rung without a rate; what needs no clock may have been measured all the same."""
    asked = bool(row.get("quality"))
    said = "does not apply" if row["applies"] else "no rate" if asked else "not measured"
    quality, proved = _quality(row), _proved(row) if asked else "–"
    acceptance = _number(row.get("acceptance_length"), ".3f")
    return [_number(row["published_tok_s"], ",.0f"), said, "–", acceptance, "–", "–", "–", "–", quality, proved]


def _quality(row: dict) -> str:
    suites = (row.get("quality") or {}).values()
    return ", ".join(f"{suite['all']['exact']:,} of {suite['all']['n']:,}" for suite in suites) or "–"


def _proved(row: dict) -> str:
    return {True: "proved", False: "not proved", None: "can't be shown"}[row["effect_proved"]]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def with_ladders(text: str) -> str:
    """The README with the table of every ladder it links made anew."""
    return LADDER.sub(lambda match: match[0].replace(match[2], ladder_table(ROOT / match[1])), text)


def main() -> None:
    """Write verdict.json of every run and ladder.json of every ladder under results/, and the README's block and tables."""
    for recipe in sorted((ROOT / "results").rglob("recipe.yaml")):
        write_verdict(recipe.parent)
    for plan in sorted((ROOT / "results").rglob(PLAN)):
        remake(plan.parent)
    linked = Path(re.search(r"\[the run\]\((results/[^)]+)\)", README)[1])
    at = README.index("[the run]")
    text = README[:at] + re.sub(
        r"```\n.*?```", lambda _: f"```\n{shown(ROOT / linked)}\n```", README[at:], count=1, flags=re.S
    )
    text = re.sub(r"^\| boots \|.*?\n\n", lambda _: f"{power_table()}\n", text, count=1, flags=re.S | re.M)
    (ROOT / "README.md").write_text(with_ladders(text))


if __name__ == "__main__":
    main()
