"""Parquet files of entity and feature tables: that they have what a join needs, and their rows in pieces.

Keys and times come out as the join compares them, however the files store them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isinf
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow
import pyarrow.parquet as parquet
from pyarrow import types

from services.ingestion.features.join import CREATED, EVENT, ROW, TIME
from services.kit.bus import PoisonMessage

#: What reading a damaged file raises.
DAMAGED = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
#: Ticks of a second: times are compared in microseconds, or in nanoseconds where a column has them.
MICRO, NANO = 10**6, 10**9
_TICKS = {"s": 1, "ms": 1000, "us": MICRO, "ns": NANO}
_INT64 = 2**63 - 1
#: Rows that are read at a time, and about their most bytes.
BATCH_ROWS, BATCH_BYTES = 65_536, 64 * 2**20


@dataclass(frozen=True, slots=True)
class TableFile:
    """One readable Parquet file of a table."""

    #: What it is part of, for messages: ``feature table 'clicks'``.
    table: str
    uri: str
    path: Path
    rows: int
    #: Bytes of a row, about, before compression.
    row_bytes: int
    schema: Any

    def type_of(self, column: str, setting: str) -> Any:
        """Return the column's Arrow type. Raises ``PoisonMessage`` if the file has no such column, or two."""
        places = self.schema.get_all_field_indices(column)
        if len(places) == 1:
            return self.schema.field(places[0]).type
        if places:
            raise PoisonMessage(f"{self} has {len(places)} columns {column!r}: give each its own name")
        raise PoisonMessage(
            f"{self} has no column {column!r} ({setting}); it has {', '.join(self.schema.names) or 'none'}"
        )

    def __str__(self) -> str:
        return f"{self.table} ({self.uri})"


def open_table(table: str, uri: str, path: Path) -> TableFile:
    """Read the file's footer. Raises one of ``DAMAGED``."""
    with parquet.ParquetFile(path) as file:
        found = file.metadata
        size_bytes = sum(found.row_group(number).total_byte_size for number in range(found.num_row_groups))
        row_bytes = size_bytes // max(found.num_rows, 1)
        return TableFile(table, uri, path, found.num_rows, row_bytes, file.schema_arrow.remove_metadata())


def batches(file: TableFile, columns: Sequence[str] | None) -> Generator[Any, None, None]:
    """Yield the file's rows in order, in batches of bounded size. Raises one of ``DAMAGED``."""
    count = 0
    at_a_time = min(max(BATCH_BYTES // max(file.row_bytes, 1), 256), BATCH_ROWS)
    with parquet.ParquetFile(file.path) as opened:
        for batch in opened.iter_batches(at_a_time, columns=columns):
            count += batch.num_rows
            # A name with a dot may select more columns than it names.
            yield batch if columns is None else batch.select(columns)
    if count != file.rows:
        raise OSError(f"{count:,} rows, while its footer has {file.rows:,}")


# -- times ------------------------------------------------------------------------


def check_time(file: TableFile, column: str, setting: str) -> None:
    """Raise ``PoisonMessage`` unless the column holds times whose unit is beyond doubt."""
    found = file.type_of(column, setting)
    if not (types.is_timestamp(found) or types.is_date(found)):
        raise PoisonMessage(
            f"column {column!r} of {file} is {found}, not a time ({setting}): write it as a timestamp (of UTC, "
            "where it has no time zone) or a date"
        )


def ticks_per_s(columns: Iterable[tuple[TableFile, str]]) -> int:
    """Return the coarsest tick rate that represents all these time columns exactly."""
    return max((_TICKS[_unit(file.schema.field(column).type)[0]] for file, column in columns), default=MICRO)


def time_ticks(array: Any, per_s: int) -> pl.Series:
    """Return times as ticks since 1970 in UTC, clamped to 64 bits."""
    unit, seconds = _unit(array.type)
    whole = array.cast(pyarrow.int32()).cast(pyarrow.int64()) if types.is_date32(array.type) else array
    factor = per_s * seconds // _TICKS[unit]
    most = _INT64 // factor
    return _series(whole.cast(pyarrow.int64())).clip(-most, most) * factor


def duration_ticks(seconds: float | None, per_s: int) -> int | None:
    """Return a duration in whole ticks."""
    return None if seconds is None or isinf(seconds) else int(Decimal(str(seconds)) * per_s)


def _unit(found: Any) -> tuple[str, int]:
    """Return the unit of a time type, and its multiple."""
    if types.is_date32(found):
        return "s", 86_400
    return ("ms", 1) if types.is_date64(found) else (found.unit, 1)


# -- keys ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """One column of a key, and how values of all files are made comparable."""

    kind: str
    #: None: bytes.
    integer: Any = None

    def values(self, array: Any) -> pl.Series:
        if self.kind == "integer":
            return _series(array).cast(self.integer)
        if self.kind == "text":
            # As bytes: equal text has equal bytes.
            return _series(array.cast(pyarrow.large_string()).cast(pyarrow.large_binary()))
        if self.kind == "binary":
            return _series(array.cast(pyarrow.large_binary()))
        return _series(array)


def one_key(columns: Sequence[tuple[TableFile, str, str]]) -> Key:
    """Return how to compare these columns (file, name, setting), the entity table's first. Raises ``PoisonMessage``."""
    first, name, setting = columns[0]
    kind = _kind(first, name, setting)
    for file, other, other_setting in columns[1:]:
        if (found := _kind(file, other, other_setting)) != kind:
            raise PoisonMessage(
                f"key {name!r} of {first} is {first.type_of(name, setting)} and key {other!r} of {file} is "
                f"{file.type_of(other, other_setting)}: write both as one type, {kind} or {found}"
            )
    if kind != "integer":
        return Key(kind)
    found_types = [file.type_of(name, setting) for file, name, setting in columns]
    if not any(types.is_uint64(found) for found in found_types):
        return Key(kind, pl.Int64)
    return Key(kind, pl.UInt64 if all(types.is_unsigned_integer(found) for found in found_types) else pl.Int128)


def _kind(file: TableFile, column: str, setting: str) -> str:
    found = file.type_of(column, setting)
    value = found.value_type if types.is_dictionary(found) else found
    if types.is_string(value) or types.is_large_string(value) or types.is_string_view(value):
        return "text"
    if types.is_integer(found):
        return "integer"
    if types.is_binary(found) or types.is_large_binary(found) or types.is_fixed_size_binary(found):
        return "binary"
    if types.is_boolean(found):
        return "boolean"
    if types.is_date32(found):
        return "date"
    hint = " (pandas writes integers with gaps as floats: use Int64)" if types.is_floating(found) else ""
    raise PoisonMessage(
        f"key {column!r} of {file} is {found}, which is not compared exactly{hint}: "
        f"write it as an integer or as text ({setting})"
    )


# -- what the join takes ----------------------------------------------------------------


def entity_rows(batch: Any, names: Sequence[str], keys: Sequence[Key], time: str, per_s: int) -> pl.DataFrame:
    """Return the columns of the key and ``TIME``."""
    return pl.DataFrame([*_keys(batch, names, keys), time_ticks(batch[time], per_s).alias(TIME)])


def feature_rows(
    batch: Any, names: Sequence[str], keys: Sequence[Key], event: str, created: str | None, per_s: int, first: int
) -> pl.DataFrame:
    """Return the columns of the key, ``EVENT``, ``CREATED`` and ``ROW``, which counts from ``first``."""
    happened = time_ticks(batch[event], per_s).alias(EVENT)
    known = happened if created is None else time_ticks(batch[created], per_s)
    rows = pl.int_range(first, first + batch.num_rows, eager=True, dtype=pl.Int64).alias(ROW)
    return pl.DataFrame([*_keys(batch, names, keys), happened, known.alias(CREATED), rows])


def _keys(batch: Any, names: Sequence[str], keys: Sequence[Key]) -> list[pl.Series]:
    return [key.values(batch[name]).alias(f"k{n}") for n, (name, key) in enumerate(zip(names, keys, strict=True))]


def _series(array: Any) -> pl.Series:
    found = pl.from_arrow(array)
    assert isinstance(found, pl.Series)
    return found
