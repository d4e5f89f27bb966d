"""Parquet files to Arrow batches, read in an isolated process.

What comes out was validated, so that nothing which reads it can go wrong in a library written in C. A batch travels as
a stream of Arrow's own format through a pipe, one while the next is read.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from services.ingestion.core.reasons import Code
from services.ingestion.core.records import InvalidRecord, RecordFault
from services.ingestion.isolated_process import ATTEMPTS, CPU_S, IsolatedProcess, ProcessDied, limit_cpu

#: Rows that are read at a time, or fewer if they are large.
ROWS_PER_BATCH, BATCH_BYTES = 1000, 32 * 2**20
#: A row group is rejected when it unpacks to more than both: these bytes, and this multiple of its file's size.
MAX_GROUP_BYTES, MAX_RATIO = 2**30, 1000


class ArrowBatch(NamedTuple):
    """Some rows of a file. The first batch of each file is empty and has the columns."""

    #: An Arrow table of the valid rows.
    table: Any
    #: What is wrong with the others, by their number among these rows.
    faults: Mapping[int, RecordFault]


class IsolatedParquetReader:
    """Reads one Parquet file after the other in a process of its own. The process starts with the first."""

    def __init__(self) -> None:
        self._child: IsolatedProcess | None = None

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def read(self, local: Path) -> Generator[ArrowBatch | InvalidRecord]:
        """Yield the columns and rows of a file, and last an ``InvalidRecord`` if it cannot be read to its end.

        Raises:
            TransientError: no process can be started.
        """
        done = 0
        for _ in range(ATTEMPTS):
            try:
                with closing(self._attempt(local, done)) as attempt:
                    for found in attempt:
                        done += 1
                        yield found
                return
            except ProcessDied:
                # A machine that is short of memory kills too: once more, in a process that was seen to begin.
                self.close()
        yield InvalidRecord("broken_parquet", "its reader dies, or does not come to an end", whole_object=True)

    def _attempt(self, local: Path, skip: int) -> Generator[ArrowBatch | InvalidRecord]:
        import pyarrow

        self._child = child = self._child or IsolatedProcess(_serve)
        whole = False
        try:
            child.send((local, skip))
            while isinstance(answer := child.receive(), dict):
                with pyarrow.ipc.open_stream(child.receive_bytes()) as stream:
                    table = stream.read_all()
                yield ArrowBatch(table, {at: RecordFault(*fault) for at, fault in answer.items()})
            whole = True
        finally:
            if not whole:  # the caller stopped in the middle of the file
                self.close()
        if answer is not None:
            yield answer


# -- in the process -------------------------------------------------------------------


def _serve(connection: Connection) -> None:
    while True:
        try:
            local, skip = connection.recv()
        except EOFError:
            return
        connection.send(_unpack(connection, local, skip))


def _unpack(connection: Connection, local: Path, skip: int) -> InvalidRecord | None:
    """Send what the file holds, but for the first batches; return what is wrong with it."""
    import pyarrow

    try:
        for number, (schema, batch) in enumerate(_batches(local)):
            if number >= skip:
                _send(connection, schema, batch)
            limit_cpu(CPU_S)
    except RecordFault as fault:
        return InvalidRecord(fault.code, fault.detail, whole_object=True)
    except MemoryError:
        return InvalidRecord("bomb", "its pages ask for more memory than there is", whole_object=True)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        # ArrowInvalid (a ValueError) for a bad footer or page, OSError for a file that ends early.
        return InvalidRecord("broken_parquet", f"{type(error).__name__}: {error}"[:300], whole_object=True)
    finally:
        limit_cpu(0)
    return None


def _batches(local: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the schema alone, then with each batch of rows."""
    import pyarrow.parquet

    limit_cpu(CPU_S)
    with pyarrow.parquet.ParquetFile(local) as table:
        schema = table.schema_arrow.remove_metadata()
        _check_footer(schema, table.metadata, local.stat().st_size)
        yield schema, None
        for batch in table.iter_batches(_rows_per_batch(table.metadata)):
            rows = _microseconds(batch)
            yield rows.schema, rows


def _check_footer(schema: Any, metadata: Any, size_bytes: int) -> None:
    names = schema.names
    if len(set(names)) < len(names):
        raise RecordFault("broken_parquet", "two columns have one name")
    for number in range(metadata.num_row_groups):
        # Not column by column: pyarrow's accessor of a column ends the process (std::terminate) where a damaged footer
        # contradicts itself.
        unpacked_bytes = metadata.row_group(number).total_byte_size
        if unpacked_bytes > MAX_GROUP_BYTES and unpacked_bytes > MAX_RATIO * size_bytes:
            detail = f"a row group of a file of {size_bytes:,} bytes unpacks to more than"
            raise RecordFault("bomb", f"{detail} {MAX_RATIO} times as much")


def _rows_per_batch(metadata: Any) -> int:
    sizes = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    a_row = max((group.total_byte_size // max(1, group.num_rows) for group in sizes), default=1)
    return max(1, min(ROWS_PER_BATCH, BATCH_BYTES // max(1, a_row)))


def _send(connection: Connection, schema: Any, batch: Any) -> None:
    import pyarrow

    valid, faults = (None, {}) if batch is None else _drop_faults(batch)
    with pyarrow.BufferOutputStream() as sink:
        with pyarrow.ipc.new_stream(sink, schema) as stream:
            if valid is not None:
                stream.write_batch(valid)
        content = sink.getvalue()
    connection.send(faults)
    connection.send_bytes(content)


def _drop_faults(batch: Any) -> tuple[Any, dict[int, tuple[Code, str]]]:
    """Return the rows whose values match their types, and the faults of the others by row number."""
    import pyarrow

    faults: dict[int, tuple[Code, str]] = {}
    try:
        batch.validate(full=True)
        return batch, faults
    except pyarrow.ArrowInvalid:
        for number in range(batch.num_rows):
            try:
                batch.slice(number, 1).validate(full=True)
            except pyarrow.ArrowInvalid as error:
                code: Code = "invalid_utf8" if "UTF8" in str(error) else "unsupported_type"
                faults[number] = code, str(error)
    return batch.filter(pyarrow.array([number not in faults for number in range(batch.num_rows)])), faults


def _microseconds(batch: Any) -> Any:
    """Truncate nanoseconds to microseconds, as Python has them."""
    import pyarrow

    for place, kind in enumerate(batch.schema.types):
        name = batch.schema.names[place]
        if pyarrow.types.is_timestamp(kind) and kind.unit == "ns":
            micro = pyarrow.timestamp("us", kind.tz)
            batch = batch.set_column(place, name, batch.column(place).cast(micro, safe=False))
        elif pyarrow.types.is_duration(kind) and kind.unit == "ns":
            batch = batch.set_column(place, name, batch.column(place).cast(pyarrow.duration("us"), safe=False))
    return batch
