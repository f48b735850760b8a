"""Room bench: the quality suites by name: where their items come from."""

from dataclasses import dataclass

from images.errors import UsageProblem
from recipes.library.micro.training.streams import TASKS, held_out


@dataclass(frozen=True)
class Item:
    """One question with one right answer. The answer ends where the engine writes `stop`."""

    id: str
    task: str
    prompt: str
    expected: str


STOP = "\n"


def suite_items(suite: str, seed: int, items: int) -> list[Item]:
    """The items of a suite, `items` a task; the same for the same seed, on every machine.

    Raises UsageProblem for an unknown suite.
    """
    if suite != "micro-tasks":
        raise UsageProblem(f"unknown quality suite {suite!r}; there is: micro-tasks")
    return [
        Item(f"{task}-{number}", task, instance.prompt, instance.answer.removesuffix(STOP))
        for task in TASKS
        for number, instance in enumerate(held_out(task, seed, items))
    ]
