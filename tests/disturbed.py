"""What other work on a shared machine does to a measurement, told apart from what a test is about.

A machine that stands still for seconds voids what was timed, and nothing that was counted: the guards say which.
"""

from collections.abc import Callable

from bench.ladder.exits import incomplete
from bench.verdict import EXIT_CODES

LOST = "whose timing counts"


def failed(verdict: dict, scope: str) -> set[str]:
    """The guards that fail in a verdict and void what `scope` names: "timing", or the whole "run"."""
    return {guard["id"] for guard in verdict["guards"] if guard["ok"] is False and guard["scope"] == scope}


def until_timed(measure: Callable[[], dict], tries: int = 3) -> dict:
    """The verdict of the first measurement whose timing counts, or of the last: other causes are never asked again."""
    for _ in range(tries):
        verdict = measure()
        if failed(verdict, "run") or not failed(verdict, "timing"):
            break
    return verdict


def ended_well(code: int, table: dict) -> bool:
    """Whether a ladder ended as an undisturbed one does: exit code 0, or 7 for lost timing and nothing else.

    What a pause takes is some boots' timing: where every rung lost it, the fault is another.
    """
    lost = [reason for reason in incomplete(table) if reason.endswith(LOST)]
    timed = [row for row in table["rungs"] if row.get("output_tok_s") is not None]
    one_boot = len(table["rungs"]) == 1 and len(table["rungs"][0]["boots"]) == 1
    return code == (EXIT_CODES["INVALID"] if lost else 0) and lost == incomplete(table) and bool(timed or one_boot)


def sound_runs(row: dict) -> list[str]:
    """The runs of a rung whose answers and counts are sound, whether their timing counts or not."""
    return [boot["run"] for boot in row["boots"] if boot["sound"]]
