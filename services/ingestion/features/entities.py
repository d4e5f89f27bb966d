"""One file of the entity table on its way through the join: its rows stay as they are, features stand beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet

from services.ingestion.core.records import InvalidRecord
from services.ingestion.features.tables import DAMAGED, TableFile, batches
from services.kit.bus import PoisonMessage


class EntityFile:
    """An entity file on its way: keys are read first, the same rows follow with their features."""

    def __init__(self, source: TableFile, joined: Path) -> None:
        self.source, self.joined = source, joined
        self.broken: InvalidRecord | None = None
        #: Rows that are not written yet.
        self.left = source.rows
        self._keys: _Cursor | None = None
        self._rows = _Cursor(source, None)
        self._writer: Any = None

    def read_keys(self, columns: Sequence[str], rows: int) -> list[Any] | None:
        """Return the next rows' keys and times; None if the file cannot be read."""
        if self.broken is not None:
            return None
        self._keys = self._keys or _Cursor(self.source, columns)
        try:
            return self._keys.read_rows(rows)
        except DAMAGED as error:
            self.broken = broken(error)
            return None

    def write(self, rows: int, features: Sequence[Any]) -> None:
        """Write the next rows with these tables of features beside them."""
        self.left -= rows
        place = 0
        while place < rows and self.broken is None:
            try:
                table = pyarrow.Table.from_batches([self._rows.next(rows - place)]).replace_schema_metadata()
                table.validate(full=True)
            except DAMAGED as error:
                self.broken = broken(error)
                break
            for added in features:
                for name, values in zip(added.column_names, added.slice(place, table.num_rows).columns, strict=True):
                    table = table.append_column(name, values)
            self._open(table.schema).write_table(table)
            place += table.num_rows

    def close(self, added: Sequence[Any]) -> None:
        """End the joined file; one without rows has its columns all the same."""
        if self.broken is None:
            self._open(pyarrow.schema([*self.source.schema, *added]))
        if self._writer is not None:
            self._writer.close()
        if self.broken is not None:
            self.joined.unlink(missing_ok=True)
        self.source.path.unlink(missing_ok=True)

    def _open(self, schema: Any) -> Any:
        if self._writer is None:
            try:
                self._writer = parquet.ParquetWriter(self.joined, schema)
            except pyarrow.ArrowException as error:
                raise PoisonMessage(f"{self.source} has a column that cannot be written again: {error}") from error
        return self._writer


class _Cursor:
    """The rows of a file, as they are asked for."""

    def __init__(self, file: TableFile, columns: Sequence[str] | None) -> None:
        self._batches = batches(file, columns)
        self._rest: Any = None
        self._left = file.rows

    def next(self, most: int) -> Any:
        """Return the next rows, at most ``most``. Raises one of ``DAMAGED``."""
        batch = next(self._batches, None) if self._rest is None else self._rest
        if batch is None:
            raise OSError(f"ends {self._left:,} rows early")
        self._rest = batch.slice(most) if batch.num_rows > most else None
        taken = batch.slice(0, most)
        self._left -= taken.num_rows
        if self._left == 0:
            # There may be very many files: close each at its end.
            self._batches.close()
        return taken

    def read_rows(self, rows: int) -> list[Any]:
        """Return the next ``rows`` rows. Raises one of ``DAMAGED``."""
        taken = []
        while rows:
            taken.append(self.next(rows))
            rows -= taken[-1].num_rows
        return taken


def broken(error: Exception) -> InvalidRecord:
    """Return the rejection of an entity file that cannot be read."""
    return InvalidRecord("broken_parquet", f"{type(error).__name__}: {error}"[:300], whole_object=True)
