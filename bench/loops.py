"""Room bench: text that has fallen into a loop. Loops are easy to draft, so they are faster than real text."""

MIN_REPEATS = 4
MIN_LENGTH = 16


def is_loop(text: str) -> bool:
    """Whether the second half of a text is one unit over and over, four times or more.

    An exact test, no likeness: halves under 16 characters are too short to tell.
    """
    half = text[len(text) // 2 :]
    if len(half) < MIN_LENGTH:
        return False
    return any(half[period:] == half[:-period] for period in range(1, len(half) // MIN_REPEATS + 1))
