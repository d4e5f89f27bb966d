"""Formats whose objects hold many records: jsonl, csv, parquet, text, tokens, tar archives and MDS shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from contracts.spec.data import DataSource
from services.ingestion import metrics
from services.ingestion.catalog import Catalog
from services.ingestion.core.keys import extension
from services.ingestion.core.records import InvalidRecord, ValidRecord
from services.ingestion.core.schema import FieldProfile, find_deviating_columns, find_deviating_fields
from services.ingestion.decoders import DecoderPool
from services.ingestion.formats import csv_files, images, mds, parquet, rows, tars
from services.ingestion.formats.isolated_reader import IsolatedParquetReader
from services.ingestion.record_intake import FoundRecord, RecordConsumer
from services.ingestion.sources import Source, SourceObject
from services.kit.bus import PoisonMessage
from services.kit.concurrency import run_ahead, run_in_thread

#: By format: how its files are called.
EXTENSIONS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet", ".pq"),
    "webdataset": (".tar", ".tar.gz", ".tgz"),
}
#: Records, and bytes, that are read before the event loop runs again.
RECORDS_PER_BATCH, BYTES_PER_BATCH = 2000, 8 * 2**20


class RecordFiles:
    """Fetches files, some ahead, and reads their records; hands them out in the order of the listing."""

    def __init__(
        self,
        data: DataSource,
        source: Source,
        catalog: Catalog,
        decoders: DecoderPool,
        folder: Path,
        ahead: int,
    ) -> None:
        self._data, self._source, self._catalog, self._decoders = data, source, catalog, decoders
        self._folder, self._ahead = folder, ahead
        #: By path, local files that are read in place of the source's objects.
        self.joined: Mapping[str, Path | InvalidRecord] | None = None
        self._unpacker = IsolatedParquetReader()
        self._image_validator = images.ImageValidator(data)
        self._shards: dict[str, mds.MdsShard] = {}
        #: Files that repeat the content of others.
        self._copies: set[str] = set()
        self._read_bytes = metrics.READ_BYTES.labels(data.format)

    async def run(self, files: Iterator[SourceObject], consume: RecordConsumer) -> None:
        """Read ``files`` and await ``consume`` for each batch of records."""
        fetches = (self._fetch(listed, self._folder / f"source-{number}") for number, listed in enumerate(files))
        try:
            async with aclosing(run_ahead(fetches, limit=self._ahead)) as fetched:
                async for listed, local in fetched:
                    await self._read(listed, local, consume)
        finally:
            self._unpacker.close()

    def find_drifted_files(self) -> Iterator[tuple[str, InvalidRecord]]:
        """Yield the files whose schema deviates from most, after all are read. Their records must be removed."""
        if self._data.format not in ("jsonl", "csv", "parquet"):
            return
        unlike = find_deviating_columns if self._data.format == "parquet" else find_deviating_fields
        for shape, detail in unlike(self._catalog.shapes):
            for path in self._catalog.files_of(shape):
                yield path, InvalidRecord("schema_drift", detail, whole_object=True)

    def is_auxiliary(self, listed: SourceObject) -> bool:
        """Whether the object only describes others."""
        return self._data.format == "mds" and (
            listed.path.rpartition("/")[2] == mds.INDEX or listed.path in self._copies
        )

    async def read_indexes(
        self,
        indexes: list[SourceObject],
        found: Callable[[str], SourceObject | None],
    ) -> list[FoundRecord]:
        """Read the indexes of MDS folders; return what they name that does not exist.

        Raises:
            PoisonMessage: there is none, or one cannot be read.
        """
        missing: list[FoundRecord] = []
        if not indexes:
            raise PoisonMessage(f"there is no {mds.INDEX} under {self._data.source}: is it an MDS folder?")
        for listed in indexes:
            folder = listed.path.removesuffix(mds.INDEX)
            if listed.size > mds.MAX_INDEX_BYTES:
                raise PoisonMessage(
                    f"{self._source.uri(listed)} has {listed.size:,} bytes, which no index.json should need"
                )
            try:
                shards = mds.read_index(await self._source.read(listed))
            except ValueError as error:
                raise PoisonMessage(f"{self._source.uri(listed)}: {error}") from error
            self._shards |= {folder + name: shard for name, shard in shards.items()}
            for shard in {shard.raw_data.basename: shard for shard in shards.values()}.values():
                names = [file.basename for file in (shard.raw_data, shard.zip_data) if file is not None]
                there = [folder + name for name in names if found(folder + name) is not None]
                if not there:
                    detail = f"names {folder + names[-1]!r}, which does not exist"
                    missing.append((listed, InvalidRecord("missing_file", detail)))
                elif len(there) > 1:  # packed and not: one of them is enough
                    self._copies.add(there[1])
        return missing

    def reject_unread(self, listed: SourceObject) -> InvalidRecord | None:
        """Reject a file that cannot be used, by its name and size; None if it has to be read."""
        known = EXTENSIONS.get(self._data.format)
        if known is not None and not listed.path.lower().endswith(known):
            detail = f"extension {extension(listed.path)!r} is none of {', '.join(known)}"
            return InvalidRecord("unknown_extension", detail, whole_object=True)
        if self._data.format == "mds" and listed.path not in self._shards:
            return InvalidRecord("not_in_manifest", f"{mds.INDEX} does not name this file", whole_object=True)
        if listed.size == 0 and self._data.format not in ("text", "tokens"):
            return InvalidRecord("empty", "the file has no bytes", whole_object=True)
        return None

    async def _fetch(self, listed: SourceObject, local: Path) -> tuple[SourceObject, Path | InvalidRecord]:
        if (broken := self.reject_unread(listed)) is not None:
            return listed, broken
        if self.joined is not None:
            return listed, self.joined[listed.path]
        await self._source.download(listed, local)
        self._read_bytes.inc(listed.size)
        return listed, local

    async def _read(self, listed: SourceObject, local: Path | InvalidRecord, consume: RecordConsumer) -> None:
        if isinstance(local, InvalidRecord):
            await consume([(listed, local)])
            return
        with closing(self._records(listed.path, local)) as records:
            while found := await run_in_thread(_some, records):
                await consume([(listed, record) for record in await self._decode_images(found)])
        local.unlink()

    def _records(self, path: str, local: Path) -> rows.Records:
        data = self._data
        if data.format == "jsonl":
            return self._profiled(path, local, rows.lines)
        if data.format == "csv":
            return self._profiled(path, local, csv_files.records)
        if data.format == "parquet":
            return parquet.records(data, path, local, self._unpacker, partial(self._catalog.note_shape, path))
        if data.format == "webdataset":
            return tars.samples(data, path, local)
        if data.format == "mds":
            return mds.samples(data, path, local, self._shards[path])
        return rows.windows(data, path, local)

    def _profiled(
        self, path: str, local: Path, read: Callable[[DataSource, str, Path, FieldProfile], rows.Records]
    ) -> rows.Records:
        profile = FieldProfile()
        yield from read(self._data, path, local, profile)
        if (shape := profile.shape()) is not None:
            self._catalog.note_shape(path, shape)

    async def _decode_images(self, found: list[ValidRecord | InvalidRecord]) -> list[ValidRecord | InvalidRecord]:
        """Return the records with their images decoded; those that do not decode are rejected."""
        if self._data.format not in ("webdataset", "mds"):
            return found
        asked = [
            (place, images.LabelledImage(f"{name}.{ext}", record.label or "", record.value), content)
            for place, record in enumerate(found)
            if isinstance(record, ValidRecord)
            for name, ext, content in _images(record)
        ]
        results = await self._decoders.validate(
            self._image_validator, [(image, content) for _, image, content in asked]
        )
        for (place, image, _), result in zip(asked, results, strict=True):
            record = found[place]
            if isinstance(record, InvalidRecord):
                continue
            if isinstance(result, InvalidRecord):
                detail = f"its file .{image.path.partition('.')[2]}: {result.detail}"
                found[place] = InvalidRecord(result.code, detail, record.offset, record.sha256, label=record.label)
            elif not record.measures:  # the first of several images counts
                found[place] = replace(record, measures=result.measures, split_key=result.split_key)
        return found


def _some(records: Iterator[ValidRecord | InvalidRecord]) -> list[ValidRecord | InvalidRecord]:
    found: list[ValidRecord | InvalidRecord] = []
    size = 0
    for record in islice(records, RECORDS_PER_BATCH):
        found.append(record)
        size += record.size if isinstance(record, ValidRecord) else 0
        if size >= BYTES_PER_BATCH:
            break
    return found


def _images(record: ValidRecord) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, extension and content of each image in a sample."""
    assert record.content is not None
    at = 0
    for ext, size in record.fields or ((record.ext, record.size),):
        if ext.rpartition(".")[2] in images.EXTENSIONS:
            yield "sample", ext, record.content[at : at + size]
        at += size
