"""File tables: ``labels.csv`` or ``.parquet`` of images, ``manifest.csv`` or ``.jsonl`` of binary files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from services.ingestion.catalog import Catalog
from services.ingestion.core.keys import extension
from services.ingestion.core.records import InvalidRecord, RecordFault, encode_json, parse_json
from services.ingestion.formats.isolated_reader import IsolatedParquetReader
from services.ingestion.formats.parquet import python_rows
from services.ingestion.record_intake import RecordIntake
from services.ingestion.sources import Source, SourceObject
from services.kit.bus import PoisonMessage
from services.kit.concurrency import run_in_thread

LABELS = ("labels.csv", "labels.parquet")
MANIFEST = ("manifest.jsonl", "manifest.csv")
FILE, LABEL = "file", "label"
MAX_LINE_BYTES = 2**20

#: A row and its place in the table, or what is wrong with it.
Rows = Iterator[tuple[int, Mapping[str, Any] | RecordFault]]


class FileEntry(NamedTuple):
    """A file's row in the table."""

    label: str
    #: The other columns.
    value: Mapping[str, Any] | None = None


class FileTable(NamedTuple):
    """A table whose rows are in the catalog, by the files that they name."""

    listed: SourceObject
    catalog: Catalog

    def of(self, path: str) -> FileEntry | None:
        """Return the entry of a file, None if it has none. The label is empty if it is ambiguous."""
        found = self.catalog.label(path)
        return FileEntry(*found) if found else None


async def read_file_table(
    names: tuple[str, ...], source: Source, catalog: Catalog, intake: RecordIntake, folder: Path, needs_label: bool
) -> FileTable | None:
    """Read the table that is beside the files; None if there is none.

    Raises:
        PoisonMessage: there are two, or it cannot be read, or it does not name files.
    """
    found = [listed for name in names if (listed := catalog.find(name)) is not None]
    if not found:
        return None
    if len(found) > 1:
        raise PoisonMessage(f"the source has both {' and '.join(listed.path for listed in found)}: leave one of them")
    listed, local = found[0], folder / f"naming-{found[0].path}"
    await source.download(listed, local)
    needed = (FILE, LABEL) if needs_label else (FILE,)
    rows = READERS[extension(listed.path)](source.uri(listed), local, needed)
    await run_in_thread(_add_labels, rows, listed, catalog, intake, needs_label)
    local.unlink()
    return FileTable(listed, catalog)


def _add_labels(rows: Rows, listed: SourceObject, catalog: Catalog, intake: RecordIntake, needs_label: bool) -> None:
    for place, row in rows:
        try:
            if isinstance(row, RecordFault):
                raise row
            file, label, value = _parse_row(row, needs_label)
        except RecordFault as fault:
            intake.reject(listed, InvalidRecord(fault.code, fault.detail, place))
            continue
        known = catalog.add_label(file, label, value)
        if known is None:
            continue
        if needs_label:
            intake.reject(listed, InvalidRecord("duplicate_label", f"{file!r} is labelled twice", place))
        else:
            intake.reject(listed, InvalidRecord("duplicate_file", f"{file!r} is named twice", place))
        if known != label:
            catalog.forget_label(file)


def _parse_row(row: Mapping[str, Any], needs_label: bool) -> tuple[str, str, dict[str, Any]]:
    value = dict(row)
    file = value.pop(FILE, None)
    if not isinstance(file, str) or not file.strip():
        raise RecordFault("missing_file", f"the row names no file (column {FILE!r})")
    label = value.get(LABEL)
    text = "" if label is None or isinstance(label, float | dict | list) else str(label).strip()
    if needs_label:
        value.pop(LABEL, None)
    encode_json([value, file, text])  # it will be written as JSON
    return file.strip(), text, value


def reject_missing_files(table: FileTable, intake: RecordIntake) -> None:
    """Reject the rows whose files do not exist."""
    for file in table.catalog.labels_without_object():
        intake.reject(table.listed, InvalidRecord("missing_file", f"names {file!r}, which does not exist"))


def _csv(uri: str, local: Path, needed: tuple[str, ...]) -> Rows:
    try:
        with local.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            columns = [name.strip() for name in next(rows, [])]
            _check_columns(uri, columns, needed)
            for row in rows:
                if not row:
                    continue
                if len(row) != len(columns):
                    yield rows.line_num, RecordFault("ragged", f"{len(row)} cells, the header has {len(columns)}")
                else:
                    yield rows.line_num, dict(zip(columns, row, strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise PoisonMessage(f"{uri} cannot be read as CSV in UTF-8: {error}") from error


def _jsonl(uri: str, local: Path, _: tuple[str, ...]) -> Rows:
    offset = 0
    with local.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise PoisonMessage(f"{uri} has a line of more than {MAX_LINE_BYTES:,} bytes: write one file a line")
            start, offset = offset, offset + len(line)
            if not line.strip():
                continue
            try:
                parsed = parse_json(line.removeprefix(b"\xef\xbb\xbf"))
                if not isinstance(parsed, dict):
                    raise RecordFault("not_an_object", f"a JSON {type(parsed).__name__}")
                yield start, parsed
            except RecordFault as fault:
                yield start, fault


def _parquet(uri: str, local: Path, needed: tuple[str, ...]) -> Rows:
    number = 0
    with closing(IsolatedParquetReader()) as unpacker, closing(unpacker.read(local)) as read:
        for place, found in enumerate(read):
            if isinstance(found, InvalidRecord):
                raise PoisonMessage(f"{uri} cannot be read as Parquet: {found.detail}")
            if place == 0:
                _check_columns(uri, found.table.schema.names, needed)
            for row in python_rows(found):
                yield number, row
                number += 1


def _check_columns(uri: str, columns: list[str], needed: tuple[str, ...]) -> None:
    if absent := [name for name in needed if name not in columns]:
        raise PoisonMessage(f"{uri} needs the column {absent[0]!r}; it has {columns}")
    if len(set(columns)) < len(columns):
        raise PoisonMessage(f"{uri} has two columns of one name: {columns}")


#: By extension: the reader of a table, which gets its uri, its local copy and the columns that it must have.
READERS: dict[str, Callable[[str, Path, tuple[str, ...]], Rows]] = {"csv": _csv, "jsonl": _jsonl, "parquet": _parquet}
