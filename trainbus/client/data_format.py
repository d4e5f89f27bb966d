"""What lies in a local folder of data: its format, and one sample of it as a Task gets it."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from contracts.spec.data import DataSource
from trainbus.client.errors import UsageError

#: By the ending of a file's name: the format that it speaks for. Other files speak for none.
FORMAT_BY_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".tar": "webdataset",
    ".tgz": "webdataset",
    ".mds": "mds",
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"), "images"),
}
#: Files that describe others of a folder, and the format that they speak for.
DESCRIPTIONS = {
    "labels.csv": "images",
    "labels.parquet": "images",
    "manifest.jsonl": "binary",
    "manifest.csv": "binary",
    "index.json": "mds",
}
#: Files that are looked at.
MAX_FILES = 10_000
#: The largest file that a sample is read from, unless its rows are read one by one.
MAX_SAMPLE_BYTES = 64 * 2**20


def recognize_format(names: Iterable[str]) -> str | None:
    """Return the format of files by their names; None if none speaks for one.

    Raises:
        ValueError: they are of two formats.
    """
    examples: dict[str, str] = {}
    described = ""
    for name in names:
        last = name.rsplit("/", 1)[-1].lower()
        if last.startswith("."):
            continue
        if (format_ := DESCRIPTIONS.get(last)) is not None:
            described = described or format_
        elif (format_ := FORMAT_BY_SUFFIX.get(os.path.splitext(last)[1])) is not None:
            examples.setdefault(format_, name)
    if described == "binary" or (described and not examples):
        return described
    if described:
        examples.setdefault(described, "its description")
    if len(examples) > 1:
        (one, first), (other, second) = list(examples.items())[:2]
        raise ValueError(
            f"both {one} ({first}) and {other} ({second}) are there: keep one kind in a folder, or say which with "
            f"--format {one}; the other files are then put aside"
        )
    return next(iter(examples), None)


def find_local_format(path: Path) -> str | None:
    """Return the format of a local file or folder by the names of its files; None if none speaks for one.

    Raises:
        UsageError: it has files of two formats.
    """
    try:
        return recognize_format(str(file.relative_to(path)) if path.is_dir() else file.name for file in _files(path))
    except ValueError as error:
        raise UsageError(f"data {path}: {error}") from None


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
