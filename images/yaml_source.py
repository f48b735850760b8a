"""Room images: the one place where YAML is read: safe, with line numbers, duplicate keys refused."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from images.errors import UsageProblem

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
SCALARS = yaml.SafeLoader("")

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Mark:
    """Where a value stands: a file and a line, counted from 1."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{shown(self.file)}:{self.line}"


@dataclass(frozen=True)
class Document:
    """A YAML file as plain values, and the mark of every key and list item in it."""

    file: Path
    data: dict
    marks: dict[KeyPath, Mark]


def shown(file: Path) -> str:
    """A path as people want to read it: below the current folder where possible."""
    try:
        return str(file.relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the current folder is gone
        return str(file)


def read_yaml(file: Path) -> Document:
    """Read one YAML mapping.

    Raises UsageProblem naming file and line for bad YAML, duplicate keys, anchors, tags, more than
    MAX_BYTES bytes or MAX_DEPTH levels, or anything but a mapping at the top.
    """
    text = _read_text(file)
    try:
        _refuse_hostile(file, text)
        node = yaml.compose(text, Loader=yaml.CSafeLoader)
        if not isinstance(node, yaml.MappingNode):
            line = 1 if node is None else node.start_mark.line + 1
            raise UsageProblem(f"{Mark(file, line)}: wanted a mapping of keys to values at the top of the file")
        marks: dict[KeyPath, Mark] = {(): Mark(file, 1)}
        return Document(file, _value(file, node, (), marks), marks)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UsageProblem(f"{Mark(file, mark.line + 1 if mark else 1)}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise UsageProblem(f"{shown(file)}: not valid YAML: {error}") from error


def _read_text(file: Path) -> str:
    try:
        if not file.is_file():
            raise UsageProblem(f"{shown(file)}: can't be read: not a file")
        with file.open("rb") as source:
            data = source.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageProblem(f"{shown(file)}: more than {MAX_BYTES} bytes, the most a recipe file has")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageProblem(f"{shown(file)}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UsageProblem(f"{shown(file)}: can't be read: {error.strerror}") from error


def _refuse_hostile(file: Path, text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        mark = Mark(file, event.start_mark.line + 1)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise UsageProblem(f"{mark}: anchors and aliases aren't allowed; use `extends`, or write the value out")
        if getattr(event, "tag", None):
            raise UsageProblem(f"{mark}: tag {event.tag!r} isn't allowed; write a plain value")
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            depth += 1
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise UsageProblem(f"{mark}: nested deeper than {MAX_DEPTH} levels")


def _value(file: Path, node: yaml.Node, path: KeyPath, marks: dict[KeyPath, Mark]) -> object:
    if isinstance(node, yaml.MappingNode):
        return _mapping(file, node, path, marks)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            marks[(*path, index)] = Mark(file, item.start_mark.line + 1)
        return [_value(file, item, (*path, index), marks) for index, item in enumerate(node.value)]
    return _scalar(file, node)


def _scalar(file: Path, node: yaml.Node) -> object:
    """A plain value; dates stay the text they are, since no key of ours is a date."""
    if node.tag == "tag:yaml.org,2002:timestamp":
        return node.value
    try:
        return SCALARS.construct_object(node, deep=True)
    except (ValueError, OverflowError) as error:
        raise UsageProblem(
            f"{Mark(file, node.start_mark.line + 1)}: {node.value[:40]!r} can't be read: {error}"
        ) from error


def _mapping(file: Path, node: yaml.MappingNode, path: KeyPath, marks: dict[KeyPath, Mark]) -> dict:
    mapping: dict = {}
    for key_node, value_node in node.value:
        mark = Mark(file, key_node.start_mark.line + 1)
        key = _scalar(file, key_node)
        if not isinstance(key, str):
            raise UsageProblem(f"{mark}: key {key!r} is read as {type(key).__name__}; write it in quotes")
        if key in mapping:
            raise UsageProblem(f"{mark}: key {key!r} stands twice (first on line {marks[(*path, key)].line})")
        marks[(*path, key)] = mark
        mapping[key] = _value(file, value_node, (*path, key), marks)
    return mapping
