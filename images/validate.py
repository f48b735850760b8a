"""Room images: data checked against a schema; every error names file, line, key and the nearest valid one."""

from typing import Any

from pydantic import BaseModel, ValidationError

from images.errors import UsageProblem, nearest
from images.yaml_source import KeyPath, Mark


def validate(model: type[BaseModel], data: dict, marks: dict[KeyPath, Mark]) -> Any:
    """Check `data` against a schema.

    Raises UsageProblem with one line an error: file, line, key, what is wrong, the nearest valid key.
    """
    try:
        return model.model_validate(data)
    except ValidationError as errors:
        lines = [_explain(model, error, marks) for error in errors.errors(include_url=False)]
        raise UsageProblem("\n".join(dict.fromkeys(lines))) from None


def _explain(model: type[BaseModel], error: dict, marks: dict[KeyPath, Mark]) -> str:
    where = tuple(part for part in error["loc"] if not _is_type_tag(part, error["loc"], marks))
    key = ".".join(str(part) for part in where)
    mark = nearest_mark(marks, where)
    if error["type"] == "extra_forbidden":
        close = nearest(str(where[-1]), _valid_keys(model, where[:-1]))
        hint = f"; the nearest valid one is {close[0]!r}" if close else ""
        return f"{mark}: {key}: unknown key{hint}"
    if error["type"] == "missing":
        return f"{mark}: {key}: missing; this key is needed"
    if where and where[-1] == "[key]":
        return f"{mark}: {'.'.join(str(part) for part in where[:-1])}: not a valid name: {_key_hint(str(where[-2]))}"
    return f"{mark}: {key}: {error['msg'][0].lower()}{error['msg'][1:]}, found {error['input']!r}"


def _key_hint(name: str) -> str:
    wanted = name.lstrip("-").replace("_", "-").lower()
    return f"flags are written without leading dashes and with dashes inside, such as {wanted!r}"


def _is_type_tag(part: str | int, loc: tuple, marks: dict[KeyPath, Mark]) -> bool:
    """Whether a location part is pydantic's name for a union member, not a key of ours."""
    return part in {"bool", "int", "float", "str", "list[str]", "dict[str,any]"} and loc not in marks


def _valid_keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    for part in path:
        if isinstance(part, int):
            continue
        field = next((f for n, f in model.model_fields.items() if (f.alias or n) == part), None)
        inner = _inner_model(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_inner_model(argument) for argument in getattr(annotation, "__args__", ()))
    return next((model for model in inner if model), None)


def nearest_mark(marks: dict[KeyPath, Mark], path: tuple) -> Mark:
    """The mark of `path`, or of the nearest key above it."""
    while path not in marks and path:
        path = path[:-1]
    return marks.get(path) or next(iter(marks.values()))
