"""A field that a Task reads and a row does not have: what most often is wrong with a request for a prediction."""

from __future__ import annotations

from collections.abc import Collection


def find_missing_field(error: Exception, present: Collection[str]) -> str | None:
    """Return the name that a ``KeyError`` is about, if it is that of no field that is there."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    return name if isinstance(name, str) and name not in present else None
