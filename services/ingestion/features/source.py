"""The feature tables of one ingestion where they are kept: listed, copied as they were listed, and joined."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import structlog

from contracts.spec.data import FeatureJoin, FeatureTable
from services.ingestion.core.keys import extension, is_data
from services.ingestion.core.records import InvalidRecord
from services.ingestion.formats.isolated_reader import IsolatedParquetReader
from services.ingestion.isolated_process import ProcessDied, run_isolated
from services.ingestion.sources import Source, SourceObject
from services.kit.bus import PoisonMessage
from services.kit.concurrency import gather_limited, run_in_thread

log = structlog.get_logger(__name__)

EXTENSIONS = {"parquet", "pq"}
#: Files that are copied at a time.
PARALLEL_DOWNLOADS = 4


#: Address space of the join's process: a join keeps about 1 GB, and the allocators of two engines reserve more.
MEMORY_BYTES = 8 * 2**30

Located = tuple[str, Path]
#: Called with the entity rows done and all there are, in another thread.
Progress = Callable[[int, int], None]


class FeatureSource:
    """The tables of one join. What is joined is what was listed, or ``ObjectChanged`` is raised."""

    def __init__(self, open_source: Callable[[str], Source], spec: FeatureJoin) -> None:
        self._spec = spec
        self._sources = [open_source(table.source) for table in spec.tables]
        self._files: list[list[SourceObject]] = []

    async def list(self) -> list[SourceObject]:
        """List every file of every feature table by its uri, table by table, in the order of names.

        Raises:
            PoisonMessage: a table has no file, or one that is no Parquet file.
        """
        self._files = [
            await _list_table(table, source) for table, source in zip(self._spec.tables, self._sources, strict=True)
        ]
        # Nothing of a feature table depends on when it was written.
        return [
            SourceObject(source.uri(listed), listed.etag, listed.size, written_us=0)
            for source, files in zip(self._sources, self._files, strict=True)
            for listed in files
        ]

    async def join(
        self,
        source: Source,
        entities: Sequence[SourceObject],
        folder: Path,
        progress: Progress = lambda done, total: None,
    ) -> dict[str, Path | InvalidRecord]:
        """Return each entity file with its features, in ``folder``, by path; ``InvalidRecord`` if it cannot be read.

        ``progress`` gets the rows done and all there are, from another thread.

        Raises:
            PoisonMessage: the tables do not go together, or a feature table cannot be read.
            ObjectNotFound, ObjectChanged, StoreRefused: what was listed is there no more.
        """
        (first := folder / "join").mkdir()
        try:
            return await self._join(source, entities, first, {}, progress)
        except ProcessDied:
            log.warning("the process that joins features died; its files are read one by one")
        shutil.rmtree(first)
        (second := folder / "join-again").mkdir()
        broken = await self._unreadable(source, entities, second)
        try:
            return await self._join(source, entities, second, broken, progress)
        except ProcessDied:
            raise PoisonMessage(
                "the process that joins the feature tables dies, though each of their files can be read: it may have "
                f"{MEMORY_BYTES / 2**30:.0f} GiB of memory; name the columns to join (features), or join fewer tables"
            ) from None

    async def _join(
        self,
        source: Source,
        entities: Sequence[SourceObject],
        folder: Path,
        broken: Mapping[str, InvalidRecord],
        progress: Progress,
    ) -> dict[str, Path | InvalidRecord]:
        """Join all but what is known to be broken."""
        result: dict[str, Path | InvalidRecord] = dict(broken)
        sound = [listed for listed in entities if listed.path not in broken]
        local = await _download(source, sound, folder / "entities")
        tables = [
            await _download(each, files, folder / f"features-{number}")
            for number, (each, files) in enumerate(zip(self._sources, self._files, strict=True))
        ]
        joined = await run_isolated(
            _join, self._spec, local, tables, folder, report=progress, memory_bytes=MEMORY_BYTES
        )
        for files in tables:
            for _, path in files:
                path.unlink()
        return result | {listed.path: found for listed, found in zip(sound, joined, strict=True)}

    async def _unreadable(
        self,
        source: Source,
        entities: Sequence[SourceObject],
        folder: Path,
    ) -> dict[str, InvalidRecord]:
        """Return the entity files that cannot be read. Raises ``PoisonMessage`` if a feature file cannot be read."""
        for number, (table, each, files) in enumerate(zip(self._spec.tables, self._sources, self._files, strict=True)):
            copies = await _download(each, files, folder / f"check-{number}")
            for uri, found in (await run_in_thread(_find_unreadable, copies)).items():
                raise PoisonMessage(
                    f"{uri} of feature table {table.name!r} cannot be read as Parquet ({found.detail}): without it "
                    "features would change silently; write it again, or remove it if it does not belong there"
                )
            shutil.rmtree(folder / f"check-{number}")
        copies = await _download(source, entities, folder / "check")
        broken = await run_in_thread(_find_unreadable, copies)
        shutil.rmtree(folder / "check")
        return {listed.path: broken[uri] for listed, (uri, _) in zip(entities, copies, strict=True) if uri in broken}


async def _list_table(table: FeatureTable, source: Source) -> list[SourceObject]:
    files: list[SourceObject] = []
    async for page in source.list_objects():
        files += [listed for listed in page if is_data(listed.path)]
    if not files:
        raise PoisonMessage(f"feature table {table.name!r} has no file under {table.source}: check its source")
    for listed in files:
        objection = source.find_objection(listed)
        if objection is None and extension(listed.path) not in EXTENSIONS:
            objection = "it is not named as a Parquet file (.parquet)"
        if objection is None and listed.size == 0:
            objection = "it is empty"
        if objection is not None:
            raise PoisonMessage(
                f"{source.uri(listed)} of feature table {table.name!r} cannot be used: {objection}. Without it "
                "features could change silently: repair it, or move it elsewhere"
            )
    # In the order of code points, not of the listing: a row's number depends on it.
    return sorted(files, key=lambda listed: listed.path)


async def _download(source: Source, files: Sequence[SourceObject], folder: Path) -> list[tuple[str, Path]]:
    folder.mkdir()
    paths = [folder / str(number) for number in range(len(files))]
    copies = (source.download(listed, path) for listed, path in zip(files, paths, strict=True))
    await gather_limited(copies, limit=PARALLEL_DOWNLOADS)
    return [(source.uri(listed), path) for listed, path in zip(files, paths, strict=True)]


def _find_unreadable(files: Iterable[Located]) -> dict[str, InvalidRecord]:
    """Return the files that cannot be read to their end, by uri; each is tried on its own."""
    broken: dict[str, InvalidRecord] = {}
    with closing(IsolatedParquetReader()) as reader:
        for uri, path in files:
            for found in reader.read(path):
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
