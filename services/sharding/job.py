"""One dataset: find it by its link, or build it from the index, shard by shard, the manifest last."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from pydantic import TypeAdapter, ValidationError

from contracts.datasets import (
    SPLITS,
    FieldStatistics,
    Manifest,
    canonical_json,
    dataset_uri,
    link_name,
    pack_name,
    shard_uri,
)
from contracts.events.dataset import DatasetIngested, ShardFile
from services.kit.bus import PoisonMessage, TransientError
from services.kit.concurrency import gather_limited, run_in_thread
from services.kit.progress import Progress
from services.kit.store.errors import ObjectChanged, ObjectExists, ObjectNotFound
from services.kit.store.objects import ObjectStore, is_young
from services.sharding import metrics
from services.sharding.core.manifest import FLAT, build_manifest, journal_name
from services.sharding.core.rows import Rows
from services.sharding.journal import Journal
from services.sharding.pack_cache import PackCache
from services.sharding.shard_plan import PlannedShard, ShardPlan
from services.sharding.writer import BATCH_ROWS, ContentMismatch, Contents, ShardWriter, batches

log = structlog.get_logger(__name__)

#: Shards that are fetched for or uploaded while others are written.
SHARDS_AHEAD = 2
PARALLEL_READS = 8
PARALLEL_HEADS = 16
STATISTICS = TypeAdapter(dict[str, FieldStatistics])


@dataclass(frozen=True, slots=True)
class Dataset:
    """A complete dataset in the store."""

    dataset_id: str
    manifest_uri: str
    manifest: Manifest
    reused: bool


async def find_dataset(objects: ObjectStore, bucket: str, dataset_id: str) -> Dataset:
    """Return the dataset of that id; the manifest's hash must be the id.

    Raises:
        ObjectNotFound: there is no such dataset.
        ValueError: there is a manifest of another content.
    """
    uri = dataset_uri(bucket, dataset_id)
    content = await objects.get(uri)
    if hashlib.sha256(content).hexdigest() != dataset_id:
        raise ValueError(f"{uri} is damaged: its hash is not the dataset's id")
    return Dataset(dataset_id, uri, Manifest.model_validate_json(content), reused=True)


async def find_made(objects: ObjectStore, bucket: str, ingested: DatasetIngested) -> Dataset | None:
    """Return the dataset made from this input before, if all of it is in the store.

    Raises:
        PoisonMessage: the object that links the two cannot be read.
    """
    link = _link_uri(ingested)
    try:
        dataset_id = json.loads(await objects.get(link))["dataset_id"]
        dataset = await find_dataset(objects, bucket, dataset_id)
    except ObjectNotFound:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise PoisonMessage(f"{error!r}; remove {link} to have the dataset made again") from error

    async def is_missing(sha256: str, size_bytes: int) -> bool:
        try:
            return (await objects.head(shard_uri(bucket, sha256))).size_bytes != size_bytes
        except ObjectNotFound:
            return True

    files = (file for split in dataset.manifest.splits.values() for file in split.shards)
    checks = (is_missing(*part) for file in files for part in _parts(file))
    missing = sum(await gather_limited(checks, limit=PARALLEL_HEADS))
    if missing:
        log.warning("a dataset is incomplete, making it again", dataset_id=dataset_id, missing=missing)
        return None
    return dataset


def _link_uri(ingested: DatasetIngested) -> str:
    folder = ingested.index_uri.rpartition("/")[0]
    return f"{folder}/{link_name(ingested.fingerprint, ingested.data.shard_bytes)}"


class ShardingJob:
    """One job's work. The result depends on the index and the settings alone."""

    def __init__(
        self,
        objects: ObjectStore,
        folder: Path,
        ingested: DatasetIngested,
        bucket: str,
        *,
        workers: int = 2,
        room: asyncio.Semaphore | None = None,
        disk_bytes: int = 8 * 2**30,
        progress: Progress | None = None,
    ) -> None:
        """Write ``workers`` shards at a time, or as many as the semaphore ``room``, shared by jobs, allows."""
        self._objects, self._folder = objects, folder
        self._ingested, self._bucket = ingested, bucket
        self._source_uri = ingested.index_uri.rpartition("/")[0]
        self._writing = room or asyncio.Semaphore(workers)
        #: Shards that are on the local disk at a time.
        self._under_way = workers + SHARDS_AHEAD
        self._packs = PackCache(objects, folder / "packs", self._source_uri, disk_bytes)
        data = ingested.data
        self._link = _link_uri(ingested)
        self._journal = Journal(objects, f"{self._source_uri}/{journal_name(ingested.fingerprint, data.shard_bytes)}")
        flat = data.format in FLAT
        self._plan = ShardPlan(folder / "plan", ingested.classes, data.split.seed, data.shard_bytes, flat=flat)
        self._progress = progress or Progress("sharding")

    async def run(self) -> Dataset:
        """Return the dataset; make it unless it exists.

        Raises:
            PoisonMessage: a record's content is not what was ingested.
        """
        if (found := await find_made(self._objects, self._bucket, self._ingested)) is not None:
            return found
        statistics = await self._statistics()
        await self._make_plan()
        try:
            shards = await self._make_shards()
        finally:
            await self._packs.close()
        dataset = await self._publish(shards, statistics)
        await self._objects.put(self._link, canonical_json({"dataset_id": dataset.dataset_id}))
        await self._journal.remove()
        return dataset

    async def _statistics(self) -> dict[str, FieldStatistics]:
        uri = self._ingested.statistics_uri
        if uri is None:
            return {}
        try:
            return STATISTICS.validate_json(await self._objects.get(uri))
        except ValidationError as error:
            raise PoisonMessage(
                f"{uri} holds no statistics: remove it and done.json beside it, and send the request again"
            ) from error

    async def _make_plan(self) -> None:
        index = self._folder / "index.jsonl"
        await self._objects.download(self._ingested.index_uri, index)
        await run_in_thread(self._plan.build, index)
        index.unlink()
        self._progress.total = sum(shard.samples for shard in self._plan.shards)

    # -- shards -------------------------------------------------------------------

    async def _make_shards(self) -> dict[str, list[ShardFile]]:
        finished = await self._journal.read()
        await self._packs.list_packs()
        work = (self._ensure_shard(shard, finished.get(shard.name)) for shard in self._plan.shards)
        made = await gather_limited(work, limit=self._under_way)
        named = sorted(zip(self._plan.shards, made, strict=True), key=lambda pair: pair[0].number)
        return {split: [file for shard, file in named if shard.split == split] for split in SPLITS}

    async def _ensure_shard(self, shard: PlannedShard, finished: ShardFile | None) -> ShardFile:
        """Make sure that one shard is in the store: reuse an earlier attempt's, or write it."""
        if finished is not None and finished.samples == shard.samples and await self._is_there(finished):
            file = finished
            self._progress.found += shard.samples
        else:
            file = await self._create_shard(shard)
            await self._journal.record(shard.name, file)
            metrics.SAMPLES.labels(shard.split).inc(shard.samples)
        self._progress.done += shard.samples
        self._progress.done_bytes += file.size_bytes
        return file

    async def _is_there(self, file: ShardFile) -> bool:
        """Return whether both objects are in the store; renew the age of old ones."""
        return all([await self._has(*part) for part in _parts(file)])

    async def _has(self, sha256: str, size_bytes: int) -> bool:
        try:
            there = await self._objects.head(shard_uri(self._bucket, sha256))
            if there.size_bytes != size_bytes or is_young(there.modified_at):
                return there.size_bytes == size_bytes
            return await self._objects.renew(there)
        except ObjectChanged:
            return await self._has(sha256, size_bytes)
        except ObjectNotFound:
            return False

    async def _create_shard(self, shard: PlannedShard) -> ShardFile:
        """Write the shard and upload it.

        Raises:
            PoisonMessage: a record's content is not what was ingested.
        """
        try:
            return await self._write_and_upload(shard)
        except _PackCorrupted as error:
            # The local copy may be corrupted. If the object in the store is, the second attempt fails too.
            log.warning("a pack is not what was ingested, fetching it again", pack=error.pack, key=error.key)
            self._packs.discard_copy(error.pack)
        try:
            return await self._write_and_upload(shard)
        except _PackCorrupted as error:
            uri = f"{self._source_uri}/{pack_name(error.pack)}"
            raise PoisonMessage(
                f"{uri} is damaged (record {error.key}): remove {self._source_uri}/done.json and send the request "
                "again, to have the source read again"
            ) from error

    async def _write_and_upload(self, shard: PlannedShard) -> ShardFile:
        path, index_path = (self._folder / f"{shard.name.replace('/', '-')}.{end}" for end in ("shard", "idx"))
        try:
            file = await self._write(shard, path, index_path)
            for local, sha256 in ((path, file.sha256), (index_path, file.index_sha256)):
                await self._upload(local, sha256)
        finally:
            path.unlink(missing_ok=True)
            index_path.unlink(missing_ok=True)
        metrics.SHARDS.labels(shard.split).inc()
        return file

    async def _upload(self, path: Path, sha256: str) -> None:
        if await self._has(sha256, path.stat().st_size):
            metrics.SHARD_BYTES.labels("there").inc(path.stat().st_size)
            return
        uri = shard_uri(self._bucket, sha256)
        try:
            await self._objects.put_file(path, uri, sha256=sha256, if_absent=True)
            metrics.SHARD_BYTES.labels("sent").inc(path.stat().st_size)
        except ObjectExists:
            there = await self._objects.head(uri)
            if there.size_bytes == path.stat().st_size and is_young(there.modified_at):
                log.info("another instance was faster with the same shard", sha256=sha256)
                return
            if there.size_bytes != path.stat().st_size:
                log.warning("an object does not match its name, replacing it", uri=uri)
            await self._objects.put_file(path, uri, sha256=sha256)

    async def _write(self, shard: PlannedShard, path: Path, index_path: Path) -> ShardFile:
        encoder, flat = self._plan.encoder, self._plan.flat
        open_writer = partial(ShardWriter, path, shard.name, encoder.extensions, encoder.class_contents, flat=flat)
        try:
            async with self._packs.pin(await run_in_thread(self._packs_of, shard)) as packs:
                with closing(open_writer()) as writer:
                    for read in self._plan.rows(shard, BATCH_ROWS):
                        for batch in batches(read):
                            await self._add(writer, batch, packs, path)
                    return await run_in_thread(writer.finish, index_path)
        except ObjectNotFound as error:
            if "/pack-" not in str(error):
                raise
            # The packs were collected after their dataset was made. Without done.json the next request reads the source
            # again.
            await self._objects.delete(f"{self._source_uri}/done.json")
            raise PoisonMessage(f"{error} was removed by garbage collection; send the request again") from error

    def _packs_of(self, shard: PlannedShard) -> list[int]:
        found = [np.unique(rows["pack"]) for rows in self._plan.rows(shard, BATCH_ROWS)]
        return [int(pack) for pack in np.unique(np.concatenate(found)) if pack >= 0]

    async def _add(self, writer: ShardWriter, batch: Rows, packs: Mapping[int, Path], path: Path) -> None:
        """Append one batch; read records that are in no pack from the source."""
        extras = self._plan.extras(batch) if (batch["extra"] >= 0).any() else {}
        unpacked = np.flatnonzero(batch["pack"] < 0).tolist()
        local = {row: path.with_name(f"{path.name}-{row}.source") for row in unpacked}

        async def fetch(row: int) -> None:
            extra = extras[int(batch["extra"][row])]
            size_bytes = int(batch["size"][row])
            await self._objects.download(extra["uri"], local[row], etag=extra["etag"], size_bytes=size_bytes)

        try:
            await gather_limited(map(fetch, unpacked), limit=PARALLEL_READS)
            async with self._writing:
                await run_in_thread(_append, writer, batch, extras, packs, local)
        except ContentMismatch as error:
            row = batch[error.row]
            if row["pack"] >= 0:
                raise _PackCorrupted(int(row["pack"]), row["key"].decode()) from error
            uri = extras[int(row["extra"])]["uri"]
            raise PoisonMessage(f"{uri} changed after it was ingested: send the request again") from error
        except ValueError as error:
            raise PoisonMessage(f"{error}: it cannot be in a shard; rename it, or leave it out") from error
        finally:
            for source in local.values():
                source.unlink(missing_ok=True)

    # -- manifest -----------------------------------------------------------------

    async def _publish(self, shards: dict[str, list[ShardFile]], statistics: dict[str, FieldStatistics]) -> Dataset:
        """Check that all shards exist, then write the manifest."""
        self._progress.phase = "uploading"
        files = [file for split in shards.values() for file in split]
        there = await gather_limited(map(self._is_there, files), limit=PARALLEL_HEADS)
        if not all(there):
            await self._journal.remove()
            raise TransientError(
                f"{there.count(False)} shards were removed from the store meanwhile: making them again"
            )
        manifest = build_manifest(self._ingested, shards, statistics)
        content = manifest.to_bytes()
        dataset_id = hashlib.sha256(content).hexdigest()
        uri = dataset_uri(self._bucket, dataset_id)
        try:
            await self._objects.put(uri, content, if_absent=True, content_type="application/json")
        except ObjectExists:
            log.info("another instance was faster with the same dataset", dataset_id=dataset_id)
        return Dataset(dataset_id, uri, manifest, reused=False)


def _parts(file: ShardFile) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return the hash and the size of a shard and of its index."""
    return (file.sha256, file.size_bytes), (file.index_sha256, file.index_bytes)


class _PackCorrupted(Exception):
    """The content of a pack differs from what was ingested."""

    def __init__(self, pack: int, key: str) -> None:
        super().__init__(f"pack {pack}, record {key}")
        self.pack, self.key = pack, key


def _append(
    writer: ShardWriter,
    batch: Rows,
    extras: Mapping[int, Mapping[str, Any]],
    packs: Mapping[int, Path],
    local: Mapping[int, Path],
) -> None:
    """Write a batch whose contents are on the disk, in packs and in files of their own."""
    numbers = batch["pack"].tolist()
    needed = {number: packs[number] for number in set(numbers) if number >= 0}
    with _open_files(needed) as of_packs, _open_files(local) as of_rows:
        handles = [of_packs[number] if number >= 0 else of_rows[row] for row, number in enumerate(numbers)]
        offsets = [max(offset, 0) for offset in batch["offset"].tolist()]
        writer.add(batch, extras, Contents(handles, offsets))


@contextmanager
def _open_files(paths: Mapping[int, Path]) -> Iterator[dict[int, int]]:
    """Open files for reading during the block."""
    with ExitStack() as stack:
        files = {number: stack.enter_context(path.open("rb", buffering=0)) for number, path in paths.items()}
        yield {number: file.fileno() for number, file in files.items()}
