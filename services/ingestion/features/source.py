"""The feature tables of one ingestion where they are kept: listed, copied as they were listed, and joined."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from contracts.events.train import FeatureJoin, FeatureTable
from services.ingestion.core.keys import extension, is_data
from services.ingestion.core.records import Broken
from services.ingestion.sources import Listed, Source
from services.kit.bus import Poison
from services.kit.concurrency import all_of, in_thread

EXTENSIONS = {"parquet", "pq"}
#: Files that are copied at a time.
AT_A_TIME = 4

Progress = Callable[[int, int], None]


class Stopped(Exception):
    """Nobody waits for the join any more."""


class Version(NamedTuple):
    """One file of a feature table, as a fingerprint takes it."""

    uri: str
    etag: str
    size: int
    #: In microseconds since 1970. Nothing of a feature table depends on when it was written.
    written_us: int = 0


class FeatureSource:
    """The tables of one join. What is joined is what was listed, or ``Changed`` is raised."""

    def __init__(self, open_source: Callable[[str], Source], spec: FeatureJoin) -> None:
        self._spec = spec
        self._sources = [open_source(table.source) for table in spec.tables]
        self._files: list[list[Listed]] = []

    async def list(self) -> list[Version]:
        """Every file of every feature table, table by table, in the order of their names.

        Raises:
            Poison: a table has no file, or one that is no Parquet file.
        """
        self._files = [
            await _list_table(table, source) for table, source in zip(self._spec.tables, self._sources, strict=True)
        ]
        return [
            Version(source.uri(listed), listed.etag, listed.size)
            for source, files in zip(self._sources, self._files, strict=True)
            for listed in files
        ]

    async def join(
        self, source: Source, entities: Sequence[Listed], folder: Path, progress: Progress = lambda done, total: None
    ) -> dict[str, Path | Broken]:
        """Under its path each entity file with its features, in ``folder``; ``Broken`` if it cannot be read.

        ``progress`` gets the rows done and all there are, from another thread.

        Raises:
            Poison: the tables do not go together, or a feature table cannot be read.
            Missing, Changed, Refused: what was listed is there no more.
        """
        local = await _download(source, entities, folder / "entities")
        tables = [
            await _download(each, files, folder / f"features-{number}")
            for number, (each, files) in enumerate(zip(self._sources, self._files, strict=True))
        ]
        joined = await _stoppable(partial(_join, self._spec, local, tables, folder), progress)
        return {listed.path: found for listed, found in zip(entities, joined, strict=True)}


def _join(
    spec: FeatureJoin,
    entities: Sequence[tuple[str, Path]],
    tables: Sequence[Sequence[tuple[str, Path]]],
    folder: Path,
    progress: Progress,
) -> list[Path | Broken]:
    # Imported here: only those who join pay for the memory and threads of the engine.
    from services.ingestion.features.enrich import join_files
    from services.ingestion.features.table_join import load_table

    loaded = [load_table(table, files) for table, files in zip(spec.tables, tables, strict=True)]
    joined = join_files(entities, loaded, spec, folder, progress)
    for files in tables:
        for _, path in files:
            path.unlink()
    return joined


async def _list_table(table: FeatureTable, source: Source) -> list[Listed]:
    files: list[Listed] = []
    async for page in source.listing():
        files += [listed for listed in page if is_data(listed.path)]
    if not files:
        raise Poison(f"feature table {table.name!r} has no file under {table.source}: check its source")
    for listed in files:
        objection = source.objection(listed)
        if objection is None and extension(listed.path) not in EXTENSIONS:
            objection = "it is not named as a Parquet file (.parquet)"
        if objection is None and listed.size == 0:
            objection = "it is empty"
        if objection is not None:
            raise Poison(
                f"{source.uri(listed)} of feature table {table.name!r} cannot be used: {objection}. Without it "
                "features could change silently: repair it, or move it elsewhere"
            )
    # In the order of code points, whatever order the listing came in: a row's number depends on it.
    return sorted(files, key=lambda listed: listed.path)


async def _download(source: Source, files: Sequence[Listed], folder: Path) -> list[tuple[str, Path]]:
    folder.mkdir()
    paths = [folder / str(number) for number in range(len(files))]
    copies = (source.download(listed, path) for listed, path in zip(files, paths, strict=True))
    await all_of(copies, at_a_time=AT_A_TIME)
    return [(source.uri(listed), path) for listed, path in zip(files, paths, strict=True)]


async def _stoppable(work: Callable[[Progress], list[Path | Broken]], progress: Progress) -> list[Path | Broken]:
    """Run it in a thread that ends at its next progress when the caller is cancelled."""
    stopped = threading.Event()

    def go_on(done: int, total: int) -> None:
        if stopped.is_set():
            raise Stopped
        progress(done, total)

    task = asyncio.create_task(in_thread(work, go_on))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.gather(task, return_exceptions=True)
        raise
