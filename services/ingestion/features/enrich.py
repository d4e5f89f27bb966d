"""Entity tables with their features: local Parquet files in, Parquet files of the same rows out.

Memory does not grow with the tables. The join reads a bounded number of entity rows at a time. For these it reads each
feature table twice, in pieces: keys and times to find the winners, then the features of the winners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from contracts.spec.data import FeatureJoin
from services.ingestion.core.records import InvalidRecord
from services.ingestion.features.entities import EntityFile, broken
from services.ingestion.features.table_join import LoadedTable, Located, TableJoin
from services.ingestion.features.tables import DAMAGED, open_table
from services.kit.bus import PoisonMessage

#: What the entity rows that are under way at a time may take, about, and how many that is at the least and most.
CHUNK_BYTES, CHUNK_ROWS_MIN, CHUNK_ROWS_MAX = 2**30, 1000, 4_000_000
#: A row's keys, time and best candidate; its features are there twice while they are put in order.
ROW_BYTES, COPIES = 160, 2

#: Called with the entity rows done and all there are, several times a minute; may raise to end the work.
Progress = Callable[[int, int], None]


def join_files(
    entities: Sequence[Located], tables: Sequence[LoadedTable], join: FeatureJoin, folder: Path, progress: Progress
) -> list[Path | InvalidRecord]:
    """Write each entity file to ``folder``: the same rows in the same order, with their features.

    A file that cannot be read gives a ``InvalidRecord``. The local entity files are removed as they are used up.

    Raises:
        PoisonMessage: a column is missing or of a wrong type, or a feature table cannot be read.
    """
    files: list[EntityFile | InvalidRecord] = []
    for number, (uri, path) in enumerate(entities):
        try:
            files.append(EntityFile(open_table("entity table", uri, path), folder / f"joined-{number}.parquet"))
        except DAMAGED as error:
            files.append(broken(error))
    readable = [file for file in files if isinstance(file, EntityFile)]
    _join_all(readable, tables, join, progress)
    return [file if isinstance(file, InvalidRecord) else file.broken or file.joined for file in files]


def _join_all(
    files: Sequence[EntityFile], tables: Sequence[LoadedTable], join: FeatureJoin, progress: Progress
) -> None:
    plans = [TableJoin.of([file.source for file in files], table, join) for table in tables] if files else []
    names = [name for plan in plans for name in plan.names]
    for file in files:
        counts = Counter([*file.source.schema.names, *names])
        if twice := [name for name in dict.fromkeys(names) if counts[name] > 1]:
            raise PoisonMessage(
                f"{file.source} or two feature tables make more than one column {twice[0]!r}: rename one"
            )
    added = [field for plan in plans for field in plan.schema]
    columns = sorted({join.time_field, *(name for plan in plans for name in plan.entity_keys)})
    done, total = 0, sum(file.source.rows for file in files)
    for chunk in _chunks(files, _chunk_rows(sum(plan.row_bytes() for plan in plans))):
        keys = [(file, rows, file.read_keys(columns, rows)) for file, rows in chunk]
        read = [(file, rows, found) for file, rows, found in keys if found is not None]
        parts = [batch for _, _, found in read for batch in found]
        features = [plan.features(parts, partial(progress, done, total)) for plan in plans] if parts else []
        place = 0
        for file, rows, _ in read:
            file.write(rows, [table.slice(place, rows) for table in features])
            place += rows
            if file.left == 0:
                file.close(added)
        done += sum(rows for _, rows in chunk)
        progress(done, total)
    for file in files:
        if file.source.rows == 0 or file.broken:
            file.close(added)


def _chunk_rows(feature_bytes: int) -> int:
    return min(max(CHUNK_BYTES // (ROW_BYTES + COPIES * feature_bytes), CHUNK_ROWS_MIN), CHUNK_ROWS_MAX)


def _chunks(files: Sequence[EntityFile], limit: int) -> Iterator[list[tuple[EntityFile, int]]]:
    """Yield chunks of ``limit`` rows, across files: (file, number of its next rows)."""
    chunk: list[tuple[EntityFile, int]] = []
    room = limit
    for file in files:
        left = file.source.rows
        while left:
            rows = min(left, room)
            chunk.append((file, rows))
            left, room = left - rows, room - rows
            if not room:
                yield chunk
                chunk, room = [], limit
    if chunk:
        yield chunk
