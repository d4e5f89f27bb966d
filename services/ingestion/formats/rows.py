"""Files of many records (jsonl, parquet, text), read as streams from a local copy."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

from contracts.events.train import DataSource
from services.ingestion.core.keys import extension, row_key, rows_key
from services.ingestion.core.records import MAX_RECORD_BYTES, Broken, Sound, json_line, table_row

EXTENSIONS = {"jsonl": {"jsonl", "ndjson", "json"}, "parquet": {"parquet", "pq"}}
ROWS_A_BATCH = 1000

Records = Generator[Sound | Broken, None, None]


class RowReader:
    """Reads the files of one source, in order; remembers the schema that the first table sets."""

    def __init__(self, data: DataSource) -> None:
        self._data = data
        self._schema: Any = None

    def refuse_unread(self, path: str, size: int) -> Broken | None:
        """What can be said about a file from the listing alone."""
        known = EXTENSIONS.get(self._data.format)
        if known is not None and extension(path) not in known:
            detail = f"extension {extension(path)!r} is none of {', '.join(sorted(known))}"
            return Broken("unknown_extension", detail, whole_object=True)
        if size == 0 and self._data.format != "text":
            return Broken("empty", "the file has no bytes", whole_object=True)
        return None

    def records(self, path: str, local: Path) -> Records:
        """Every record of the file, in its order."""
        prefix = rows_key(path)
        if self._data.format == "jsonl":
            return self._lines(prefix, local)
        if self._data.format == "parquet":
            return self._rows(prefix, local)
        return self._windows(prefix, local)

    def _lines(self, prefix: str, local: Path) -> Records:
        number = offset = 0
        with local.open("rb") as file:
            while line := file.readline(MAX_RECORD_BYTES + 1):
                start, offset = offset, offset + len(line)
                if len(line) > MAX_RECORD_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_RECORD_BYTES)
                        offset += len(line)
                    yield Broken("oversized", f"a line of {offset - start:,} bytes", start)
                elif line.strip():
                    content = line.removesuffix(b"\n").removesuffix(b"\r")
                    yield json_line(content, row_key(prefix, number), start, self._data.label_field)
                number += 1

    def _rows(self, prefix: str, local: Path) -> Records:
        # Imported here: only parquet pays the 60 MB for it.
        import pyarrow
        import pyarrow.parquet

        number = 0
        try:
            with pyarrow.parquet.ParquetFile(local) as table:
                schema = table.schema_arrow.remove_metadata()
                if self._schema is None:
                    self._schema = schema
                elif not schema.equals(self._schema):
                    yield Broken("schema_drift", _difference(self._schema, schema), whole_object=True)
                    return
                for batch in table.iter_batches(ROWS_A_BATCH):
                    for row in batch.to_pylist():
                        yield table_row(row, row_key(prefix, number), number, self._data.label_field)
                        number += 1
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            # ArrowInvalid (a ValueError) for a bad footer or page, OSError for a file that ends early.
            yield Broken("broken_parquet", f"{type(error).__name__}: {error}"[:300], number, whole_object=True)

    def _windows(self, prefix: str, local: Path) -> Records:
        """Whole windows; what is left over at the end is dropped."""
        size = self._data.window_bytes
        with local.open("rb") as file:
            number = 0
            while len(window := file.read(size)) == size:
                digest = hashlib.sha256(window).hexdigest()
                yield Sound(row_key(prefix, number), "bin", window, size, digest, offset=number * size)
                number += 1


def _difference(first: Any, other: Any) -> str:
    wanted, found = ({field.name: str(field.type) for field in schema} for schema in (first, other))
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            return (
                f"column {name!r} is {found.get(name, 'missing')} here and {wanted.get(name, 'missing')} "
                "in the first file: write all files with one schema"
            )
    return "the columns' order or nullability differs from the first file: write all files with one schema"
