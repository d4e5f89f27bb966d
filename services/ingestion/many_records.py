"""Formats whose objects hold many records: jsonl, parquet, text, tokens, tar archives and MDS shards."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from contracts.events.train import DataSource
from services.ingestion import metrics
from services.ingestion.catalog import Catalog
from services.ingestion.core.keys import extension
from services.ingestion.core.records import Broken, Sound
from services.ingestion.core.schema import Profile, unlike_columns, unlike_fields
from services.ingestion.decoders import Decoders
from services.ingestion.formats import images, mds, parquet, rows, tars
from services.ingestion.formats.unpacking import Unpacker
from services.ingestion.sources import Listed, Source
from services.ingestion.taking import Found, Take
from services.kit.bus import PoisonMessage
from services.kit.concurrency import cancel_and_wait, run_in_thread

#: By format: how its files are called.
EXTENSIONS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
    "webdataset": (".tar", ".tar.gz", ".tgz"),
}
#: Records taken between two looks at the event loop, or fewer if they are large.
RECORDS_A_TURN, BYTES_A_TURN = 2000, 8 * 2**20


class ManyRecords:
    """Fetches files, some ahead, and reads their records; hands them out in the order of the listing."""

    def __init__(
        self,
        data: DataSource,
        source: Source,
        catalog: Catalog,
        decoders: Decoders,
        folder: Path,
        ahead: int,
    ) -> None:
        self._data, self._source, self._catalog, self._decoders = data, source, catalog, decoders
        self._folder, self._ahead = folder, ahead
        #: By path, local files that are read in place of the source's objects.
        self.joined: Mapping[str, Path | Broken] | None = None
        self._unpacker = Unpacker()
        self._image_judge = images.ImageJudge(data)
        self._shards: dict[str, mds.MdsShard] = {}
        #: Files that say again what others do.
        self._copies: set[str] = set()
        self._read_bytes = metrics.READ_BYTES.labels(data.format)

    async def run(self, files: Iterator[Listed], take: Take) -> None:
        """Read ``files`` and await ``take`` for each batch of records."""
        pending: deque[tuple[Listed, asyncio.Task[Path | Broken]]] = deque()
        try:
            for number, listed in enumerate(files):
                pending.append((listed, asyncio.create_task(self._fetch(listed, self._folder / f"source-{number}"))))
                if len(pending) >= self._ahead:
                    await self._read(*pending.popleft(), take)
            while pending:
                await self._read(*pending.popleft(), take)
        finally:
            self._unpacker.close()
            await cancel_and_wait(*(task for _, task in pending))

    def drifted(self) -> Iterator[tuple[str, Broken]]:
        """Once all is read: paths of files that do not go with most of the others, whose records must go again."""
        if self._data.format not in ("jsonl", "parquet"):
            return
        unlike = unlike_columns if self._data.format == "parquet" else unlike_fields
        for shape, detail in unlike(self._catalog.shapes):
            for path in self._catalog.files_of(shape):
                yield path, Broken("schema_drift", detail, whole_object=True)

    def auxiliary(self, listed: Listed) -> bool:
        """Whether the object only tells of others."""
        return self._data.format == "mds" and (
            listed.path.rpartition("/")[2] == mds.INDEX or listed.path in self._copies
        )

    async def read_indexes(self, indexes: list[Listed], found: Callable[[str], Listed | None]) -> list[Found]:
        """Read the indexes of MDS folders; return what they name that does not exist.

        Raises:
            PoisonMessage: there is none, or one cannot be read.
        """
        missing: list[Found] = []
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
                    missing.append((listed, Broken("missing_file", detail)))
                elif len(there) > 1:  # packed and not: one of them is enough
                    self._copies.add(there[1])
        return missing

    def refuse_unread(self, listed: Listed) -> Broken | None:
        """What can be said about a file from the listing alone."""
        known = EXTENSIONS.get(self._data.format)
        if known is not None and not listed.path.lower().endswith(known):
            detail = f"extension {extension(listed.path)!r} is none of {', '.join(known)}"
            return Broken("unknown_extension", detail, whole_object=True)
        if self._data.format == "mds" and listed.path not in self._shards:
            return Broken("not_in_manifest", f"{mds.INDEX} does not name this file", whole_object=True)
        if listed.size == 0 and self._data.format not in ("text", "tokens"):
            return Broken("empty", "the file has no bytes", whole_object=True)
        return None

    async def _fetch(self, listed: Listed, local: Path) -> Path | Broken:
        if (broken := self.refuse_unread(listed)) is not None:
            return broken
        if self.joined is not None:
            return self.joined[listed.path]
        await self._source.download(listed, local)
        self._read_bytes.inc(listed.size)
        return local

    async def _read(self, listed: Listed, fetch: asyncio.Task[Path | Broken], take: Take) -> None:
        local = await fetch
        if isinstance(local, Broken):
            await take([(listed, local)])
            return
        with closing(self._records(listed.path, local)) as records:
            while found := await run_in_thread(_some, records):
                await take([(listed, record) for record in await self._decoded(found)])
        local.unlink()

    def _records(self, path: str, local: Path) -> rows.Records:
        data = self._data
        if data.format == "jsonl":
            return self._lines(path, local)
        if data.format == "parquet":
            return parquet.records(data, path, local, self._unpacker, partial(self._catalog.note_shape, path))
        if data.format == "webdataset":
            return tars.samples(data, path, local)
        if data.format == "mds":
            return mds.samples(data, path, local, self._shards[path])
        return rows.windows(data, path, local)

    def _lines(self, path: str, local: Path) -> rows.Records:
        profile = Profile()
        yield from rows.lines(self._data, path, local, profile)
        if (shape := profile.shape()) is not None:
            self._catalog.note_shape(path, shape)

    async def _decoded(self, found: list[Sound | Broken]) -> list[Sound | Broken]:
        """The records, with the images among their files decoded: what does not decode is set aside."""
        if self._data.format not in ("webdataset", "mds"):
            return found
        asked = [
            (place, images.Labelled(f"{name}.{ext}", record.label or "", record.value), content)
            for place, record in enumerate(found)
            if isinstance(record, Sound)
            for name, ext, content in _images(record)
        ]
        verdicts = await self._decoders.judge(self._image_judge, [(image, content) for _, image, content in asked])
        for (place, image, _), verdict in zip(asked, verdicts, strict=True):
            record = found[place]
            if isinstance(record, Broken):
                continue
            if isinstance(verdict, Broken):
                detail = f"its file .{image.path.partition('.')[2]}: {verdict.detail}"
                found[place] = Broken(verdict.code, detail, record.offset, record.sha256, label=record.label)
            elif not record.measures:  # of several images the first tells
                found[place] = replace(record, measures=verdict.measures, split_key=verdict.split_key)
        return found


def _some(records: Iterator[Sound | Broken]) -> list[Sound | Broken]:
    found: list[Sound | Broken] = []
    size = 0
    for record in islice(records, RECORDS_A_TURN):
        found.append(record)
        size += record.size if isinstance(record, Sound) else 0
        if size >= BYTES_A_TURN:
            break
    return found


def _images(record: Sound) -> Iterator[tuple[str, str, bytes]]:
    """Name, extension and content of each image in a sample."""
    assert record.content is not None
    at = 0
    for ext, size in record.fields or ((record.ext, record.size),):
        if ext.rpartition(".")[2] in images.EXTENSIONS:
            yield "sample", ext, record.content[at : at + size]
        at += size
