"""Room images: the errors made for people; one base for the whole project, one class a cause."""

from difflib import get_close_matches


class Problem(Exception):
    """Something a person can act on. Printed as one message, never as a traceback.

    The message says what was found, what was wanted and what to do. `exit_code` is what the
    command line ends with (contracts: 1 is a fault without a run, 2 is wrong usage).
    """

    exit_code = 1


class UsageProblem(Problem):
    """The command line or a recipe is wrong: nothing was started."""

    exit_code = 2


class SiteProblem(UsageProblem):
    """What this machine's owner said of it can't be read: no recipe is at fault, and none can be used here."""


class EngineProblem(Problem):
    """The engine could not be installed, found, started or kept alive."""


class OutsideProblem(EngineProblem):
    """Something that is neither the engine's nor the recipe's doing: a port somebody took, a full disk.

    What it cut off says nothing about the recipe, and is worth doing again.
    """


class ImageProblem(Problem):
    """An image can't be read, saved, loaded, mirrored or compared, or is not what it must be."""


class BundleProblem(Problem):
    """A bundle can't be made, read or trusted: it is refused whole."""


class RunProblem(Problem):
    """A run folder can't be read."""


def nearest(word: str, choices: list[str], count: int = 3) -> list[str]:
    """Return up to `count` of `choices` that resemble `word`, best first."""
    return get_close_matches(word, choices, n=count, cutoff=0.5)
