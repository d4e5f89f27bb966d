"""Markdown of the generated pages: tables, and the fields of a pydantic model as one."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_json

#: Where the classes are whose comments (``#:``) document their fields.
OUR_PACKAGES = ("contracts", "services")
FIELD = re.compile(r"    (?P<name>[a-z]\w*): ")
COMMENT = "    #:"
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥", "max_length": "length ≤"}
UNIONS = (Union, types.UnionType)

#: Text of a type: ``type_text``, or one that links what it names.
TypeText = Callable[[Any], str]


def code(text: str) -> str:
    """Return text as code, also inside a table."""
    fence = "``" if "`" in text else "`"
    padding = " " if fence == "``" else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def prose(text: str) -> str:
    """Return text of the code as Markdown: its ``code`` stays, HTML does not begin, and each paragraph is one line."""
    plain = re.sub(r"``([^`]+)``", r"`\1`", inspect.cleandoc(text))
    parts = re.split(r"(`[^`]*`)", plain)
    escaped = [part if part.startswith("`") else re.sub(r"([<*_\[\]])", r"\\\1", part) for part in parts]
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", "".join(escaped)))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a bar in a cell does not end it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    """Return text for a cell; a bar in `code` ends none, and would keep its backslash."""
    parts = re.split(r"(`[^`]*`)", text)
    escaped = (part if part.startswith("`") else part.replace("|", "\\|") for part in parts)
    return "".join(escaped).replace("\n\n", "<br>").replace("\n", " ")


def type_text(annotation: Any) -> str:
    """Return the name of a type as a reader of JSON or of a setting knows it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is type(None):
        return "null"
    if annotation is Ellipsis:
        return "..."
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in UNIONS:
        return " | ".join(type_text(argument) for argument in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(type_text(argument) for argument in arguments)}]"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(str(member.value) for member in annotation)
    return str(getattr(annotation, "__name__", annotation))


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that a type names, from the outside in."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def default_text(field: FieldInfo) -> str:
    """Return a field's default; one that depends on the machine is not a value to print."""
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return (
            code("{}") if field.default_factory is dict else code("[]") if field.default_factory is list else "computed"
        )
    if field.default is PydanticUndefined or isinstance(field.default, BaseModel):
        return ""
    value = str(field.default) if isinstance(field.default, PurePath) else field.default
    return code(to_json(value, fallback=str).decode())


def bounds_text(field: FieldInfo) -> str:
    """Return what a field's value may be, beyond its type."""
    found = (
        f"{sign} {getattr(bound, name):g}"
        for bound in field.metadata
        for name, sign in BOUNDS.items()
        if isinstance(getattr(bound, name, None), int | float)
    )
    return ", ".join(found)


def field_comments(model: type[BaseModel]) -> dict[str, str]:
    """Return the comments of a model's fields: those of its own lines, and of the classes that it extends."""
    comments: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base.__module__.partition(".")[0] not in OUR_PACKAGES:
            continue
        pending: list[str] = []
        for line in inspect.getsource(base).splitlines():
            if line.startswith(COMMENT):
                pending.append(line.removeprefix(COMMENT).strip())
                continue
            if pending and (field := FIELD.match(line)):
                comments[field["name"]] = " ".join(pending)
            pending = []
    return comments


def field_rows(model: type[BaseModel], names: Iterable[str], types_as: TypeText) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type with bounds, default and comment of fields of a model."""
    comments = field_comments(model)
    for name in names:
        field = model.model_fields[name]
        described = ", ".join(filter(None, (types_as(field.annotation), bounds_text(field))))
        yield name, described, default_text(field), prose(comments.get(name) or field.description or "")


def own_doc(model: type[Any]) -> str:
    """Return the docstring that a class has itself, as Markdown."""
    return prose(model.__dict__.get("__doc__") or "")
