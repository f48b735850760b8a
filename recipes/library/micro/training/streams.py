"""Room recipes: six small text tasks with exact answers, and endless streams of them, made from a seed.

Every instance is one line: a prompt that says the task, then the answer, which ends with a newline.

    recall the zv=07 river qk=31 stone?qk zv>   ->  qk=31 zv=07
    add 1234+567=                               ->  1801
    copy k3vq>                                  ->  k3vq
    reverse k3vq>                               ->  qv3k
    sort 52 3 87>                               ->  3 52 87
    toolcall Set a timer named amber for 15 minutes.>
                                 ->  {"tool":"set_timer","args":{"minutes":15,"label":"amber"}}

Sizes: recall holds 2 to 64 pairs among filler words, asks for 1 to 4 of them, and is 64 to 2,048
characters long; add takes numbers of up to 4 digits and writes the sum in normal order; copy and reverse
take up to 32 letters and digits; sort takes 2 to 8 numbers below 100.

In a stream, half of the lines follow up on the line before: a sum is added to its second number, a large
sum is cut into numbers to sort, and so on (`_FOLLOW_UP`). So what a greedy model writes on its own goes on
changing and depends on the text before, instead of repeating the most likely line.

Training and held-out instances cannot overlap: a checksum of the prompt decides which side it is on.
One character is one token, so lengths here are token counts too. Standard library only; the same seed
gives the same text on every machine.
"""

import re
import string
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

TRAIN = "train"
HELD_OUT = "held_out"
HELD_OUT_ONE_IN = 10
GRADED_CHARS = 512  # the longest recall (prompt and answer) that held_out() gives unless asked

_LONGEST_RECALL = 2048
_LONG_RECALL_ONE_IN = 16
_FOLLOW_UPS = 0.5  # of the lines of a stream
_ALPHABET = string.ascii_lowercase + string.digits


def _words(text: str) -> list[str]:
    return text.split()


_FILLER = _words(
    "the river stone under light and green over house small walk from paper cloud with again "
    "morning table after water north quiet road seven open garden left winter every other"
)
_PEOPLE = _words("Ana Ben Carla David Elif Farid Grace Hugo Iris Jonas Kira Liam Mona Nils Olga Pavel")
_CITIES = _words("Oslo Lima Cairo Delhi Paris Quito Rabat Seoul Tokyo Vienna Zagreb Boston Dakar Havana")
_DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_LABELS = _words("amber basil cedar delta ember fjord grape hazel ivory jade lemon maple olive pearl")
_UNITS = _words("meters feet miles inches yards grams pounds liters pints cups")
_VERBS = _words("call bring check send find fix keep clean move pack")
_THINGS = _words("boxes papers keys tickets chairs lamps books plates coats maps")


@dataclass(frozen=True)
class Instance:
    """One exercise. The prompt ends where the answer begins; the answer ends with a newline."""

    task: str
    prompt: str
    answer: str


def _log_uniform(rng: Random, low: int, high: int) -> int:
    """A whole number from low to high; each doubling is equally likely."""
    return min(high, int(low * ((high + 1) / low) ** rng.random()))


def _word(rng: Random, length: int) -> str:
    return "".join(rng.choices(_ALPHABET, k=length))


def _recall(rng: Random) -> tuple[str, str]:
    longest = _LONGEST_RECALL if rng.randrange(_LONG_RECALL_ONE_IN) == 0 else GRADED_CHARS
    return recall_of(rng, _log_uniform(rng, 72, longest))


def _riffle(rng: Random, left: list[str], right: list[str]) -> list[str]:
    """Both lists merged at random, each in its own order."""
    sides = [0] * len(left) + [1] * len(right)
    rng.shuffle(sides)
    sources = (iter(left), iter(right))
    return [next(sources[side]) for side in sides]


def recall_of(rng: Random, length: int, pairs: int | None = None) -> tuple[str, str]:
    """Prompt and answer of a recall of up to 8 characters less than `length`; filler fills the room."""
    if pairs is None:
        pairs = _log_uniform(rng, 2, min(64, (length - 45) // len("zv=07 ")))
    queries = min(rng.randint(1, 4), pairs)
    room = length - len("recall ?>") - queries * len("zv zv=07 ") - pairs * len("zv=07 ")
    keys: set[str] = set()
    while len(keys) < pairs:
        keys.add("".join(rng.choices(string.ascii_lowercase, k=2)))
    values = {key: f"{rng.randrange(100):02d}" for key in rng.sample(sorted(keys), pairs)}
    words = 0
    while room > len(_FILLER[-1 - words % len(_FILLER)]):
        room -= len(_FILLER[-1 - words % len(_FILLER)]) + 1
        words += 1
    filler = [_FILLER[-1 - i % len(_FILLER)] for i in range(words)]  # backwards; always ends with the last
    items = _riffle(rng, [f"{key}={value}" for key, value in values.items()], filler[:0:-1]) + filler[:1]
    asked = rng.sample(sorted(keys), queries)
    answer = " ".join(f"{key}={values[key]}" for key in asked)
    return f"recall {' '.join(items)}?{' '.join(asked)}>", answer


def _add(rng: Random) -> tuple[str, str]:
    a, b = (rng.randrange(10 ** rng.randint(1, 4)) for _ in range(2))
    return f"add {a}+{b}=", str(a + b)


def _copy(rng: Random) -> tuple[str, str]:
    word = _word(rng, rng.randint(1, 32))
    return f"copy {word}>", word


def _reverse(rng: Random) -> tuple[str, str]:
    word = _word(rng, rng.randint(1, 32))
    return f"reverse {word}>", word[::-1]


def _sort(rng: Random) -> tuple[str, str]:
    numbers = [rng.randrange(100) for _ in range(rng.randint(2, 8))]
    return f"sort {' '.join(map(str, numbers))}>", " ".join(map(str, sorted(numbers)))


def _timer(rng: Random) -> tuple[str, str]:
    minutes, label = rng.randint(1, 999), rng.choice([rng.choice(_LABELS), _word(rng, 5)])
    said = rng.choice(["Set a timer named {1} for {0} minutes.", "In {0} minutes, ring the timer {1}."])
    call = f'{{"tool":"set_timer","args":{{"minutes":{minutes},"label":"{label}"}}}}'
    return said.format(minutes, label), call


def _weather(rng: Random) -> tuple[str, str]:
    city, day, hour = rng.choice(_CITIES), rng.choice(_DAYS), rng.randrange(24)
    said = rng.choice(["How is the weather in {0} on {1} at {2}?", "On {1} at {2}, will it rain in {0}?"])
    call = f'{{"tool":"get_weather","args":{{"city":"{city}","day":"{day}","hour":{hour}}}}}'
    return said.format(city, day, hour), call


def _convert(rng: Random) -> tuple[str, str]:
    amount, (source, target) = rng.randint(1, 9999), rng.sample(_UNITS, 2)
    said = rng.choice(["Convert {0} {1} to {2}.", "How many {2} are {0} {1}?"])
    call = f'{{"tool":"convert","args":{{"amount":{amount},"from":"{source}","to":"{target}"}}}}'
    return said.format(amount, source, target), call


def _message(rng: Random) -> tuple[str, str]:
    name, text = rng.choice(_PEOPLE), f"{rng.choice(_VERBS)} {rng.randint(2, 99)} {rng.choice(_THINGS)}"
    said = rng.choice(["Tell {0} to {1}.", "Send a message to {0}: {1}."])
    return said.format(name, text), f'{{"tool":"send_message","args":{{"to":"{name}","text":"{text}"}}}}'


_TOOLS = (_timer, _weather, _convert, _message)


def _toolcall(rng: Random) -> tuple[str, str]:
    sentence, call = rng.choice(_TOOLS)(rng)
    return f"toolcall {sentence}>", call


_MAKERS: dict[str, Callable[[Random], tuple[str, str]]] = {
    "recall": _recall,
    "add": _add,
    "copy": _copy,
    "reverse": _reverse,
    "sort": _sort,
    "toolcall": _toolcall,
}
TASKS: tuple[str, ...] = tuple(_MAKERS)
_WEIGHTS = (16, 16, 14, 18, 20, 16)  # how often a fresh line of a stream is of each task


def split_of(prompt: str) -> str:
    """The side of the split that a prompt is on, by its checksum."""
    return HELD_OUT if zlib.crc32(prompt.encode()) % HELD_OUT_ONE_IN == 0 else TRAIN


def instance(task: str, rng: Random, split: str) -> Instance:
    """One instance of a task on one side of the split ("train" or "held_out")."""
    if split not in (TRAIN, HELD_OUT):
        raise ValueError(f"split is {split!r}, not {TRAIN!r} or {HELD_OUT!r}")
    while True:
        prompt, answer = _MAKERS[task](rng)
        if split_of(prompt) == split:
            return Instance(task, prompt, answer + "\n")


def held_out(task: str, seed: int, n: int, longest: int = GRADED_CHARS) -> list[Instance]:
    """The first n different held-out instances by this seed, none longer than `longest` characters."""
    rng = Random(f"{task}/{seed}")  # noqa: S311 (not for secrets)
    found: dict[str, Instance] = {}
    while len(found) < n:
        item = instance(task, rng, HELD_OUT)
        if len(item.prompt) + len(item.answer) <= longest:
            found.setdefault(item.prompt, item)
    return list(found.values())


def _after_add(prompt: str, answer: str) -> tuple[str, str]:
    """Add the sum to the second number; cut up numbers that have become large, and sort the pieces."""
    a, b = prompt.removeprefix("add ").removesuffix("=").split("+")
    if int(answer) < 1000:
        return "add", f"add {b}+{answer}="
    digits = a + b + answer
    return "sort", f"sort {' '.join(str(int(digits[i : i + 2])) for i in range(0, len(digits), 2))}>"


def _after_copy(_prompt: str, answer: str) -> tuple[str, str]:
    """Add the first two digits and the next two; a word with letters names a timer."""
    if answer.isdigit():
        return "add", f"add {int(answer[:2])}+{int(answer[2:4] or 1)}="
    return "toolcall", f"toolcall Set a timer named {answer[:5]} for 15 minutes.>"


def _after_toolcall(_prompt: str, answer: str) -> tuple[str, str]:
    """Double the call's number."""
    number = re.search(r"[: ](\d+)[,} ]", answer)[1]
    return "add", f"add {number}+{number}="


_FOLLOW_UP: dict[str, Callable[[str, str], tuple[str, str]]] = {
    "recall": lambda _, answer: ("copy", f"copy {answer.split()[0].replace('=', '')}>"),
    "add": _after_add,
    "copy": _after_copy,
    "reverse": lambda _, answer: ("copy", f"copy {answer}>"),
    "sort": lambda _, answer: ("reverse", f"reverse {answer.replace(' ', '')}>"),
    "toolcall": _after_toolcall,
}  # for a line's task: the task and prompt that follow up on its prompt and answer


def _solve(task: str, prompt: str) -> str:
    """The answer of a follow-up prompt."""
    content = prompt.removeprefix(task + " ")[:-1]
    if task == "add":
        return str(sum(map(int, content.split("+"))))
    if task == "sort":
        return " ".join(sorted(content.split(), key=int))
    if task == "toolcall":
        return f'{{"tool":"set_timer","args":{{"minutes":15,"label":"{content.split()[4]}"}}}}'
    return content[::-1] if task == "reverse" else content


def instances(seed: int | str, split: str) -> Iterator[Instance]:
    """The lines of a stream, without end; a follow-up from the other side of the split is left out."""
    rng = Random(f"stream/{split}/{seed}")  # noqa: S311 (not for secrets)
    item = instance(rng.choices(TASKS, _WEIGHTS)[0], rng, split)
    while True:
        yield item
        task, prompt = _FOLLOW_UP[item.task](item.prompt, item.answer.strip())
        if rng.random() < _FOLLOW_UPS and split_of(prompt) == split:
            item = Instance(task, prompt, _solve(task, prompt) + "\n")
        else:
            item = instance(rng.choices(TASKS, _WEIGHTS)[0], rng, split)


def stream(seed: int, length: int, split: str) -> str:
    """A text of exactly `length` characters: whole instances one after another, the last one cut off."""
    parts: list[str] = []
    size = 0
    for item in instances(seed, split):
        parts += (item.prompt, item.answer)
        size += len(item.prompt) + len(item.answer)
        if size >= length:
            return "".join(parts)[:length]
    raise AssertionError("instances() never ends")
