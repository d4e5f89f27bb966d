"""Garbage collection: reads the store and the open jobs, asks the core, deletes. A lease excludes a second one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import structlog
from pydantic_core import from_json

from contracts import topology
from contracts.datasets import Manifest
from contracts.events.dataset import ShardFile
from services.kit.bus import Bus
from services.kit.concurrency import run_ahead, run_in_thread
from services.kit.garbage_collector import GarbageCollector
from services.kit.hash_partitions import HashPartitions
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectInfo, ObjectStore
from services.kit.sweep import delete_unchanged, sweep_unnamed
from services.kit.workdir import Workdir
from services.sharding import metrics
from services.sharding.core import garbage
from services.sharding.core.garbage import INGESTION_KEY, NamedIngestions, StoredObject
from services.sharding.settings import ShardingSettings

log = structlog.get_logger(__name__)

PARALLEL_READS = 16


@dataclass(frozen=True, slots=True)
class GarbageSummary:
    """What one collection found and removed."""

    shards: int
    ingestion_objects: int
    freed_bytes: int
    kept_shards: int


async def collect_garbage(bus: Bus, objects: ObjectStore, settings: ShardingSettings) -> GarbageSummary:
    """Remove objects without a reference. It is safe while datasets are being made: see ``core/garbage.py``.

    Raises:
        ValueError: a manifest cannot be read, so its references are unknown, or the disk is full; nothing was deleted.
    """
    async with Workdir(settings.data_dir / "sharding") as workdir:
        with workdir.temporary("garbage-") as folder:
            return await _Collection(bus, objects, settings, HashPartitions(Path(folder))).run()


class _Collection:
    """One collection. Names of shards are in files, and objects of one ingestion at a time in memory."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: ShardingSettings, names: HashPartitions) -> None:
        self._bus, self._objects, self._names = bus, objects, names
        self._root = f"s3://{settings.bucket_datasets}/"
        self._grace = timedelta(seconds=settings.dataset_gc_grace_s)
        self._keep_packs = timedelta(seconds=settings.dataset_keep_packs_s)
        self._now = bus.clock.now()
        self._freed_bytes = 0

    async def run(self) -> GarbageSummary:
        # Keep this order: a journal or a manifest then shows each shard of a dataset that is completed meanwhile.
        await self._add_journals()
        working = await _list_open_jobs(self._bus)
        named = NamedIngestions(frozenset(working | await self._add_manifests()), frozenset(working))
        cutoff = self._now - self._grace
        shards = await sweep_unnamed(self._objects, f"{self._root}shards/", self._names, cutoff, self._count_shard)
        removed = 0
        async for ingestion in self._list_ingestions():
            removed += await self._remove_from_ingestion(ingestion, named)
        log.info("garbage collected", shards=shards.deleted, ingestion_objects=removed, freed_bytes=self._freed_bytes)
        return GarbageSummary(shards.deleted, removed, self._freed_bytes, shards.listed - shards.deleted)

    async def _add_journals(self) -> None:
        """Name the shards in the journals of jobs that are under way."""
        young = [
            stored
            async for stored in _list_stored(self._objects, f"{self._root}ingestions/")
            if garbage.is_young_journal(stored, self._now, self._grace)
        ]
        async for journal in run_ahead((_journal(self._objects, each) for each in young), limit=PARALLEL_READS):
            await run_in_thread(self._names.add, garbage.hashes_of_journal(journal))

    async def _add_manifests(self) -> set[str]:
        """Name the shards in manifests; return the fingerprints of their ingestions."""
        uri, fingerprints = f"{self._root}datasets/", set[str]()
        listed = [each async for each in _list_stored(self._objects, uri) if each.key.endswith("/manifest.json")]
        async for manifest in run_ahead((_manifest(self._objects, each) for each in listed), limit=PARALLEL_READS):
            if manifest is not None:
                fingerprints.add(manifest.fingerprint)
                await run_in_thread(self._names.add, garbage.hashes_of_manifest(manifest))
        return fingerprints

    async def _list_ingestions(self) -> AsyncIterator[list[StoredObject]]:
        """Iterate over the objects of each ingestion: they are listed in the order of fingerprints."""
        found: list[StoredObject] = []
        async for stored in _list_stored(self._objects, f"{self._root}ingestions/"):
            if not INGESTION_KEY.match(stored.key):
                continue
            if found and stored.fingerprint != found[0].fingerprint:
                yield found
                found = []
            found.append(stored)
        if found:
            yield found

    async def _remove_from_ingestion(self, ingestion: list[StoredObject], named: NamedIngestions) -> int:
        removed = 0
        for stored in garbage.garbage_of_ingestion(ingestion, named, self._now, self._grace, self._keep_packs):
            if await delete_unchanged(self._objects, stored.uri, stored.modified_at):
                removed += 1
                self._count("ingestion", stored.size_bytes)
            elif stored.key.endswith(garbage.DONE):
                break  # another job uses the ingestion again
        return removed

    def _count_shard(self, shard: ObjectInfo) -> None:
        self._count("shard", shard.size_bytes)

    def _count(self, kind: str, size_bytes: int) -> None:
        self._freed_bytes += size_bytes
        metrics.GC_DELETED.labels(kind).inc()
        metrics.GC_FREED_BYTES.inc(size_bytes)


async def _list_stored(objects: ObjectStore, uri: str) -> AsyncIterator[StoredObject]:
    async for info in objects.list(uri):
        yield StoredObject(info.uri, info.key, info.size_bytes, info.modified_at)


async def _journal(objects: ObjectStore, stored: StoredObject) -> dict[str, ShardFile]:
    try:
        return garbage.read_journal(await objects.get(stored.uri))
    except ObjectNotFound:
        return {}  # the dataset was completed: its manifest is read after this
    except ValueError as error:
        raise ValueError(f"{stored.uri}: {error}; remove it, nothing was collected") from error


async def _manifest(objects: ObjectStore, stored: StoredObject) -> Manifest | None:
    try:
        return Manifest.model_validate_json(await objects.get(stored.uri))
    except ObjectNotFound:
        return None  # it was removed meanwhile
    except ValueError as error:
        raise ValueError(f"{stored.uri}: {error}; repair or remove it, nothing was collected") from error


async def _list_open_jobs(bus: Bus) -> set[str]:
    """Return the fingerprints of the ingestions that wait for sharding."""
    found: dict[str, str] = {}
    # Not the client's own list of keys, which may end early while the server is busy.
    async for batch in bus.follow_bucket(topology.JOBS, "sharding.>", idle_s=1.0, until_caught_up=True):
        for entry in batch:
            found.pop(entry.key, None)
            if entry.value is None:
                continue
            try:
                found[entry.key] = str(from_json(from_json(entry.value)["body"])["fingerprint"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"job {entry.key} cannot be read ({error!r}): nothing was collected") from error
    return set(found.values())


def _summary(found: GarbageSummary) -> str:
    return (
        f"{found.shards} shards and {found.ingestion_objects} objects of ingestions removed "
        f"({found.freed_bytes:,} bytes)"
    )


def _bucket(settings: ShardingSettings) -> str:
    return settings.bucket_datasets


GARBAGE = GarbageCollector("dataset-gc", metrics.GC_RUNS, collect_garbage, _summary, _bucket)
