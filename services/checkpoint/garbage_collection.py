"""Garbage collection: reads the facts and the store, asks the core, deletes. One at a time, under a lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import structlog

from contracts.events.checkpoint import CheckpointStaged, FileListing
from services.checkpoint import metrics
from services.checkpoint.core.commit import BLOBS, find_listing_problem
from services.checkpoint.core.garbage import StoredManifest, blobs_of, orphan_manifests
from services.checkpoint.core.ledger import Ledger
from services.checkpoint.ledger_store import LedgerStore
from services.checkpoint.listings import read_listing
from services.checkpoint.settings import CheckpointSettings
from services.kit.bus import Bus
from services.kit.concurrency import run_ahead, run_in_thread
from services.kit.garbage_collector import GarbageCollector
from services.kit.hash_partitions import HashPartitions
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound
from services.kit.store.objects import ObjectInfo, ObjectStore
from services.kit.store.uris import blob_sha256
from services.kit.sweep import sweep_unnamed
from services.kit.workdir import Workdir

log = structlog.get_logger(__name__)

#: Manifests and listings in memory at a time, each up to 64 MiB or more. One of them is parsed at a time.
PARALLEL_READS = 4
#: Parts that are read from the log at a time.
PARALLEL_PARTS = 16


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """What one collection found and removed."""

    manifests: int
    blobs: int
    freed_bytes: int
    #: Facts that were read: those since the last collection.
    facts: int = 0


async def collect_garbage(bus: Bus, objects: ObjectStore, settings: CheckpointSettings) -> GarbageReport:
    """Remove unneeded blobs and manifests. Safe beside commits and uploads: see ``core/garbage.py``.

    Raises:
        ValueError: a manifest cannot be read, so the blobs that it needs are unknown, or the disk is full; nothing was
            deleted.
    """
    async with Workdir(settings.data_dir / "checkpoint") as workdir:
        with workdir.temporary("garbage-") as folder:
            return await _Collection(bus, objects, settings, HashPartitions(Path(folder))).run()


class _Collection:
    """One collection. Names of blobs are in files; manifests are in memory a few at a time."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: CheckpointSettings, names: HashPartitions) -> None:
        self._bus, self._objects, self._names = bus, objects, names
        self._bucket = settings.bucket_models
        self._root = f"s3://{self._bucket}/"
        # Before anything is read: see rule 2.
        self._cutoff = bus.clock.now() - timedelta(seconds=settings.checkpoint_gc_grace_s)
        self._ledgers = LedgerStore(bus, objects, self._bucket)
        self._parsing = asyncio.Lock()

    async def run(self) -> GarbageReport:
        ledger, facts = await self._ledgers.read()
        manifests = [manifest async for manifest in self._list_manifests()]
        ledger.forget(self._cutoff, {manifest.uri for manifest in manifests})
        await self._ledgers.write(ledger)
        await self._add_pending(ledger)
        orphans = {manifest.uri for manifest in orphan_manifests(manifests, ledger, self._cutoff)}
        async for _ in run_ahead(
            (self._add_manifest(each.uri) for each in manifests if each.uri not in orphans), limit=PARALLEL_READS
        ):
            pass
        for uri in sorted(orphans):
            await self._objects.delete(uri)
            metrics.GC_DELETED.labels("manifest").inc()
        blobs = await sweep_unnamed(self._objects, f"{self._root}{BLOBS}", self._names, self._cutoff, _count_blob)
        found = GarbageReport(len(orphans), blobs.deleted, blobs.freed_bytes, facts)
        log.info(
            "garbage collected",
            manifests=found.manifests,
            blobs=found.blobs,
            freed_bytes=found.freed_bytes,
            kept_blobs=blobs.listed - blobs.deleted,
            facts=facts,
        )
        return found

    async def _list_manifests(self) -> AsyncIterator[StoredManifest]:
        """List what may be a manifest; the blobs, which are many, are left out."""
        folders = [folder async for folder in self._list_folders(self._root)]
        if "blobs/" in folders:  # also the name of an experiment, perhaps
            folders.remove("blobs/")
            blobs = [folder async for folder in self._list_folders(f"{self._root}blobs/")]
            folders += [folder for folder in blobs if folder != BLOBS]
        for folder in folders:
            async for info in self._objects.list(f"{self._root}{folder}"):
                if "/checkpoints/" in info.key and info.key.endswith(".json"):
                    yield StoredManifest(info.uri, info.modified_at)

    async def _list_folders(self, uri: str) -> AsyncIterator[str]:
        async for page in self._objects.list_pages(uri, by_folder=True):
            for folder in page.folders:
                yield folder

    # -- names --------------------------------------------------------------

    async def _add_pending(self, ledger: Ledger) -> None:
        """Name what the facts need: artifacts, listings, and the blobs of parts that may be committed yet."""
        pending = list(ledger.pending(self._cutoff))
        listings = {listing.uri: listing for parts in pending for listing in parts.listings}
        await self._add(ledger.artifacts | listings.keys() | {each.uri for each in ledger.committed_listings})
        sequences = (sequence for parts in pending for sequence in parts.sequences)
        async for uris in run_ahead(map(self._read_part, sequences), limit=PARALLEL_PARTS):
            await self._add(uris)
        async for _ in run_ahead(map(self._add_listing, listings.values()), limit=PARALLEL_READS):
            pass

    async def _read_part(self, sequence: int) -> set[str]:
        """Return the blobs that a part in the log names; none if it is no longer in the log."""
        message = await self._bus.get_message(sequence)
        if message is None or not isinstance(message.event, CheckpointStaged):
            return set()
        return {uri for file in message.event.files for uri in file.uris}

    async def _add_listing(self, listing: FileListing) -> None:
        """Name the blobs that a listing names; none if it is not one that a commit would read."""
        if find_listing_problem(listing, self._bucket):
            return
        try:
            async with self._parsing:
                files = await read_listing(self._objects, listing)
        except (ObjectNotFound, ObjectCorrupted, ValueError) as error:
            # Its checkpoint can only be refused.
            log.warning("a list of files cannot be read", uri=listing.uri, error=str(error))
            return
        await self._add({uri for file in files for uri in file.uris})

    async def _add_manifest(self, uri: str) -> None:
        try:
            content = await self._objects.get(uri)
        except ObjectNotFound:
            return  # retention removed it meanwhile
        try:
            async with self._parsing:
                blobs = await asyncio.to_thread(blobs_of, content)
        except ValueError as error:
            raise ValueError(f"{uri}: {error}; repair or remove it, nothing was collected") from error
        await self._add(blobs)

    async def _add(self, uris: set[str]) -> None:
        async with self._parsing:
            await run_in_thread(self._names.add, [sha256 for uri in uris if (sha256 := blob_sha256(uri))])


def _count_blob(blob: ObjectInfo) -> None:
    metrics.GC_DELETED.labels("blob").inc()
    metrics.GC_FREED_BYTES.inc(blob.size_bytes)


def _summary(found: GarbageReport) -> str:
    return f"{found.blobs} blobs ({found.freed_bytes:,} bytes) and {found.manifests} manifests removed"


def _bucket(settings: CheckpointSettings) -> str:
    return settings.bucket_models


GARBAGE = GarbageCollector("checkpoint-gc", metrics.GC_RUNS, collect_garbage, _summary, _bucket)
