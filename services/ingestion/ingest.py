"""One ingestion: list, fingerprint, and unless the result is there already, judge every record."""

from __future__ import annotations

import asyncio
import csv
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import structlog

from contracts.datasets import IndexRecord, canonical_json
from contracts.events.train import DataSource
from services.ingestion import metrics
from services.ingestion.catalog import Catalog, Listed
from services.ingestion.core.keys import Splitter, UnsafePath, check_path, is_data
from services.ingestion.core.records import MAX_DETAIL_CHARS, MAX_LABEL_CHARS, Broken, Sound
from services.ingestion.core.verdict import Fingerprint, Outcome, Tally
from services.ingestion.formats import images
from services.ingestion.formats.rows import RowReader
from services.ingestion.packs import KEEP_BELOW_BYTES, PackWriter
from services.kit.bus import Poison
from services.kit.concurrency import all_of, in_thread
from services.kit.objects import Exists, Missing, ObjectInfo, Objects, split_uri
from services.kit.reader import Pinned, Reader
from services.kit.settings import Settings

log = structlog.get_logger(__name__)

LABELS = "labels.csv"
#: Images are read and decoded in batches of at most so many, and of about so many bytes.
BATCH_IMAGES, BATCH_BYTES = 128, 8 * 2**20
#: Rows taken between two looks at the event loop.
ROWS_A_TURN = 2000
LISTED_A_TURN = 1000
LOG_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Ingested:
    """Where the result is and what it amounts to."""

    fingerprint: str
    folder_uri: str
    outcome: Outcome
    reused: bool

    @property
    def index_uri(self) -> str:
        return f"{self.folder_uri}/index.jsonl"

    @property
    def quarantine_uri(self) -> str:
        return f"{self.folder_uri}/quarantine.jsonl"


@dataclass(frozen=True, slots=True)
class _Image:
    info: Pinned
    path: str
    label: str


class Ingest:
    """One job's work. The result depends on the source and the settings alone, never on timing."""

    def __init__(
        self,
        settings: Settings,
        objects: Objects,
        reader: Reader,
        folder: Path,
        data: DataSource,
        concurrency: int = 16,
    ) -> None:
        self._settings, self._objects, self._reader, self._folder = settings, objects, reader, folder
        self._data = data
        self._bucket, self._prefix = split_uri(data.source)
        #: Single reads at a time; batches of images, or files of rows, that are under way at a time.
        self._concurrency = concurrency
        self._ahead = min(concurrency, 3)
        self._reads = asyncio.Semaphore(concurrency)
        self._splitter = Splitter.of(data.split)
        self._tally = Tally()
        self._packs = PackWriter(folder)
        self._quarantine_path = folder / "quarantine.jsonl"
        self._catalog: Catalog
        self._quarantine: BinaryIO
        #: The part of the objects' keys that is not part of their paths.
        self._folder_key = ""
        self._logged_at = self._started_at = time.monotonic()

    async def run(self) -> Ingested:
        """List the source and return its index, made now or earlier.

        Raises:
            Poison: the source is missing or empty, or changed while it was read.
        """
        with closing(Catalog(self._folder / "catalog.sqlite")) as self._catalog:
            fingerprint = await self._list()
            folder_uri = f"s3://{self._settings.bucket_datasets}/ingestions/{fingerprint}"
            await self._objects.ensure_bucket(self._settings.bucket_datasets)
            try:
                done = json.loads(await self._objects.get(f"{folder_uri}/done.json"))
                return Ingested(fingerprint, folder_uri, Outcome.of(done), reused=True)
            except Missing:
                pass
            with self._quarantine_path.open("wb") as self._quarantine:
                if self._data.format == "images":
                    await self._judge_images(folder_uri)
                else:
                    await self._judge_rows(folder_uri)
            done = {"version": 1, "fingerprint": fingerprint, **self._tally.to_dict()}
            await self._store(folder_uri, done)
            return Ingested(fingerprint, folder_uri, Outcome.of(done), reused=False)

    # -- listing --------------------------------------------------------------

    async def _list(self) -> str:
        source = self._data.source
        try:
            count = await self._list_prefix()
        except Missing as error:
            raise Poison(f"there is no bucket {self._bucket!r}: check data.source ({source})") from error
        if count == 0:
            raise Poison(f"there is no object under {source}: check data.source, or upload the data first")
        return await in_thread(self._fingerprint)

    async def _list_prefix(self) -> int:
        """Take down the listing. A source that is one object's key means that object."""
        # With the slash, digits/ does not take in digits2/.
        folder = self._prefix if not self._prefix or self._prefix.endswith("/") else f"{self._prefix}/"
        count = 0
        async for page in _chunks(self._objects.list(f"s3://{self._bucket}/{folder}"), LISTED_A_TURN):
            listed = [Listed(i.key, i.etag, i.size_bytes) for i in page if is_data(i.key.removeprefix(folder))]
            self._catalog.list_objects(listed)
            count += len(listed)
        if count == 0 and folder != self._prefix:
            try:
                info = await self._objects.head(self._data.source)
            except Missing:
                return 0
            self._catalog.list_objects([Listed(info.key, info.etag, info.size_bytes)])
            folder = info.key.rpartition("/")[0]
            folder, count = f"{folder}/" if folder else "", 1
        self._folder_key = folder
        return count

    def _fingerprint(self) -> str:
        fingerprint = Fingerprint(self._data)
        for listed in self._catalog.objects():
            fingerprint.add(listed.key, listed.etag, listed.size)
        return fingerprint.hexdigest()

    def _info(self, listed: Listed) -> Pinned:
        return Pinned(self._bucket, listed.key, listed.size, listed.etag)

    def _files(self) -> Iterator[tuple[Pinned, str]]:
        """Each object with its path under the prefix, in the order of keys. Unsafe ones are set aside."""
        for listed in self._catalog.objects():
            info, path = self._info(listed), listed.key.removeprefix(self._folder_key)
            self._tally.objects += 1
            try:
                check_path(path)
            except UnsafePath as error:
                self._set_aside(info, Broken("unsafe_key", f"the object's key {error}: rename it", whole_object=True))
                continue
            yield info, path

    # -- images -----------------------------------------------------------------

    async def _judge_images(self, folder_uri: str) -> None:
        labels = await self._read_labels()
        pending: deque[asyncio.Task[list[tuple[Pinned, Sound | Broken]]]] = deque()
        try:
            for batch in self._image_batches(labels):
                pending.append(asyncio.create_task(self._judge_batch(batch)))
                if len(pending) >= self._ahead:
                    await self._take(await pending.popleft(), folder_uri)
            while pending:
                await self._take(await pending.popleft(), folder_uri)
        finally:
            await _cancel(pending)
        if labels is not None:
            for file in self._catalog.labels_without_object(self._folder_key):
                self._set_aside(labels, Broken("missing_file", f"labels {file!r}, which does not exist"))

    async def _judge_batch(self, batch: list[_Image]) -> list[tuple[Pinned, Sound | Broken]]:
        contents = await all_of((self._read(image.info) for image in batch), at_a_time=self._concurrency)

        def judge() -> list[tuple[Pinned, Sound | Broken]]:
            return [
                (image.info, images.judge(image.path, content, image.label, KEEP_BELOW_BYTES))
                for image, content in zip(batch, contents, strict=True)
            ]

        return await in_thread(judge)

    async def _read(self, info: Pinned) -> bytes:
        async with self._reads:
            content = await self._reader.read(info)
        metrics.READ_BYTES.labels(self._data.format).inc(len(content))
        return content

    def _image_batches(self, labels: Pinned | None) -> Iterator[list[_Image]]:
        batch: list[_Image] = []
        size = 0
        for info, path in self._files():
            if path == LABELS:
                self._tally.objects -= 1
                continue
            label = (
                (path.rpartition("/")[0] and path.partition("/")[0]) if labels is None else self._catalog.label(path)
            )
            broken = images.refuse_unread(path, info.size_bytes)
            if broken is None and not label:
                broken = Broken("no_label", _no_label(labels, label), whole_object=True)
            elif broken is None and len(str(label)) > MAX_LABEL_CHARS:
                broken = Broken("invalid_label", f"a label of {len(str(label))} characters", whole_object=True)
            if broken is not None:
                self._set_aside(info, broken)
                continue
            if batch and (len(batch) >= BATCH_IMAGES or size + info.size_bytes > BATCH_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(_Image(info, path, str(label)))
            size += info.size_bytes
        if batch:
            yield batch

    async def _read_labels(self) -> Pinned | None:
        listed = self._catalog.find(f"{self._folder_key}{LABELS}")
        if listed is None:
            return None
        info, path = self._info(listed), self._folder / LABELS
        await self._reader.download(info, path)
        try:
            await in_thread(self._parse_labels, info, path)
        except (UnicodeDecodeError, csv.Error) as error:
            raise Poison(f"{info.uri} cannot be read as CSV in UTF-8: {error}") from error
        return info

    def _parse_labels(self, info: Pinned, path: Path) -> None:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            columns = [name.strip() for name in rows.fieldnames or ()]
            if not {"file", "label"} <= set(columns):
                raise Poison(f"{info.uri} needs the columns 'file' and 'label'; it has {columns}")
            rows.fieldnames = columns
            for row in rows:
                name, label = (row["file"] or "").strip(), (row["label"] or "").strip()
                known = self._catalog.add_label(name, label)
                if known is not None:
                    self._set_aside(info, Broken("duplicate_label", f"{name!r} is labelled twice", rows.line_num))
                    if known != label:
                        self._catalog.forget_label(name)

    # -- jsonl, parquet, text -----------------------------------------------------

    async def _judge_rows(self, folder_uri: str) -> None:
        rows = RowReader(self._data)
        pending: deque[tuple[Pinned, str, asyncio.Task[Path]]] = deque()
        try:
            for number, (info, path) in enumerate(self._files()):
                if (broken := rows.refuse_unread(path, info.size_bytes)) is not None:
                    self._set_aside(info, broken)
                    continue
                local = self._folder / f"source-{number}"
                pending.append((info, path, asyncio.create_task(self._fetch(info, local))))
                if len(pending) >= self._ahead:
                    await self._judge_file(rows, *pending.popleft(), folder_uri)
            while pending:
                await self._judge_file(rows, *pending.popleft(), folder_uri)
        finally:
            await _cancel(task for _, _, task in pending)

    async def _fetch(self, info: Pinned, local: Path) -> Path:
        async with self._reads:
            await self._reader.download(info, local)
        metrics.READ_BYTES.labels(self._data.format).inc(info.size_bytes)
        return local

    async def _judge_file(
        self, rows: RowReader, info: Pinned, path: str, fetch: asyncio.Task[Path], folder_uri: str
    ) -> None:
        local = await fetch
        with closing(rows.records(path, local)) as records:
            while found := await in_thread(lambda: list(islice(records, ROWS_A_TURN))):
                await self._take([(info, record) for record in found], folder_uri)
        local.unlink()

    # -- taking records -----------------------------------------------------------

    async def _take(self, found: list[tuple[Pinned, Sound | Broken]], folder_uri: str) -> None:
        """Note a batch, in order, and send off the packs that it filled."""
        await in_thread(self._note, found)
        await self._upload_packs(folder_uri)
        now = time.monotonic()
        if now - self._logged_at > LOG_EVERY_S:
            self._logged_at = now
            done = self._tally.accepted + self._tally.broken
            log.info("ingesting", records=done, records_per_s=round(done / (now - self._started_at)))

    def _note(self, found: list[tuple[Pinned, Sound | Broken]]) -> None:
        for info, record in found:
            if isinstance(record, Broken):
                self._set_aside(info, record)
            elif self._catalog.has_record(record.key):
                detail = f"another file has the key {record.key!r}: names must differ in more than the extension"
                self._set_aside(info, Broken("duplicate_key", detail, record.offset, record.sha256))
            else:
                self._accept(info, record)

    def _accept(self, info: Pinned, record: Sound) -> None:
        split = self._splitter.split_of(record.key)
        pack, pack_offset = self._packs.add(record.content) if record.content is not None else (None, None)
        line: IndexRecord = {
            "key": record.key,
            "split": split,
            "uri": info.uri,
            "etag": info.etag,
            "offset": record.offset,
            "label": record.label,
            "ext": record.ext,
            "size": record.size,
            "sha256": record.sha256,
            "pack": pack,
            "pack_offset": pack_offset,
        }
        self._catalog.add_record(record.key, canonical_json(line) + b"\n")
        self._tally.accept(split, record.size, record.label, record.continuous)
        metrics.RECORDS.labels(self._data.format, "accepted").inc()

    def _set_aside(self, info: Pinned, broken: Broken) -> None:
        entry = {
            "uri": info.uri,
            "etag": info.etag,
            "offset": broken.offset,
            "code": broken.code,
            "detail": broken.detail[:MAX_DETAIL_CHARS],
            "sha256": broken.sha256,
        }
        self._quarantine.write(canonical_json(entry) + b"\n")
        place = info.uri if broken.offset is None else f"{info.uri} at {broken.offset}"
        self._tally.set_aside(broken.code, f"{place}: {broken.detail}"[: 2 * MAX_DETAIL_CHARS], broken.whole_object)
        metrics.RECORDS.labels(self._data.format, "quarantined").inc()

    # -- storing --------------------------------------------------------------------

    async def _upload_packs(self, folder_uri: str) -> None:
        while self._packs.finished:
            path = self._packs.finished.pop(0)
            await self._objects.upload(path, f"{folder_uri}/{path.name}")
            path.unlink()

    async def _store(self, folder_uri: str, done: dict[str, object]) -> None:
        """Upload everything, and what says that it is complete last."""
        self._packs.finish()
        await self._upload_packs(folder_uri)
        index = self._folder / "index.jsonl"
        await in_thread(self._catalog.write_index, index)
        await self._objects.upload(index, f"{folder_uri}/index.jsonl")
        await self._objects.upload(self._quarantine_path, f"{folder_uri}/quarantine.jsonl")
        try:
            await self._objects.put(f"{folder_uri}/done.json", canonical_json(done), if_absent=True)
        except Exists:
            log.info("another instance was faster with the same result", folder=folder_uri)


def _no_label(labels: Pinned | None, label: str | None) -> str:
    if labels is None:
        return "the image is in no folder: put it into one named after its class, or add a labels.csv"
    if label is None:
        return "labels.csv does not name this file"
    return "labels.csv gives this file an empty label, or two that differ"


async def _chunks(items: AsyncIterator[ObjectInfo], size: int) -> AsyncIterator[list[ObjectInfo]]:
    chunk: list[ObjectInfo] = []
    async for item in items:
        chunk.append(item)
        if len(chunk) >= size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
