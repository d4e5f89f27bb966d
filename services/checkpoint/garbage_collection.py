"""Garbage collection: reads the facts and the store, asks the core, deletes. One at a time, under a lease."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog

from contracts import topology
from contracts.events.checkpoint import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointRefused,
    CheckpointStaged,
    FileListing,
)
from contracts.events.run import RunEvaluated
from services.checkpoint import metrics
from services.checkpoint.core.commit import BLOBS, find_listing_problem
from services.checkpoint.core.garbage import Ledger, StoredBlob, blobs_of, orphan_manifests, select_garbage
from services.checkpoint.core.retention import HOLDING
from services.checkpoint.listings import read_listing
from services.checkpoint.settings import CheckpointSettings
from services.kit.bus import Bus
from services.kit.garbage_collector import GarbageCollector
from services.kit.store.errors import ObjectChanged, ObjectCorrupted, ObjectNotFound
from services.kit.store.objects import ObjectInfo, ObjectStore

log = structlog.get_logger(__name__)

LEDGER = (
    *HOLDING,
    RunEvaluated,
    CheckpointStaged,
    CheckpointCommitted,
    CheckpointRefused,
    CheckpointDeleted,
)


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """What one collection found and removed."""

    manifests: int
    blobs: int
    freed_bytes: int


async def collect_garbage(bus: Bus, objects: ObjectStore, settings: CheckpointSettings) -> GarbageReport:
    """Remove unneeded blobs and manifests. Safe beside commits and uploads: see ``core/garbage.py``.

    Raises:
        ValueError: a manifest cannot be read, so the blobs that it needs are unknown; nothing was deleted.
    """
    grace = timedelta(seconds=settings.checkpoint_gc_grace_s)
    root = f"s3://{settings.bucket_models}/"
    # In this order: what is named after the blobs were listed is seen.
    blobs = [_stored_blob(info) async for info in objects.list(f"{root}{BLOBS}")]
    ledger = await _ledger(bus, bus.clock.now() - grace)
    manifests = [_stored_blob(info) async for info in objects.list(root) if _is_manifest(info.key)]
    now = bus.clock.now()
    named: set[str] = set()
    for listing in ledger.pending_listings(now - grace):
        named |= await _read_listing(objects, listing, settings.bucket_models)
    orphans = {manifest.uri for manifest in orphan_manifests(manifests, ledger, now, grace)}
    for manifest in manifests:
        if manifest.uri not in orphans:
            named |= await _read_manifest(objects, manifest)
    doomed = select_garbage(blobs, named, ledger, now, grace)
    for uri in sorted(orphans):
        await objects.delete(uri)
        metrics.GC_DELETED.labels("manifest").inc()
    deleted = freed = 0
    for blob in doomed:
        # An upload may have renewed it, in order to name it.
        try:
            there = await objects.head(blob.uri)
            if there.modified_at != blob.modified_at:
                continue
            await objects.delete(blob.uri, if_match=there.etag)
        except (ObjectNotFound, ObjectChanged):
            continue
        deleted, freed = deleted + 1, freed + blob.size_bytes
        metrics.GC_DELETED.labels("blob").inc()
        metrics.GC_FREED_BYTES.inc(blob.size_bytes)
    found = GarbageReport(len(orphans), deleted, freed)
    log.info("garbage collected", manifests=found.manifests, blobs=found.blobs, freed_bytes=freed)
    return found


async def _ledger(bus: Bus, forget_before: datetime) -> Ledger:
    ledger = Ledger(forget_before=forget_before)
    filters = tuple(event.subject_filter() for event in LEDGER)
    async for batch in bus.follow(topology.FACTS.name, filters, until_caught_up=True):
        for received in batch:
            ledger.apply(received.event, received.envelope.time)
    return ledger


async def _read_listing(objects: ObjectStore, listing: FileListing, bucket: str) -> set[str]:
    """Return the blobs that a listing names; none if it is not one that a commit would read."""
    if find_listing_problem(listing, bucket):
        return set()
    try:
        return {uri for file in await read_listing(objects, listing) for uri in file.uris}
    except (ObjectNotFound, ObjectCorrupted, ValueError) as error:
        # Its checkpoint can only be refused.
        log.warning("a list of files cannot be read", uri=listing.uri, error=str(error))
        return set()


async def _read_manifest(objects: ObjectStore, manifest: StoredBlob) -> set[str]:
    try:
        return await asyncio.to_thread(blobs_of, await objects.get(manifest.uri))
    except ObjectNotFound:
        return set()  # retention removed it meanwhile
    except ValueError as error:
        raise ValueError(f"{manifest.uri}: {error}; repair or remove it, nothing was collected") from error


def _is_manifest(key: str) -> bool:
    return "/checkpoints/" in key and key.endswith(".json") and not key.startswith(BLOBS)


def _stored_blob(info: ObjectInfo) -> StoredBlob:
    return StoredBlob(info.uri, info.key, info.size_bytes, info.modified_at)


def _summary(found: GarbageReport) -> str:
    return f"{found.blobs} blobs ({found.freed_bytes:,} bytes) and {found.manifests} manifests removed"


def _bucket(settings: CheckpointSettings) -> str:
    return settings.bucket_models


GARBAGE = GarbageCollector("checkpoint-gc", metrics.GC_RUNS, collect_garbage, _summary, _bucket)
