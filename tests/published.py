"""Judge every published run again and show the README's again: run after a change of the verdict (python -m tests.published)."""

import re
from pathlib import Path

from bench.statistics import power_table
from bench.verdict import write_verdict
from tests.unit.test_readme import README, ROOT, shown


def main() -> None:
    """Write verdict.json of every run under results/, and the README's block and table of boots."""
    for recipe in sorted((ROOT / "results").rglob("recipe.yaml")):
        write_verdict(recipe.parent)
    linked = Path(re.search(r"\[the run\]\((results/[^)]+)\)", README)[1])
    at = README.index("[the run]")
    text = README[:at] + re.sub(
        r"```\n.*?```", lambda _: f"```\n{shown(ROOT / linked)}\n```", README[at:], count=1, flags=re.S
    )
    text = re.sub(r"^\| boots \|.*?\n\n", lambda _: f"{power_table()}\n", text, count=1, flags=re.S | re.M)
    (ROOT / "README.md").write_text(text)


if __name__ == "__main__":
    main()
