"""Room bench: a ladder's exit code: the worst of its rungs, by the codes of a verdict. Pure."""

from bench.verdict import EXIT_CODES, WORST_FIRST


def exit_code(table: dict) -> int:
    """INVALID's code unless every rung that applies was measured and its effect proved; else the worst state's.

    Rejected changes of --keep-if-better are no failure: the rule worked.
    """
    here = [row for row in table["rungs"] if not row["applies"]]
    if table["left"] or any(not row.get("state") or row.get("effect_proved") is not True for row in here):
        return EXIT_CODES["INVALID"]
    states = {row["state"] for row in here}
    return EXIT_CODES[next((state for state in WORST_FIRST if state in states), "MEASURED")]
