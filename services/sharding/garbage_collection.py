"""Garbage collection: reads the store and the open jobs, asks the core, deletes. A lease excludes a second one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

import structlog
from pydantic_core import from_json

from contracts import topology
from contracts.datasets import Manifest
from contracts.events.dataset import ShardFile
from services.kit.bus import Bus
from services.kit.concurrency import gather_limited
from services.kit.garbage_collector import GarbageCollector
from services.kit.store.errors import ObjectChanged, ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.sharding import metrics
from services.sharding.core import garbage
from services.sharding.core.garbage import INGESTION_KEY, StoredObject
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
        ValueError: a manifest cannot be read, so its references are unknown; nothing was deleted.
    """
    root = f"s3://{settings.bucket_datasets}/"
    grace, keep_packs = (timedelta(seconds=s) for s in (settings.dataset_gc_grace_s, settings.dataset_keep_packs_s))
    # Keep this order: a journal or a manifest then shows each shard that is named after the listing.
    shards = [stored async for stored in _list_stored(objects, f"{root}shards/")]
    ingestions: dict[str, list[StoredObject]] = defaultdict(list)
    async for stored in _list_stored(objects, f"{root}ingestions/"):
        if match := INGESTION_KEY.match(stored.key):
            ingestions[match["fingerprint"]].append(stored)
    now = bus.clock.now()
    young = [s for found in ingestions.values() for s in found if garbage.is_young_journal(s, now, grace)]
    journals = await gather_limited((_journal(objects, s) for s in young), limit=PARALLEL_READS)
    working = await _list_open_jobs(bus)
    manifests = await _manifests(objects, f"{root}datasets/")
    named = garbage.collect_names(manifests, journals, working)
    doomed = garbage.garbage_shards(shards, named, now, grace)
    gone = [await _delete(objects, shard, "shard") for shard in doomed]
    freed = [size_bytes for size_bytes in gone if size_bytes is not None]
    removed: list[int] = []
    for fingerprint, found in ingestions.items():
        for stored in garbage.garbage_of_ingestion(found, fingerprint, named, now, grace, keep_packs):
            size_bytes = await _delete(objects, stored, "ingestion")
            if size_bytes is not None:
                removed.append(size_bytes)
            elif stored.key.endswith(garbage.DONE):
                break  # another job uses the ingestion again
    freed_bytes = sum(freed) + sum(removed)
    log.info("garbage collected", shards=len(freed), ingestion_objects=len(removed), freed_bytes=freed_bytes)
    return GarbageSummary(len(freed), len(removed), freed_bytes, len(shards) - len(freed))


async def _delete(objects: ObjectStore, stored: StoredObject, kind: str) -> int | None:
    """Delete an object and return its bytes; None if it is gone, or if a job has rewritten it to reuse it."""
    try:
        there = await objects.head(stored.uri)
        if there.modified_at != stored.modified_at:
            return None
        await objects.delete(stored.uri, if_match=there.etag)
    except (ObjectNotFound, ObjectChanged):
        return None
    metrics.GC_DELETED.labels(kind).inc()
    metrics.GC_FREED_BYTES.inc(stored.size_bytes)
    return stored.size_bytes


async def _list_stored(objects: ObjectStore, uri: str) -> AsyncIterator[StoredObject]:
    try:
        async for info in objects.list(uri):
            yield StoredObject(info.uri, info.key, info.size_bytes, info.modified_at)
    except ObjectNotFound:
        return  # there is no bucket yet


async def _journal(objects: ObjectStore, stored: StoredObject) -> dict[str, ShardFile]:
    try:
        return garbage.read_journal(await objects.get(stored.uri))
    except ObjectNotFound:
        return {}  # the dataset was completed: its manifest is read after this
    except ValueError as error:
        raise ValueError(f"{stored.uri}: {error}; remove it, nothing was collected") from error


async def _manifests(objects: ObjectStore, uri: str) -> list[Manifest]:
    listed = [s async for s in _list_stored(objects, uri) if s.key.endswith("/manifest.json")]
    found = await gather_limited((_manifest(objects, s) for s in listed), limit=PARALLEL_READS)
    return [manifest for manifest in found if manifest is not None]


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
