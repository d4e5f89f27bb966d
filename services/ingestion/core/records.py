"""One record: sound, with its content as a shard will hold it, or broken, with the reason."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NoReturn
from uuid import UUID

from contracts.datasets import canonical_json

MAX_RECORD_BYTES = 16 * 2**20
#: A longer label is a text to learn from, not the name of a class.
MAX_LABEL_CHARS = 200
#: Longest detail that goes into the quarantine and into events.
MAX_DETAIL_CHARS = 300


@dataclass(frozen=True, slots=True)
class Sound:
    """A record to be kept. ``content`` is None if it stays where it is."""

    key: str
    ext: str
    content: bytes | None
    size: int
    sha256: str
    label: str | None = None
    offset: int | None = None
    #: A label that is a measured value, or a text, rather than a class.
    continuous: bool = False


@dataclass(frozen=True, slots=True)
class Broken:
    """A record to be set aside, and why. ``code`` comes from a small fixed set."""

    code: str
    detail: str
    offset: int | None = None
    sha256: str | None = None
    #: The object as a whole cannot be used, however many records it was meant to hold.
    whole_object: bool = False


class Fault(ValueError):
    """A record is broken."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail[:MAX_DETAIL_CHARS]


def json_line(line: bytes, key: str, offset: int, label_field: str | None) -> Sound | Broken:
    """Judge one line of a jsonl file."""
    digest = hashlib.sha256(line).hexdigest()
    try:
        return record(_parsed(line), key, offset, label_field)
    except Fault as fault:
        return Broken(fault.code, fault.detail, offset, digest)


def table_row(row: Mapping[str, Any], key: str, number: int, label_field: str | None) -> Sound | Broken:
    """Judge one row of a table. Dates become ISO 8601, decimals strings, bytes base64."""
    try:
        return record(_plain(row), key, number, label_field)
    except Fault as fault:
        return Broken(fault.code, fault.detail, number)


def record(value: Any, key: str, offset: int, label_field: str | None) -> Sound:
    """The canonical form of a record; raises ``Fault``."""
    if not isinstance(value, dict):
        raise Fault("not_an_object", f"the record is a JSON {type(value).__name__}, not an object")
    label, continuous = _label(value, label_field)
    try:
        content = canonical_json(value)
    except UnicodeEncodeError as error:
        raise Fault("invalid_utf8", f"text that is no Unicode: {error.reason}") from error
    except ValueError as error:
        raise Fault("nan", "a number is NaN or infinite: leave the field out or use null") from error
    if len(content) > MAX_RECORD_BYTES:
        raise Fault("oversized", f"{len(content):,} bytes, more than {MAX_RECORD_BYTES:,}")
    return Sound(key, "json", content, len(content), hashlib.sha256(content).hexdigest(), label, offset, continuous)


def _parsed(line: bytes) -> Any:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise Fault("invalid_utf8", f"byte {error.start} of the line is not UTF-8") from error
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except Fault:
        raise
    except RecursionError as error:
        raise Fault("invalid_json", "nested too deeply") from error
    except ValueError as error:
        raise Fault("invalid_json", str(error)) from error


def _refuse_constant(name: str) -> NoReturn:
    raise Fault("nan", f"{name} is no JSON number: leave the field out or use null")


def _label(value: Mapping[str, Any], field: str | None) -> tuple[str | None, bool]:
    if field is None:
        return None, False
    label = value.get(field)
    if label is None:
        raise Fault("missing_label", f"no field {field!r} (data.label_field)")
    if isinstance(label, float):
        return None, True
    if isinstance(label, bool | int | str):
        name = str(label)
        return (name, False) if len(name) <= MAX_LABEL_CHARS else (None, True)
    raise Fault("missing_label", f"field {field!r} is a {type(label).__name__}, not text or a number")


def _plain(value: Any) -> Any:
    """``value`` in JSON's types."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal | UUID):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise Fault("unsupported_type", f"a {type(value).__name__} has no JSON form")
