"""The request's checks of each record."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from contracts.spec.data import Bounds, DataSource
from services.ingestion.core.records import RecordFault, ValidRecord, encode_json
from services.ingestion.core.times import parse_instant

#: Formats whose records are bytes, without fields.
WITHOUT_FIELDS = ("text", "tokens")
ID_BYTES = 16


def find_impossible_check(data: DataSource) -> str | None:
    """Return why no record of this format can pass the checks, and what to change; None if one can."""
    asked = {
        "checks.ranges": bool(data.checks.ranges),
        "checks.required": bool(data.checks.required),
        "checks.id_field": data.checks.id_field,
        "checks.time_field": data.checks.time_field,
        "checks.labels": bool(data.checks.labels),
        "split.group_field": data.split.group_field,
        "split.time_field": data.split.time_field,
        "data.label_field": data.label_field,
    }
    if data.format in WITHOUT_FIELDS and (names := [name for name, given in asked.items() if given]):
        return f"data.format {data.format!r} has no fields and no labels: leave out {', '.join(names)}"
    if data.checks.labels and data.label_field is None and data.format in ("jsonl", "csv", "parquet"):
        return f"checks.labels needs data.label_field with data.format {data.format!r}: which field is the label?"
    if data.split.stratify and data.label_field is None and data.format in ("jsonl", "csv", "parquet"):
        return f"split.stratify needs data.label_field with data.format {data.format!r}: which field is the label?"
    return None


class RecordChecker:
    """Validates records by ``data.checks``."""

    def __init__(self, data: DataSource) -> None:
        checks = data.checks
        self._labels = frozenset(checks.labels)
        self._ranges = checks.ranges
        self._required = checks.required
        self._id_field, self._time_field = checks.id_field, checks.time_field
        self._not_after_us = parse_instant(checks.not_after) if checks.not_after is not None else None
        self._max_bytes = checks.max_record_bytes

    def check(self, record: ValidRecord, written_us: int) -> bytes | None:
        """Return the hash of the record's id, if records have ids.

        Args:
            record: it can be read and has its label.
            written_us: when its object was written; an event cannot be later.

        Raises:
            RecordFault: it is not what the checks ask for.
        """
        if record.size > self._max_bytes:
            raise RecordFault(
                "oversized", f"{record.size:,} bytes, more than checks.max_record_bytes ({self._max_bytes:,})"
            )
        if self._labels and record.label not in self._labels:
            raise RecordFault("unknown_label", f"label {_short(record.label)} is none of checks.labels")
        value = record.value if record.value is not None else {}
        for name in self._required:
            if _empty(member(value, name)):
                raise RecordFault("missing_field", f"no field {name!r} (checks.required)")
        for name, bounds in self._ranges.items():
            _check_range(name, member(value, name), bounds)
        if self._time_field is not None:
            self._check_time(member(value, self._time_field), written_us)
        return self._id(value)

    def _check_time(self, value: Any, written_us: int) -> None:
        name = self._time_field
        if _empty(value):
            raise RecordFault("null_time", f"no field {name!r} (checks.time_field)")
        try:
            at_us = parse_instant(value)
        except ValueError as error:
            raise RecordFault("invalid_time", f"field {name!r}: {error}") from error
        if self._not_after_us is not None:
            if at_us > self._not_after_us:
                raise RecordFault("future_time", f"field {name!r} is {_short(value)}, after checks.not_after")
        elif at_us > written_us:
            raise RecordFault("future_time", f"field {name!r} is {_short(value)}, after its object was written")

    def _id(self, value: Mapping[str, Any]) -> bytes | None:
        if self._id_field is None:
            return None
        found = member(value, self._id_field)
        if _empty(found):
            raise RecordFault("missing_field", f"no field {self._id_field!r} (checks.id_field)")
        return hashlib.sha256(encode_json(found)).digest()[:ID_BYTES]


def member(value: Mapping[str, Any], name: str) -> Any:
    """Return a field; ``a.b`` also means field b of object a. None if it is missing."""
    if name in value or "." not in name:
        return value.get(name)
    first, _, rest = name.partition(".")
    inner = value.get(first)
    return member(inner, rest) if isinstance(inner, Mapping) else None


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value)


def _check_range(name: str, value: Any, bounds: Bounds) -> None:
    if _empty(value):  # checks.required decides whether a value is needed
        return
    if isinstance(value, str):  # cells of a CSV, decimals
        try:
            number: float = float(value)
        except ValueError:
            raise RecordFault("not_a_number", f"field {name!r} is {_short(value)}") from None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    else:
        raise RecordFault("not_a_number", f"field {name!r} is a {type(value).__name__}")
    if isinstance(number, float) and not math.isfinite(number):
        raise RecordFault("nan", f"field {name!r} is {number}")
    if (bounds.min is not None and number < bounds.min) or (bounds.max is not None and number > bounds.max):
        low, high = ("-inf" if bounds.min is None else bounds.min), ("inf" if bounds.max is None else bounds.max)
        raise RecordFault(
            "out_of_range", f"field {name!r} is {_short(value)}, not within {low} to {high} (checks.ranges)"
        )


def _short(value: Any) -> str:
    try:
        return repr(value)[:80]
    except ValueError:  # Python prints no number of more than 4300 digits
        return "a very long number"
