"""Room bench: a suite's answers in a run folder: quality/<suite>.jsonl.gz, in runs of before quality/<suite>.jsonl."""

import io
import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from bench.runfolder import read_bytes, read_packed, write_bytes
from images.errors import RunProblem
from images.packed import gzipped

FOLDER = "quality"
PLAIN, PACKED = ".jsonl", ".jsonl.gz"
MAX_ITEMS = 100_000  # of a run, all its suites together; a recipe asks for 60,000 at most


class Answer(BaseModel):
    """A line of a suite's answers: the keys a verdict needs are checked, others may stand beside them."""

    model_config = ConfigDict(extra="allow", frozen=True)

    id: str
    task: str
    prompt: str
    expected: str
    got: str


def save_answers(run: Path, suite: str, answers: list[dict]) -> None:
    """Write quality/<suite>.jsonl.gz: one item a line; the same answers have the same bytes."""
    lines = "".join(json.dumps(answer, sort_keys=True) + "\n" for answer in answers)
    write_bytes(run / FOLDER / f"{suite}{PACKED}", gzipped(lines.encode()))


def answer_files(run: Path) -> dict[str, Path]:
    """The files of answers in a run, by suite, under either name.

    Raises RunProblem where a suite has both: which of them was measured can't be told.
    """
    found: dict[str, Path] = {}
    for ending in (PLAIN, PACKED):
        for file in (run / FOLDER).glob(f"*{ending}"):
            suite = file.name.removesuffix(ending)
            if suite in found:
                raise RunProblem(
                    f"{run}: {FOLDER}/ holds both {suite}{PLAIN} and {suite}{PACKED}, and a run has one of them: "
                    "take the run from where it was made"
                )
            found[suite] = file
    return {suite: found[suite] for suite in sorted(found)}


def read_suites(files: dict[str, Path], asked: Iterable[str]) -> dict[str, list[dict]]:
    """Read the answers to the suites that a run's recipe asks for, and to no others.

    Raises RunProblem as `read_answers` does, for all suites together.
    """
    read: dict[str, list[dict]] = {}
    for suite in sorted(files.keys() & set(asked)):
        read[suite] = read_answers(files[suite], MAX_ITEMS - sum(len(answers) for answers in read.values()))
    return read


def read_answers(file: Path, most: int = MAX_ITEMS) -> list[dict]:
    """Read a suite's answers. Whether one is exact is decided here, from what was expected and got.

    Raises RunProblem for a file that is none, has more bytes, packed or unpacked, than a run's text file, or would
    bring a run's items over MAX_ITEMS: no more than `most` are left for it.
    """
    if not file.is_file() or file.is_symlink():
        raise RunProblem(f"{file}: not a file")
    data = read_packed(file) if file.name.endswith(PACKED) else read_bytes(file)
    if data.count(b"\n") + (data[-1:] not in {b"", b"\n"}) > most:
        raise RunProblem(
            f"{file}: more items than are read: a run has {MAX_ITEMS:,} at most, all its suites together. "
            "Take the run from where it was made"
        )
    try:
        lines = [Answer.model_validate_json(line) for line in io.BytesIO(data)]
    except ValidationError as errors:
        raise RunProblem(f"{file}: not a suite's answers: {errors.errors(include_url=False)[0]['msg']}") from None
    return [{**answer.model_dump(), "exact": answer.got == answer.expected} for answer in lines]
