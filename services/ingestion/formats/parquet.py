"""The rows of Parquet files, in JSON's types."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from contracts.spec.data import DataSource
from services.ingestion.core.keys import row_key, rows_key
from services.ingestion.core.records import InvalidRecord, RecordFault, ValidRecord, plain, record
from services.ingestion.core.schema import Shape
from services.ingestion.formats.isolated_reader import ArrowBatch, IsolatedParquetReader

#: Called with the columns of a file, before its rows come.
Note = Callable[[Shape], None]


def records(
    data: DataSource,
    path: str,
    local: Path,
    unpacker: IsolatedParquetReader,
    note: Note,
) -> Generator[ValidRecord | InvalidRecord]:
    """Yield the rows of one file. Dates become ISO 8601, decimals strings, bytes base64."""
    prefix, number = rows_key(path), 0
    with closing(unpacker.read(local)) as read:
        for place, found in enumerate(read):
            if isinstance(found, InvalidRecord):
                yield replace(found, offset=number)
                return
            if place == 0:
                note({field.name: _type_of(field) for field in found.table.schema})
            for row in python_rows(found):
                try:
                    if isinstance(row, RecordFault):
                        raise row
                    made: ValidRecord | InvalidRecord = record(row, row_key(prefix, number), number, data.label_field)
                except RecordFault as fault:
                    made = InvalidRecord(fault.code, fault.detail, number)
                yield made
                number += 1


def _type_of(column: Any) -> str:
    return f"{column.type}{'' if column.nullable else ' not null'}"


def python_rows(found: ArrowBatch) -> Iterator[Mapping[str, Any] | RecordFault]:
    """Yield the rows in JSON's types, or the fault of a row that has a value without one."""
    rows = _plain_rows(found.table)
    for number in range(found.table.num_rows + len(found.faults)):
        yield found.faults[number] if number in found.faults else next(rows)


def _plain_rows(table: Any) -> Iterator[Mapping[str, Any] | RecordFault]:
    names = [name for name, kind in zip(table.schema.names, table.schema.types, strict=True) if not _native(kind)]
    try:
        rows = table.to_pylist()
    except Exception:  # a date that Python has not: the others are sound
        rows = [_one(table.slice(i, 1)) for i in range(table.num_rows)]
    for row in rows:
        if isinstance(row, RecordFault) or not names:
            yield row
            continue
        try:
            for name in names:
                row[name] = plain(row[name])
            yield row
        except RecordFault as fault:
            yield fault


def _one(row: Any) -> Any:
    try:
        return row.to_pylist()[0]
    except Exception as error:
        return RecordFault("unsupported_type", f"{type(error).__name__}: {error}")


def _native(kind: Any) -> bool:
    """Whether Python's value of this type is JSON's."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _native(kind.value_type)
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_null(kind)
    )
