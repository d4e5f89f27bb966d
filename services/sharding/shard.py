"""One dataset: find it by its link, or make it from the index and upload it, manifest last."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from contracts.datasets import SPLITS, IndexRecord, Manifest, canonical_json, dataset_uri, pack_name
from contracts.events.dataset import DatasetIngested, ShardFile
from services.kit.bus import Poison
from services.kit.concurrency import all_of, in_thread
from services.kit.objects import Exists, Missing, Objects, split_uri
from services.kit.reader import Pinned, Reader
from services.sharding import metrics
from services.sharding.core import plan
from services.sharding.shards import ShardWriter

log = structlog.get_logger(__name__)

#: Samples are taken in batches of at most so many, and of about so many bytes.
BATCH_SAMPLES, BATCH_BYTES = 512, 64 * 2**20
PARALLEL_TRANSFERS = 4
LOG_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset that is in the store, whole."""

    dataset_id: str
    manifest_uri: str
    manifest: Manifest
    reused: bool


async def look_up(objects: Objects, bucket: str, dataset_id: str) -> Dataset:
    """The dataset of that id, checked against it.

    Raises:
        Missing: there is none.
        ValueError: there is a manifest of another content.
    """
    uri = dataset_uri(bucket, dataset_id)
    content = await objects.get(uri)
    if hashlib.sha256(content).hexdigest() != dataset_id:
        raise ValueError(f"{uri} is damaged: its hash is not the dataset's id")
    return Dataset(dataset_id, uri, Manifest.model_validate_json(content), reused=True)


class Shard:
    """One job's work. What comes out depends on the index and the settings alone."""

    def __init__(
        self,
        objects: Objects,
        reader: Reader,
        folder: Path,
        ingested: DatasetIngested,
        bucket: str,
        concurrency: int = 8,
    ) -> None:
        self._objects, self._reader, self._folder = objects, reader, folder
        self._ingested, self._bucket = ingested, bucket
        self._source_uri = ingested.index_uri.rpartition("/")[0]
        self._concurrency = concurrency
        self._class_index = {name: number for number, name in enumerate(ingested.classes)}

    async def run(self) -> Dataset:
        """Return the dataset, found or made.

        Raises:
            Poison: a record's content is not what was ingested.
        """
        link = f"{self._source_uri}/{plan.link_name(self._ingested.fingerprint, self._ingested.data.shard_bytes)}"
        try:
            dataset_id = json.loads(await self._objects.get(link))["dataset_id"]
            return await look_up(self._objects, self._bucket, dataset_id)
        except Missing:
            pass
        except ValueError as error:
            raise Poison(f"{error}; remove {link} to have the dataset made anew") from error
        index = self._folder / "index.jsonl"
        await self._objects.download(self._ingested.index_uri, index)
        order, packs = await in_thread(self._read_index, index)
        await self._download_packs(packs)
        shards = {split: await self._write_split(index, order, split) for split in SPLITS}
        dataset = await self._upload(shards)
        await self._objects.put(link, canonical_json({"dataset_id": dataset.dataset_id}))
        return dataset

    # -- reading ------------------------------------------------------------------

    def _read_index(self, index: Path) -> tuple[plan.Order, list[int]]:
        """The order of the samples, and the packs that hold them."""
        order, packs, offset = plan.Order(self._ingested.data.split.seed), set(), 0
        with index.open("rb") as file:
            for line in file:
                record: IndexRecord = json.loads(line)
                order.add(record["key"], record["split"], offset)
                offset += len(line)
                if record["pack"] is not None:
                    packs.add(record["pack"])
        return order, sorted(packs)

    async def _download_packs(self, packs: list[int]) -> None:
        async def download(number: int) -> None:
            name = pack_name(number)
            await self._objects.download(f"{self._source_uri}/{name}", self._folder / name)

        await all_of((download(number) for number in packs), at_a_time=PARALLEL_TRANSFERS)

    # -- writing ------------------------------------------------------------------

    async def _write_split(self, index: Path, order: plan.Order, split: str) -> list[ShardFile]:
        writer = ShardWriter(self._folder, split, self._ingested.data.shard_bytes)
        started = logged = time.monotonic()
        written = 0
        packs: dict[int, int] = {}
        with closing(_records(index, order.offsets(split))) as records, _closing_handles(packs):
            batches = _batches(records)
            while batch := await in_thread(next, batches, None):
                fetched = await self._fetch(batch)
                await in_thread(self._write_batch, writer, batch, fetched, packs)
                written += len(batch)
                if time.monotonic() - logged > LOG_EVERY_S:
                    logged = time.monotonic()
                    rate = round(written / (logged - started))
                    log.info("sharding", split=split, samples=written, of=order.count(split), samples_per_s=rate)
        await in_thread(writer.finish)
        metrics.SAMPLES.labels(split).inc(written)
        return writer.shards

    async def _fetch(self, batch: list[IndexRecord]) -> dict[str, bytes]:
        """The contents that are in no pack, by key, read from the source."""

        async def fetch(record: IndexRecord) -> bytes:
            bucket, key = split_uri(record["uri"])
            return await self._reader.read(Pinned(bucket, key, record["size"], record["etag"]))

        unpacked = [record for record in batch if record["pack"] is None]
        contents = await all_of(map(fetch, unpacked), at_a_time=self._concurrency)
        return {record["key"]: content for record, content in zip(unpacked, contents, strict=True)}

    def _write_batch(
        self, writer: ShardWriter, batch: list[IndexRecord], fetched: dict[str, bytes], packs: dict[int, int]
    ) -> None:
        for record in batch:
            content = fetched.get(record["key"])
            if content is None:
                content = self._from_pack(record, packs)
            if hashlib.sha256(content).hexdigest() != record["sha256"]:
                raise Poison(f"{record['uri']} changed after it was ingested ({record['key']}): send the request again")
            writer.add(record["key"], plan.members(record, content, self._class_index))

    def _from_pack(self, record: IndexRecord, packs: dict[int, int]) -> bytes:
        number, offset = record["pack"], record["pack_offset"]
        assert number is not None
        assert offset is not None
        if number not in packs:
            packs[number] = os.open(self._folder / pack_name(number), os.O_RDONLY)
        return os.pread(packs[number], record["size"], offset)

    # -- uploading ----------------------------------------------------------------

    async def _upload(self, shards: dict[str, list[ShardFile]]) -> Dataset:
        manifest = plan.manifest(self._ingested, shards)
        content = manifest.to_bytes()
        dataset_id = hashlib.sha256(content).hexdigest()

        async def upload(path: str) -> None:
            await self._objects.upload(self._folder / path, dataset_uri(self._bucket, dataset_id, path))

        paths = [path for files in shards.values() for shard in files for path in (shard.path, shard.index_path)]
        await all_of(map(upload, paths), at_a_time=PARALLEL_TRANSFERS)
        uri = dataset_uri(self._bucket, dataset_id)
        try:
            await self._objects.put(uri, content, if_absent=True, content_type="application/json")
        except Exists:
            log.info("another instance was faster with the same dataset", dataset_id=dataset_id)
        for split, files in shards.items():
            metrics.SHARDS.labels(split).inc(len(files))
            metrics.SHARD_BYTES.labels(split).inc(sum(shard.size_bytes for shard in files))
        return Dataset(dataset_id, uri, manifest, reused=False)


def _records(index: Path, offsets: Iterable[int]) -> Generator[IndexRecord, None, None]:
    """Index lines at ``offsets``."""
    with index.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            record: IndexRecord = json.loads(file.readline())
            yield record


@contextmanager
def _closing_handles(handles: dict[int, int]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles.values():
            os.close(handle)


def _batches(records: Iterator[IndexRecord]) -> Iterator[list[IndexRecord]]:
    batch: list[IndexRecord] = []
    size = 0
    for record in records:
        if batch and (len(batch) >= BATCH_SAMPLES or size + record["size"] > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += record["size"]
    if batch:
        yield batch
