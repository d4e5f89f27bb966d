"""Lists in pages: each goes on after the last row of the one before it, which an index finds."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from pydantic_core import from_json

Row = TypeVar("Row", bound=Mapping[Any, Any])
#: The integers that every database holds.
MAX_INTEGER = 2**63 - 1


class BadCursor(ValueError):
    """The cursor is none that this interface gave out."""

    def __init__(self) -> None:
        super().__init__("cursor: give a 'next_cursor' of an earlier answer, unchanged")


@dataclass(frozen=True, slots=True)
class Order:
    """By which columns a list is ordered. None of them is null, and together they name one row."""

    columns: tuple[sa.Column[Any], ...]
    #: Names of the columns whose greatest value comes first.
    descending: frozenset[str] = frozenset()

    def clauses(self) -> list[sa.ColumnElement[Any]]:
        """Return what ``ORDER BY`` takes."""
        return [column.desc() if column.name in self.descending else column.asc() for column in self.columns]

    def conditions(self, cursor: str | None) -> list[sa.ColumnElement[bool]]:
        """Return the conditions of the rows that come after a cursor; none without one.

        Raises:
            BadCursor: it is not one of this list.
        """
        if cursor is None:
            return []
        values = self._read(cursor)
        later: list[sa.ColumnElement[bool]] = []
        for at, (column, value) in enumerate(zip(self.columns, values, strict=True)):
            same = (one == other for one, other in zip(self.columns[:at], values[:at], strict=True))
            later.append(sa.and_(*same, column < value if column.name in self.descending else column > value))
        first, value = self.columns[0], values[0]
        # Without this bound, which follows from the rest, the databases would read the list from its beginning.
        return [first <= value if first.name in self.descending else first >= value, sa.or_(*later)]

    def cursor(self, row: Mapping[Any, Any]) -> str:
        """Return the cursor for what comes after a row."""
        values = [row[column.name] for column in self.columns]
        return base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")

    def _read(self, cursor: str) -> list[Any]:
        try:
            values = from_json(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)), allow_inf_nan=False)
        except (binascii.Error, ValueError) as error:
            raise BadCursor from error
        if not isinstance(values, list) or len(values) != len(self.columns):
            raise BadCursor
        for column, value in zip(self.columns, values, strict=True):
            if type(value) is not column.type.python_type or (isinstance(value, int) and abs(value) > MAX_INTEGER):
                raise BadCursor
        return values

    def cut(self, rows: Sequence[Row], limit: int) -> tuple[Sequence[Row], str | None]:
        """Return the first ``limit`` rows, and the cursor of the next page if more were found."""
        return rows[:limit], self.cursor(rows[limit - 1]) if len(rows) > limit else None
