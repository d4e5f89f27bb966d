"""Files of many records (jsonl, parquet, text, tokens), read as streams from a local copy."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from contracts.events.train import DataSource
from services.ingestion.core.keys import row_key, rows_key
from services.ingestion.core.records import Broken, Fault, Sound, json_line, plain, record

#: Rows are turned into Python's types so many at a time, or fewer if they are large.
ROWS_A_BATCH, BATCH_BYTES = 1000, 32 * 2**20
#: A row group that becomes larger than this, and so many times the size of its file, is no data.
MAX_GROUP_BYTES, MAX_RATIO = 2**30, 1000
BOM = b"\xef\xbb\xbf"

Records = Generator[Sound | Broken, None, None]


def lines(data: DataSource, path: str, local: Path) -> Records:
    """The records of a jsonl file."""
    prefix, most = rows_key(path), data.checks.max_record_bytes
    number = offset = 0
    with local.open("rb") as file:
        if file.read(len(BOM)) == BOM:
            offset = len(BOM)
        file.seek(offset)
        while line := file.readline(most + 1):
            start, offset = offset, offset + len(line)
            if len(line) > most and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(min(most, 2**20))
                    offset += len(line)
                yield Broken("oversized", f"a line of {offset - start:,} bytes", start)
            elif line.strip():
                content = line.removesuffix(b"\n").removesuffix(b"\r")
                yield json_line(content, row_key(prefix, number), start, data.label_field)
            number += 1


def windows(data: DataSource, path: str, local: Path) -> Records:
    """Whole windows of bytes or tokens; what is left over at the end is dropped."""
    prefix = rows_key(path)
    token_bytes = data.token_bytes if data.format == "tokens" else 1
    if local.stat().st_size % token_bytes:
        detail = f"{local.stat().st_size:,} bytes are no whole number of tokens of {token_bytes} (data.token_bytes)"
        yield Broken("wrong_size", detail, whole_object=True)
        return
    size = data.window_bytes * token_bytes
    with local.open("rb") as file:
        number = 0
        while len(window := file.read(size)) == size:
            digest = hashlib.sha256(window).hexdigest()
            yield Sound(row_key(prefix, number), "bin", window, size, digest, offset=number * size)
            number += 1


class Tables:
    """Reads the Parquet files of one source; remembers which columns each of them has."""

    def __init__(self, data: DataSource) -> None:
        self._data = data
        #: Every schema that came up, with the paths of its files.
        self._files: list[tuple[Any, list[str]]] = []

    def drifted(self) -> Iterator[tuple[str, Broken]]:
        """The files whose columns are not those of most files, which is known only at the end."""
        usual = max(self._files, key=lambda each: (len(each[1]), -self._files.index(each)), default=None)
        for schema, paths in self._files:
            if usual is not None and schema is not usual[0]:
                detail = _difference(usual[0], schema)
                yield from ((path, Broken("schema_drift", detail, whole_object=True)) for path in paths)

    def records(self, path: str, local: Path) -> Records:
        """The rows of one file. Dates become ISO 8601, decimals strings, bytes base64."""
        # Imported here: only parquet pays the 60 MB for it.
        import pyarrow
        import pyarrow.parquet

        prefix, number = rows_key(path), 0
        try:
            with pyarrow.parquet.ParquetFile(local) as table:
                schema = table.schema_arrow.remove_metadata()
                if (broken := _refused(schema, table.metadata, local.stat().st_size)) is not None:
                    yield broken
                    return
                self._note(schema, path)
                for batch in table.iter_batches(_rows_a_batch(table.metadata)):
                    for row in _python_rows(batch):
                        yield self._row(row, f"{prefix}/{number:09d}", number)
                        number += 1
        except MemoryError:
            yield Broken("bomb", "its pages ask for more memory than there is", number, whole_object=True)
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            # ArrowInvalid (a ValueError) for a bad footer or page, OSError for a file that ends early.
            yield Broken("broken_parquet", f"{type(error).__name__}: {error}"[:300], number, whole_object=True)

    def _note(self, schema: Any, path: str) -> None:
        for known, paths in self._files:
            if known.equals(schema):
                paths.append(path)
                return
        self._files.append((schema, [path]))

    def _row(self, row: Mapping[str, Any] | Fault, key: str, number: int) -> Sound | Broken:
        try:
            if isinstance(row, Fault):
                raise row
            return record(row, key, number, self._data.label_field)
        except Fault as fault:
            return Broken(fault.code, fault.detail, number)


def _refused(schema: Any, metadata: Any, size_bytes: int) -> Broken | None:
    """What can be said of a file from its footer."""
    names = schema.names
    if len(set(names)) < len(names):
        return Broken("broken_parquet", "two columns have one name", whole_object=True)
    for number in range(metadata.num_row_groups):
        # Not column by column: pyarrow's accessor of a column ends the process (std::terminate) where a damaged footer
        # contradicts itself, which no handler of ours would see.
        unpacked_bytes = metadata.row_group(number).total_byte_size
        if unpacked_bytes > MAX_GROUP_BYTES and unpacked_bytes > MAX_RATIO * size_bytes:
            detail = f"a row group of a file of {size_bytes:,} bytes says it unpacks to more than"
            return Broken("bomb", f"{detail} {MAX_RATIO} times as much", whole_object=True)
    return None


def _rows_a_batch(metadata: Any) -> int:
    sizes = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    a_row = max((group.total_byte_size // max(1, group.num_rows) for group in sizes), default=1)
    return max(1, min(ROWS_A_BATCH, BATCH_BYTES // max(1, a_row)))


def _python_rows(batch: Any) -> Iterator[Mapping[str, Any] | Fault]:
    """The rows of a batch in JSON's types; where a value has none, what is wrong with it."""
    batch = _microseconds(batch)
    names = [name for name, kind in zip(batch.schema.names, batch.schema.types, strict=True) if not _native(kind)]
    try:
        rows = batch.to_pylist()
    except Exception:  # a date that Python has not, bytes that are no text: the others are sound
        rows = [_one(batch.slice(i, 1)) for i in range(batch.num_rows)]
    for row in rows:
        if isinstance(row, Fault) or not names:
            yield row
            continue
        try:
            for name in names:
                row[name] = plain(row[name])
            yield row
        except Fault as fault:
            yield fault


def _one(batch: Any) -> Any:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return Fault("invalid_utf8", f"text that is no UTF-8: {error.reason}")
    except Exception as error:
        return Fault("unsupported_type", f"{type(error).__name__}: {error}")


def _microseconds(batch: Any) -> Any:
    """Times to the nanosecond are cut to microseconds, which is what Python knows."""
    import pyarrow

    for place, kind in enumerate(batch.schema.types):
        name = batch.schema.names[place]
        if pyarrow.types.is_timestamp(kind) and kind.unit == "ns":
            micro = pyarrow.timestamp("us", kind.tz)
            batch = batch.set_column(place, name, batch.column(place).cast(micro, safe=False))
        elif pyarrow.types.is_duration(kind) and kind.unit == "ns":
            batch = batch.set_column(place, name, batch.column(place).cast(pyarrow.duration("us"), safe=False))
    return batch


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


def _difference(usual: Any, other: Any) -> str:
    wanted, found = ({field.name: str(field.type) for field in schema} for schema in (usual, other))
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            return (
                f"column {name!r} is {found.get(name, 'missing')} here and {wanted.get(name, 'missing')} "
                "in most files: write all files with one schema"
            )
    return "the columns' order or nullability differs from most files: write all files with one schema"
