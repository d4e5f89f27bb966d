"""What is wrong with a request, in plain words: a dotted field and what to change, for every reader of one.

The one place that reads pydantic's errors for users. Its own locations name validators and the members of unions,
and its texts speak of inputs and types.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

_MAX_SHOWN_CHARS = 60
#: By the type of an error: what the value must be; {} are the error's own numbers.
_MUST_BE = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "datetime_from_date_parsing": "a time, for example 2026-01-31T12:00:00Z",
    "datetime_parsing": "a time, for example 2026-01-31T12:00:00Z",
    "datetime_type": "a time, for example 2026-01-31T12:00:00Z",
    "dict_type": "an object with names and values",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object with names and values",
    "model_type": "an object with names and values",
    "string_type": "text",
    "timezone_aware": "a time with its zone, for example 2026-01-31T12:00:00Z",
    "too_long": "a list of at most {max_length} items",
    "too_short": "a list of at least {min_length} items",
    "tuple_type": "a list",
}
#: Members of unions that pydantic names as it would fields.
_TYPE_NAMES = frozenset({"int", "float", "str", "bool", "none", "bytes", "list", "tuple", "dict", "set"})
#: What texts of a pattern look like.
_FORMS = (
    ("s3://[a-z0-9.-]{3,63}/.*|file:", "an address: s3://bucket/prefix, or file:///folder"),
    ("s3://", "an address: s3://bucket/key"),
    ("[0-9a-f]{64}", "64 lower-case hexadecimal digits"),
    ("[A-Za-z0-9_-]{1,128}", "a name of letters, digits, _ and - (128 at most)"),
    (":[A-Za-z_]", "of the form module:Class"),
)


class FieldProblem(BaseModel):
    """One thing wrong with a request, and where. ``field`` is dotted; '' is the request as a whole."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    field: str
    message: str


def describe_problems(error: ValidationError, data: Any, model: type[BaseModel] | None = None) -> list[FieldProblem]:
    """Return each problem once, with its field.

    Args:
        data: what was validated; it shows which parts of a location are fields.
        model: by which; then the field that an unknown one may mean is named.
    """
    located = [(*_locate(detail, data), detail) for detail in error.errors()]
    chosen = _choose_members([(path, members) for path, members, _ in located], [each for *_, each in located])
    problems: dict[str, str] = {}
    for (path, _, detail), is_chosen in zip(located, chosen, strict=True):
        if not is_chosen:
            continue
        field, text = ".".join(map(str, path)), describe_detail(detail, path, model)
        if field in problems and text not in problems[field] and field:
            problems[field] += f"; or {text}"
        elif field in problems and not field:
            problems[field] += f"; {text}" if text not in problems[field] else ""
        else:
            problems[field] = text
    return [FieldProblem(field=field, message=message) for field, message in problems.items()]


def join_problems(problems: Iterable[FieldProblem], separator: str = "; ") -> str:
    """Return problems as one text."""
    return separator.join(f"{each.field}: {each.message}" if each.field else each.message for each in problems)


def _locate(detail: ErrorDetails, data: Any) -> tuple[tuple[str | int, ...], dict[tuple[str | int, ...], str]]:
    """Return the fields of a location, and by field the member of a union that it names there."""
    path: tuple[str | int, ...] = ()
    members: dict[tuple[str | int, ...], str] = {}
    here: Any = data
    for number, part in enumerate(detail["loc"]):
        is_last = number == len(detail["loc"]) - 1
        if isinstance(here, Mapping) and (part in here or (is_last and detail["type"] == "missing")):
            path, here = (*path, part), here.get(part)
        elif isinstance(here, list | tuple) and isinstance(part, int):
            path, here = (*path, part), here[part] if part < len(here) else None
        elif not isinstance(here, Mapping | list | tuple) and _is_field(part):
            path = (*path, part)  # a short form stands for the part: slots: 2
        else:
            members[path] = str(part)
    return path, members


def _is_field(part: str | int) -> bool:
    """Whether a part of a location that the data does not have names a field, and no member of a union."""
    return isinstance(part, str) and part.isidentifier() and part.islower() and part not in _TYPE_NAMES


def _choose_members(
    located: list[tuple[tuple[str | int, ...], dict[tuple[str | int, ...], str]]], details: list[ErrorDetails]
) -> list[bool]:
    """Choose the problems of the member of each union that the value resembles most."""
    misfits: dict[tuple[str | int, ...], dict[str, int]] = {}
    for (_, members), detail in zip(located, details, strict=True):
        for place, member in members.items():
            counts = misfits.setdefault(place, {})
            counts[member] = counts.get(member, 0) + (detail["type"] in ("extra_forbidden", "missing"))
    return [
        all(misfits[place][member] == min(misfits[place].values()) for place, member in members.items())
        for _, members in located
    ]


def describe_detail(
    detail: ErrorDetails, path: tuple[str | int, ...] = (), model: type[BaseModel] | None = None
) -> str:
    """Return what one of pydantic's errors says is to be changed."""
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    match kind:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            similar = _similar_field(path, model)
            hint = f"did you mean {similar}?" if similar else "check its spelling, or remove it"
            return f"unknown field: {hint}"
        case "value_error" | "assertion_error":
            return detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        case "string_pattern_mismatch":
            form = next((form for sign, form in _FORMS if sign in context["pattern"]), "of another form")
            return f"must be {form}, not {_show(value)}"
        case "string_too_short":
            return "must not be empty" if context["min_length"] == 1 else f"is shorter than {context['min_length']}"
        case "string_too_long":
            return f"is longer than {context['max_length']} characters"
    if kind in _MUST_BE:
        return f"must be {_MUST_BE[kind].format(**context)}, not {_show(value)}"
    return f"{detail['msg'].replace('Input should be', 'must be')}, not {_show(value)}"


def _show(value: Any) -> str:
    """Return a value as short text."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def _similar_field(path: tuple[str | int, ...], model: type[BaseModel] | None) -> str:
    """Return the field that the last part of a path may be meant for, dotted; '' if there is none."""
    if model is None or not path:
        return ""
    models = [model]
    for part in path[:-1]:
        if isinstance(part, str):
            models = [found for each in models for found in _models_of_field(each, part)]
    names = {name for each in models for name in each.model_fields}
    similar = difflib.get_close_matches(str(path[-1]), sorted(names), 1, cutoff=0.7)
    if similar:
        return ".".join(map(str, (*path[:-1], similar[0])))
    # A field of a part, written beside the part: epochs for training.epochs.
    for each in models:
        for name in each.model_fields:
            if any(path[-1] in part.model_fields for part in _models_of_field(each, name)):
                return ".".join(map(str, (*path[:-1], name, path[-1])))
    return ""


def _models_of_field(model: type[BaseModel], name: str) -> list[type[BaseModel]]:
    field = model.model_fields.get(name)
    return [] if field is None else list(_models_in(field.annotation))


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
