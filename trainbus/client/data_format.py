"""What lies in a local folder of data: its format, and samples of it as a Task gets them."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, takewhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from contracts.data_formats import FORMAT_BY_SUFFIX, find_format_mismatch, recognize_format
from contracts.spec.data import DataSource
from trainbus.client.errors import UsageError

#: Files that are looked at.
MAX_FILES = 10_000
#: Files beside images that give their classes.
LABEL_TABLES = ("labels.csv", "labels.parquet")
#: What samples may have together.
MAX_SAMPLE_BYTES = 64 * 2**20
#: Samples that are read: one is tried, and statistics are estimated from all.
MAX_ROWS, MAX_IMAGES = 100, 8


def find_local_format(path: Path) -> str | None:
    """Return the format of a local file or folder by the names of its files; None if none speaks for one.

    Raises:
        UsageError: it has files of two formats.
    """
    try:
        return recognize_format(_names(path))
    except ValueError as error:
        raise UsageError(f"data {path}: {error}") from None


def check_local_format(source: str, data_format: str) -> None:
    """Check that the files of a source that lies on this machine can be of a format, by their names.

    Raises:
        UsageError: they are of another one, or images without classes.
    """
    if source.startswith("file:"):
        path = Path(unquote(urlsplit(source).path))
        if problem := find_format_mismatch(data_format, _names(path)):
            raise UsageError(f"data {path}: {problem}")


def _names(path: Path) -> Iterator[str]:
    return (str(file.relative_to(path)) if path.is_dir() else file.name for file in _files(path))


def read_samples(path: Path, data: DataSource) -> list[Mapping[str, bytes]]:
    """Return the fields, by extension, of the first samples: of one file of rows, or of several images.

    None are returned where none can be read here: ingestion puts such records aside, they are no fault of a Task.
    """
    files = (file for file in _files(path) if FORMAT_BY_SUFFIX.get(file.suffix.lower()) == data.format)
    if data.format == "images":
        return list(_read_images(islice(files, MAX_IMAGES)))
    file = next(files, None)
    if file is None:
        return []
    try:
        match data.format:
            case "jsonl":
                rows = _read_lines(file)
            case "csv":
                rows = _read_cells(file)
            case "parquet":
                rows = _read_table(file)
            case "text":
                with file.open("rb") as content:
                    window = content.read(data.window_length)
                return [{"bin": window}] if len(window) == data.window_length else []
            case _:
                return []
        return [{"json": json.dumps(row).encode()} for row in rows]
    except (OSError, ValueError, TypeError):  # TypeError: a value without a form in JSON
        return []


def _read_images(files: Iterable[Path]) -> Iterator[Mapping[str, bytes]]:
    """Yield images until one cannot be read, or they are too many bytes."""
    room = MAX_SAMPLE_BYTES
    for file in files:
        try:
            room -= file.stat().st_size
            if room < 0:
                return
            yield {file.suffix.lower().removeprefix("."): file.read_bytes(), "cls": b"0"}
        except OSError:
            return


def _read_lines(file: Path) -> list[Any]:
    """Return the first rows of a JSON-lines file, up to the first line that is no row."""
    room = MAX_SAMPLE_BYTES
    rows: list[Any] = []
    with file.open("rb") as lines:
        while len(rows) < MAX_ROWS and room > 0 and (line := lines.readline(room)):
            room -= len(line)
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError:
                break
            if not isinstance(row, dict):
                break
            rows.append(row)
    return rows


def read_classes(path: Path, data: DataSource) -> list[str]:
    """Return the classes of images in class folders, as ingestion will name them; none where something else does."""
    if data.format != "images" or not path.is_dir() or any((path / table).exists() for table in LABEL_TABLES):
        return []
    images = (file for file in _files(path) if FORMAT_BY_SUFFIX.get(file.suffix.lower()) == "images")
    return sorted({file.parent.name for file in images if file.parent != path})


def _read_cells(file: Path) -> list[Any]:
    """Return the first rows of a CSV file; numbers are numbers, as where the whole column is."""
    with file.open(newline="", encoding="utf-8-sig") as text:
        delimiter = max(",;\t|", key=text.readline().count)
        text.seek(0)
        try:
            found = list(islice(csv.DictReader(text, delimiter=delimiter), MAX_ROWS))
        except csv.Error:
            return []
    whole = takewhile(lambda row: None not in row, found)
    return [{name: _parse(cell) for name, cell in row.items()} for row in whole]


def _parse(cell: str | None) -> object:
    for parse in (int, float):
        try:
            return parse(cell or "")
        except ValueError:
            continue
    return {"true": True, "false": False, "": None}.get((cell or "").lower(), cell)


def _read_table(file: Path) -> list[Any]:
    """Return the first rows of a Parquet file; none if nothing here can read it."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        return []
    try:
        with ParquetFile(file) as table:
            rows: list[Any] = next(table.iter_batches(MAX_ROWS)).to_pylist()
        return rows
    except (ArrowException, StopIteration):
        return []


def _files(path: Path) -> Iterator[Path]:
    """Yield a file, or the first files of a folder in the order of their names."""
    if path.is_file():
        yield path
        return
    yield from islice(_walk(path), MAX_FILES)


def _walk(path: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(path):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
