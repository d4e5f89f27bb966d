"""One feature table: that its files can be joined, and the features that entity rows get from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow
from pyarrow import types

from contracts.spec.data import FeatureJoin, FeatureTable
from services.ingestion.features.join import JoinRule, LatestRows, Rows
from services.ingestion.features.tables import (
    DAMAGED,
    MICRO,
    Key,
    TableFile,
    batches,
    check_time,
    duration_ticks,
    entity_rows,
    feature_rows,
    one_key,
    open_table,
    ticks_per_s,
)
from services.kit.bus import PoisonMessage

#: Rows of a feature table that are sorted at a time, and the limit of bytes of their keys and times.
PIECE_ROWS, PIECE_BYTES = 2_500_000, 256 * 2**20

Located = tuple[str, Path]


@dataclass(frozen=True, slots=True)
class LoadedTable:
    """A feature table whose files all have the columns it needs."""

    spec: FeatureTable
    #: In the order of their names: a row's number is its place in this order.
    files: tuple[TableFile, ...]
    features: tuple[str, ...]
    #: Arrow types of the features as they are joined.
    types: tuple[Any, ...]


def load_table(spec: FeatureTable, files: Sequence[Located]) -> LoadedTable:
    """Open the files of a feature table. Raises ``PoisonMessage``: without one of them values would change silently."""
    table = f"feature table {spec.name!r}"
    opened = []
    for uri, path in files:
        try:
            opened.append(open_table(table, uri, path))
        except DAMAGED as error:
            raise _unreadable_file_error(table, uri, error) from error
    needed = [*spec.keys, spec.event_time, *([spec.created_time] if spec.created_time is not None else [])]
    features = spec.features or tuple(name for name in opened[0].schema.names if name not in needed)
    if not features:
        raise PoisonMessage(f"{opened[0]} has no column beside its keys and times: there is nothing to join")
    chosen = tuple(_one_type(opened, name) for name in features)
    for file in opened:
        check_time(file, spec.event_time, "event_time")
        if spec.created_time is not None:
            check_time(file, spec.created_time, "created_time; null if it is unknown when rows became available")
        if not spec.features and (extra := set(file.schema.names) - set(needed) - set(features)):
            raise PoisonMessage(
                f"{file} has columns that {opened[0].uri} does not have: {', '.join(sorted(extra))}; "
                "write all files alike, or name the columns to join (features)"
            )
    return LoadedTable(spec, tuple(opened), features, chosen)


@dataclass(frozen=True, slots=True)
class TableJoin:
    """How one feature table is joined to the entity table."""

    table: LoadedTable
    time: str
    entity_keys: tuple[str, ...]
    keys: tuple[Key, ...]
    per_s: int
    rule: JoinRule

    @classmethod
    def of(cls, entities: Sequence[TableFile], table: LoadedTable, join: FeatureJoin) -> TableJoin:
        """Check that they go together. Raises ``PoisonMessage``."""
        spec = table.spec
        for file in entities:
            check_time(file, join.time_field, "features.time_field")
        entity_keys = spec.entity_keys or spec.keys
        keys = []
        for mine, theirs in zip(entity_keys, spec.keys, strict=True):
            columns = [(file, mine, "entity_keys" if spec.entity_keys else "keys") for file in entities]
            keys.append(one_key([*columns, *((file, theirs, "keys") for file in table.files)]))
        times = [(file, join.time_field) for file in entities]
        for name in (spec.event_time, spec.created_time):
            times += [(file, name) for file in table.files if name is not None]
        per_s = ticks_per_s(times)
        snapshot = None if join.snapshot_at is None else _instant(join.snapshot_at, per_s)
        rule = JoinRule(join.as_known, snapshot, duration_ticks(spec.ttl_s, per_s))
        return cls(table, join.time_field, entity_keys, tuple(keys), per_s, rule)

    @property
    def names(self) -> list[str]:
        return [f"{self.table.spec.name}__{feature}" for feature in self.table.features]

    @property
    def schema(self) -> Any:
        return pyarrow.schema(list(zip(self.names, self.table.types, strict=True)))

    def row_bytes(self) -> int:
        """Estimate the memory of one entity row's features from the first rows."""
        for file in self.table.files:
            for batch in _sound(file, self.table.features):
                size_bytes: int = self._plain(file, batch).nbytes
                rows: int = batch.num_rows
                return size_bytes // max(rows, 1) + len(self.names)
        return len(self.names)

    def features(self, entities: Sequence[Any], tick: Callable[[], None]) -> Any:
        """Return the features of these rows (Arrow batches with keys and times) as an Arrow table, in order."""
        rows = pl.concat(entity_rows(batch, self.entity_keys, self.keys, self.time, self.per_s) for batch in entities)
        winners = LatestRows(rows, self.rule)
        for piece in self._pieces():
            winners.add(piece)
            tick()
        return self._pick(winners.rows(), tick)

    def _pieces(self) -> Iterator[pl.DataFrame]:
        """Yield keys and times of the feature table; small files are combined."""
        spec, first, height, size_bytes = self.table.spec, 0, 0, 0
        pending: list[pl.DataFrame] = []
        columns = sorted({*spec.keys, spec.event_time, spec.created_time or spec.event_time})
        for file in self.table.files:
            for batch in _sound(file, columns):
                rows = feature_rows(
                    batch, spec.keys, self.keys, spec.event_time, spec.created_time, self.per_s, first + height
                )
                pending.append(rows)
                height, size_bytes = height + rows.height, size_bytes + int(rows.estimated_size())
                if height >= PIECE_ROWS or size_bytes >= PIECE_BYTES:
                    yield pl.concat(pending)
                    first, height, size_bytes, pending = first + height, 0, 0, []
        if pending:
            yield pl.concat(pending)

    def _pick(self, chosen: Rows, tick: Callable[[], None]) -> Any:
        """Return the features in the rows ``chosen``; null where there is no row."""
        order = np.argsort(chosen, kind="stable")
        order = order[np.searchsorted(chosen[order], 0) :]
        wanted = chosen[order]
        picked, first = [self.schema.empty_table()], 0
        for file in self.table.files:
            if np.searchsorted(wanted, first) == np.searchsorted(wanted, first + file.rows):
                first += file.rows
                continue
            for batch in _sound(file, self.table.features):
                start, stop = np.searchsorted(wanted, [first, first + batch.num_rows])
                if start < stop:
                    picked.append(self._plain(file, batch.take(pyarrow.array(wanted[start:stop] - first))))
                first += batch.num_rows
                tick()
        back = np.zeros(len(chosen), dtype=np.int64)
        back[order] = np.arange(len(order))
        return pyarrow.concat_tables(picked).take(pyarrow.array(back, mask=chosen < 0))

    def _plain(self, file: TableFile, batch: Any) -> Any:
        """Return a table with the features' names, in types that allow more than 2 GB."""
        try:
            batch.validate(full=True)
        except DAMAGED as error:
            raise _unreadable_file_error(file.table, file.uri, error) from error
        return pyarrow.table(
            [column.cast(field.type) for column, field in zip(batch.columns, self.schema, strict=True)], self.schema
        )


def _instant(at: datetime, per_s: int) -> int:
    whole = (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * (per_s // MICRO)
    return min(whole, 2**63 - 1)


def _sound(file: TableFile, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a feature file. Raises ``PoisonMessage`` if it cannot be read."""
    try:
        yield from batches(file, columns)
    except DAMAGED as error:
        raise _unreadable_file_error(file.table, file.uri, error) from error


def _one_type(files: Sequence[TableFile], feature: str) -> Any:
    """Return the type of a feature. All files share it, except those that have only nulls."""
    typed = [(file, found) for file in files if not types.is_null(found := file.type_of(feature, "features"))]
    for file, found in typed:
        first, wanted = typed[0]
        if found != wanted:
            raise PoisonMessage(
                f"column {feature!r} is {found} in {file} and {wanted} in {first.uri}: write both alike"
            )
    return _plain_type(typed[0][1]) if typed else pyarrow.null()


def _plain_type(found: Any) -> Any:
    """Return the type for the same values with nulls and more than 2 GB."""
    value = found.value_type if types.is_dictionary(found) else found
    if types.is_fixed_size_list(value):
        # Those with nulls cannot be read back from Parquet.
        return pyarrow.large_list(value.value_field)
    if types.is_string(value) or types.is_string_view(value):
        return pyarrow.large_string()
    return pyarrow.large_binary() if types.is_binary(value) or types.is_binary_view(value) else value


def _unreadable_file_error(table: str, uri: str, error: Exception) -> PoisonMessage:
    return PoisonMessage(
        f"{uri} of {table} cannot be read as Parquet ({type(error).__name__}: {str(error)[:200]}): without it features "
        "would change silently; write it again, or remove it if it does not belong there"
    )
