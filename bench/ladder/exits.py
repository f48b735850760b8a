"""Room bench: a ladder's exit code: the worst of its rungs, by the codes of a verdict. Pure."""

from bench.verdict import EXIT_CODES, WORST_FIRST


def incomplete(table: dict) -> list[str]:
    """Why a ladder is no whole result yet, one reason each; empty where every rung that applies is measured, proved."""
    here = [row for row in table["rungs"] if not row["applies"]]
    found = [f"{row['rung']} has no boot {_lacks(row)}" for row in here if row.get("output_tok_s") is None]
    found += [f"{row['rung']}'s effect is not proved" for row in here if row.get("effect_proved", True) is not True]
    return found + ([f"{table['left']} boot(s) still to be done"] if table["left"] else [])


def _lacks(row: dict) -> str:
    """What no boot of a rung without a rate has; answers may be sound all the same."""
    return "whose timing counts" if row.get("run") else "that counts"


def exit_code(table: dict) -> int:
    """INVALID's code unless every rung that applies was measured and its effect proved; else the worst state's.

    Rejected changes of --keep-if-better are no failure: the rule worked.
    """
    here = [row for row in table["rungs"] if not row["applies"]]
    if incomplete(table):
        return EXIT_CODES["INVALID"]
    states = {row["state"] for row in here}
    return EXIT_CODES[next((state for state in WORST_FIRST if state in states), "MEASURED")]
