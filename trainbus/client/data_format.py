"""What lies in a local folder of data: its format, and one sample of it as a Task gets it."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

from contracts.data_formats import FORMAT_BY_SUFFIX, find_format_mismatch, recognize_format
from contracts.spec.data import DataSource
from trainbus.client.errors import UsageError

#: Files that are looked at.
MAX_FILES = 10_000
#: Files beside images that give their classes.
LABEL_TABLES = ("labels.csv", "labels.parquet")
#: The largest file that a sample is read from, unless its rows are read one by one.
MAX_SAMPLE_BYTES = 64 * 2**20


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


def read_sample(path: Path, data: DataSource) -> Mapping[str, bytes] | None:
    """Return the fields of one sample, by extension; None if none can be read here."""
    files = (file for file in _files(path) if FORMAT_BY_SUFFIX.get(file.suffix.lower()) == data.format)
    try:
        file = next(files, None)
        if file is None:
            return None
        match data.format:
            case "images" if file.stat().st_size <= MAX_SAMPLE_BYTES:
                return {file.suffix.lower().removeprefix("."): file.read_bytes(), "cls": b"0"}
            case "jsonl":
                with file.open("rb") as lines:
                    line = lines.readline(MAX_SAMPLE_BYTES)
                row = json.loads(line.decode("utf-8-sig"))
                return {"json": json.dumps(row).encode()} if isinstance(row, dict) else None
            case "csv":
                return _read_cells(file)
            case "parquet":
                return _read_row(file)
            case "text":
                with file.open("rb") as content:
                    window = content.read(data.window_length)
                return {"bin": window} if len(window) == data.window_length else None
    except (OSError, ValueError):
        pass  # ingestion puts such a record aside; it is no fault of the Task
    return None


def read_classes(path: Path, data: DataSource) -> list[str]:
    """Return the classes of images in class folders, as ingestion will name them; none where something else does."""
    if data.format != "images" or not path.is_dir() or any((path / table).exists() for table in LABEL_TABLES):
        return []
    images = (file for file in _files(path) if FORMAT_BY_SUFFIX.get(file.suffix.lower()) == "images")
    return sorted({file.parent.name for file in images if file.parent != path})


def _read_cells(file: Path) -> Mapping[str, bytes] | None:
    """Return the first row of a CSV file; numbers are numbers, as where the whole column is."""
    with file.open(newline="", encoding="utf-8-sig") as text:
        delimiter = max(",;\t|", key=text.readline().count)
        text.seek(0)
        try:
            row = next(csv.DictReader(text, delimiter=delimiter), None)
        except csv.Error:
            return None
    return None if row is None or None in row else {"json": json.dumps({k: _parse(v) for k, v in row.items()}).encode()}


def _parse(cell: str | None) -> object:
    for parse in (int, float):
        try:
            return parse(cell or "")
        except ValueError:
            continue
    return {"true": True, "false": False, "": None}.get((cell or "").lower(), cell)


def _read_row(file: Path) -> Mapping[str, bytes] | None:
    """Return the first row of a Parquet file; None if it has values without a form in JSON, or nothing can read it."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        return None
    try:
        with ParquetFile(file) as table:
            rows = next(table.iter_batches(1)).to_pylist()
        return {"json": json.dumps(rows[0]).encode()}
    except (ArrowException, StopIteration, IndexError, TypeError):
        return None


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
