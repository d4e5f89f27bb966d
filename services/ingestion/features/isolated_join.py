"""The join in an isolated process: a crash of a library does not affect the service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from contracts.spec.data import FeatureJoin
from services.ingestion.core.records import InvalidRecord
from services.ingestion.formats.isolated_reader import IsolatedParquetReader
from services.ingestion.isolated_process import run_isolated

#: Address space of the process: a join keeps about 1 GB, and the allocators of two engines reserve more than they use.
MEMORY_BYTES = 8 * 2**30

Located = tuple[str, Path]
#: Called with the entity rows done and all there are, in another thread.
Progress = Callable[[int, int], None]


async def join_in_process(
    spec: FeatureJoin,
    entities: Sequence[Located],
    tables: Sequence[Sequence[Located]],
    folder: Path,
    progress: Progress,
) -> list[Path | InvalidRecord]:
    """Run ``enrich.join_files`` in a process of its own.

    Raises:
        PoisonMessage: the tables do not go together, or one of them cannot be read.
        ProcessDied: the process died of it.
        TransientError: no process can be started.
    """
    found: list[Path | InvalidRecord] = await run_isolated(
        _join, spec, entities, tables, folder, report=progress, memory_bytes=MEMORY_BYTES
    )
    return found


def unreadable(files: Iterable[Located]) -> dict[str, InvalidRecord]:
    """Return the files that cannot be read to their end, by uri; each is tried on its own."""
    broken: dict[str, InvalidRecord] = {}
    with closing(IsolatedParquetReader()) as unpacker:
        for uri, path in files:
            for found in unpacker.read(path):
                if isinstance(found, InvalidRecord):
                    broken[uri] = found
    return broken


def _join(
    report: Progress,
    spec: FeatureJoin,
    entities: Sequence[Located],
    tables: Sequence[Sequence[Located]],
    folder: Path,
) -> list[Path | InvalidRecord]:
    # Imported here, so that the service itself does not load the engine and its threads.
    from services.ingestion.features.enrich import join_files
    from services.ingestion.features.table_join import load_table

    loaded = [load_table(table, files) for table, files in zip(spec.tables, tables, strict=True)]
    return join_files(entities, loaded, spec, folder, report)
