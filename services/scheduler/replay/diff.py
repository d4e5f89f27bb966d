"""Two facts, field by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

#: What stands for a value that one side does not have.
ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class FieldDiff:
    """One field in which a recorded fact is not what was decided. ``field`` is dotted."""

    field: str
    recorded: Any
    replayed: Any


def diff_fields(recorded: BaseModel, replayed: BaseModel) -> list[FieldDiff]:
    """The fields in which two models of one type differ, as they would be written down; none if they are the same.

    What JSON cannot tell apart (a tuple from a list, one NaN from another) is no difference.
    """
    if recorded == replayed:
        return []
    found: list[FieldDiff] = []
    _compare("", recorded.model_dump(mode="json"), replayed.model_dump(mode="json"), found)
    return found


def _compare(field: str, one: Any, other: Any, found: list[FieldDiff]) -> None:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*one, *(name for name in other if name not in one)]:
            inner = f"{field}.{name}" if field else str(name)
            _compare(inner, one.get(name, ABSENT), other.get(name, ABSENT), found)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            _compare(f"{field}.{place}", left, right, found)
    elif one != other or (type(one) is not type(other) and not (_number(one) and _number(other))):
        found.append(FieldDiff(field, one, other))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
