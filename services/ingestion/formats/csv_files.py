"""The rows of CSV files: UTF-8 text with a header. A column whose cells are all numbers, or true and false, has values
of that type; an empty cell is null.

Python's reader is used, as for label tables: it holds one row at a time, and a row's size is bounded.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from contracts.spec.data import DataSource
from services.ingestion.core.keys import row_key, rows_key
from services.ingestion.core.reasons import Code
from services.ingestion.core.records import InvalidRecord, RecordFault, record
from services.ingestion.core.schema import FieldProfile
from services.ingestion.formats.rows import Records

#: A header is split at the one of these that it has most often.
DELIMITERS = ",;\t|"
MAX_HEADER_CHARS = 2**20
#: Whole numbers of more digits may differ as a float.
EXACT_DIGITS = 15
#: 007 is a name, and so is a number that a float would change.
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_ZERO_PADDED = re.compile(r"[+-]?0[0-9]")
_BOOLEANS = {"true": True, "false": False}

Cell = bool | int | float | str | None
Parse = Callable[[str], Cell]


def records(data: DataSource, path: str, local: Path, profile: FieldProfile) -> Records:
    """Yield the rows of one file; ``profile`` counts the fields of all of them.

    The file is read twice: first for the types of its columns.
    """
    prefix, number = rows_key(path), 0
    try:
        columns, parsers = _read_types(local, data.checks.max_record_bytes)
    except RecordFault as fault:
        yield InvalidRecord(fault.code, fault.detail, whole_object=True)
        return
    with _open(local) as file:
        rows = _rows(file, data.checks.max_record_bytes)
        next(rows)
        for row in rows:
            try:
                made = record(_parse_row(columns, parsers, row), row_key(prefix, number), number, data.label_field)
                profile.add(made.value or {})
                yield made
            except RecordFault as fault:
                yield InvalidRecord(fault.code, fault.detail, number)
            number += 1


def _parse_row(columns: list[str], parsers: list[Parse], row: list[str] | RecordFault) -> dict[str, Cell]:
    if isinstance(row, RecordFault):
        raise row
    if len(row) != len(columns):
        raise RecordFault("ragged", f"{len(row)} cells, the header has {len(columns)}")
    if any("\udc80" <= character <= "\udcff" for cell in row for character in cell if not character.isascii()):
        raise RecordFault("invalid_utf8", "a cell is not UTF-8")
    return {name: parse(cell) if cell else None for name, parse, cell in zip(columns, parsers, row, strict=True)}


def _read_types(local: Path, max_row_bytes: int) -> tuple[list[str], list[Parse]]:
    """Return the columns and how their cells are read.

    Raises:
        RecordFault: the header cannot name columns.
    """
    with _open(local) as file:
        rows = _rows(file, max_row_bytes)
        columns = next(rows, [])
        if isinstance(columns, RecordFault):
            raise columns
        if not all(columns) or not columns:
            raise RecordFault("broken_csv", "its first line must name each column: a column has no name")
        if twice := next((name for name in columns if columns.count(name) > 1), None):
            raise RecordFault("broken_csv", f"two columns are named {twice!r}")
        possible: list[list[Parse]] = [[_integer, _number, _boolean] for _ in columns]
        for row in rows:
            if not isinstance(row, RecordFault) and len(row) == len(columns):
                for parsers, cell in zip(possible, row, strict=True):
                    if cell and parsers:
                        parsers[:] = [parse for parse in parsers if parse(cell) is not None]
    return columns, [(parsers or [_text])[0] for parsers in possible]


def _rows(file: TextIO, max_row_bytes: int) -> Iterator[list[str] | RecordFault]:
    """Yield the header and the rows. After a row that cannot be read the next line begins a new one."""
    header = file.readline(MAX_HEADER_CHARS)
    delimiter = max(DELIMITERS, key=header.count)
    file.seek(0)
    csv.field_size_limit(max_row_bytes)
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            code: Code = "oversized" if "field larger" in str(error) else "broken_csv"
            yield RecordFault(code, f"line {reader.line_num}: {error}")
            continue
        if sum(map(len, row)) > max_row_bytes:
            yield RecordFault("oversized", f"a row of more than {max_row_bytes:,} characters")
        elif row:
            yield row


def _open(local: Path) -> TextIO:
    return local.open(newline="", encoding="utf-8-sig", errors="surrogateescape")


def _integer(cell: str) -> int | None:
    return int(cell) if _INTEGER.fullmatch(cell) else None


def _number(cell: str) -> float | None:
    if not _NUMBER.fullmatch(cell) or _ZERO_PADDED.match(cell):
        return None
    is_identifier = len(cell) > EXACT_DIGITS and cell.lstrip("+-").isdigit()
    return None if is_identifier else float(cell)


def _boolean(cell: str) -> bool | None:
    return _BOOLEANS.get(cell.lower())


def _text(cell: str) -> str:
    return cell
