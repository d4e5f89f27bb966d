"""One record: valid, with its content as in a shard, or invalid, with the reason."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NoReturn
from uuid import UUID

from contracts.datasets import canonical_json
from services.ingestion.core.reasons import Code

MAX_RECORD_BYTES = 16 * 2**20
#: A longer label is a text to learn from, not the name of a class.
MAX_LABEL_CHARS = 200
#: Longest detail that goes into the quarantine and into events.
MAX_DETAIL_CHARS = 300


@dataclass(frozen=True, slots=True)
class ValidRecord:
    """A record that is accepted. ``content`` is None if it stays in the source."""

    key: str
    ext: str
    content: bytes | None
    size: int
    sha256: str
    label: str | None = None
    offset: int | None = None
    #: A label that is a measured value, or a text, rather than a class.
    continuous: bool = False
    #: Extension and size of each of its files, where it has several: their contents lie one after the other.
    fields: tuple[tuple[str, int], ...] | None = None
    #: Its fields by name, for checks: the row, or the line of the table of labels.
    value: Mapping[str, Any] | None = None
    #: Its split key and its numbers for the statistics, where the fields above do not suffice.
    split_key: str = ""
    measures: bytes = b""


@dataclass(frozen=True, slots=True)
class InvalidRecord:
    """A rejected record, and why."""

    code: Code
    detail: str
    offset: int | None = None
    sha256: str | None = None
    #: Whether the object as a whole cannot be used, with all its records.
    whole_object: bool = False
    #: Its label, if known.
    label: str | None = None


class RecordFault(ValueError):
    """A record is broken."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(detail)
        self.code: Code = code
        self.detail = detail[:MAX_DETAIL_CHARS]


def record_of_files(
    key: str,
    files: Mapping[str, bytes],
    label: str | None,
    offset: int | None,
    value: Mapping[str, Any] | None,
    continuous: bool = False,
) -> ValidRecord:
    """Return a record of one or more files, given by extension."""
    exts = sorted(files)
    content = b"".join(files[ext] for ext in exts)
    fields = tuple((ext, len(files[ext])) for ext in exts) if len(exts) > 1 else None
    digest = hashlib.sha256(content).hexdigest()
    return ValidRecord(key, exts[0], content, len(content), digest, label, offset, continuous, fields, value)


def parse_json_line(
    line: bytes, key: str, offset: int, label_field: str | None, look: Callable[[Mapping[str, Any]], None] | None = None
) -> ValidRecord | InvalidRecord:
    """Validate one line of a jsonl file. ``look`` is called with each object, even an invalid one."""
    try:
        value = parse_json(line)
        if look is not None and isinstance(value, dict):
            look(value)
        return record(value, key, offset, label_field)
    except RecordFault as fault:
        return InvalidRecord(fault.code, fault.detail, offset, hashlib.sha256(line).hexdigest())


def record(value: Any, key: str, offset: int, label_field: str | None) -> ValidRecord:
    """Return the canonical form of a record; raises ``RecordFault``."""
    if not isinstance(value, dict):
        raise RecordFault("not_an_object", f"the record is a JSON {type(value).__name__}, not an object")
    label, continuous = find_label(value, label_field)
    content = encode_json(value)
    digest = hashlib.sha256(content).hexdigest()
    return ValidRecord(key, "json", content, len(content), digest, label, offset, continuous, value=value)


def encode_json(value: Any) -> bytes:
    """Return canonical JSON; raises ``RecordFault``."""
    try:
        return canonical_json(value)
    except UnicodeEncodeError as error:
        raise RecordFault("invalid_utf8", f"text that is no Unicode: {error.reason}") from error
    except RecursionError as error:
        raise RecordFault("invalid_json", "nested too deeply") from error
    except ValueError as error:
        raise RecordFault("nan", "a number is NaN or infinite: leave the field out or use null") from error


def parse_json(line: bytes) -> Any:
    """Read JSON; raises ``RecordFault``."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise RecordFault("invalid_utf8", f"byte {error.start} is not UTF-8") from error
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecordFault:
        raise
    except RecursionError as error:
        raise RecordFault("invalid_json", "nested too deeply") from error
    except ValueError as error:
        raise RecordFault("invalid_json", str(error)) from error


def _refuse_constant(name: str) -> NoReturn:
    raise RecordFault("nan", f"{name} is no JSON number: leave the field out or use null")


def find_label(value: Mapping[str, Any], field: str | None) -> tuple[str | None, bool]:
    """Return the label in ``field``, and whether it is a value or text instead of a class; raises ``RecordFault``."""
    if field is None:
        return None, False
    label = value.get(field)
    if label is None:
        raise RecordFault("missing_label", f"no field {field!r} (data.label_field)")
    if isinstance(label, float):
        return None, True
    if isinstance(label, bool | int | str):
        name = _text(label)
        return (name, False) if len(name) <= MAX_LABEL_CHARS else (None, True)
    raise RecordFault("missing_label", f"field {field!r} is a {type(label).__name__}, not text or a number")


def _text(label: bool | int | str) -> str:
    try:
        return str(label)
    except ValueError as error:  # Python prints no number of more than 4300 digits
        raise RecordFault("invalid_label", str(error)) from error


def plain(value: Any) -> Any:
    """Return ``value`` in JSON's types; raises ``RecordFault``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal | UUID):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise RecordFault("unsupported_type", f"a {type(value).__name__} has no JSON form")
