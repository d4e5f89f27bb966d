"""Scrubbing: what is committed is read back from the store, at a bounded rate, and compared with its hashes.

A request is a job (``kit/jobs.py``), so that one instance at a time works on it and a kill only delays it; on a
schedule, the first instance that finds the last scrub overdue requests one of every run. It reads the log a page at a
time and remembers a bounded number of blobs, so its memory does not grow with what is committed.

A rotten manifest is rebuilt from the facts that it was made of. Rotten blobs are published (``checkpoint_rotten``),
nodes that still have them write them again (``checkpoint_repaired``), and the service checks the result.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from datetime import datetime, timedelta
from typing import Any

import structlog
from nats.js.errors import BadRequestError, KeyNotFoundError

from contracts import subjects, topology
from contracts.envelope import Envelope
from contracts.events.checkpoint import (
    CheckpointCommitted,
    CheckpointRepaired,
    CheckpointRotten,
    CheckpointStaged,
)
from contracts.events.run import RunPlaced
from contracts.events.train import ScrubRequested
from contracts.manifest import blobs_of_files, files_of
from services.checkpoint import metrics
from services.checkpoint.core.commit import (
    AssembledCheckpoint,
    MissingParts,
    SealedCheckpoint,
    assemble,
    seal,
    select_parts,
)
from services.checkpoint.keeper import read_deleted_uris, read_facts
from services.checkpoint.listings import read_files_of_parts
from services.checkpoint.scrub_progress import RunDeletions, ScrubProgress, SeenBlobs
from services.checkpoint.settings import CheckpointSettings
from services.checkpoint.verifier import Verifier
from services.kit.bus import Bus, Message, PoisonMessage, TransientError
from services.kit.jobs import JobQueue
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.kit.store.uris import blob_sha256

log = structlog.get_logger(__name__)

QUEUE = "scrub"
#: When the last scheduled scrub was asked for; beside the jobs, since it is as lasting as they are.
LAST = "scrubbed.last"
CHECK_EVERY_S = 600.0
#: A blob that is rotten again after each repair is published this often at most: a failing disk makes no storm.
MAX_REPORTS = 3
#: Blobs that one fact names, at most.
MAX_REPORTED_BLOBS = 2000
#: Who repairs manifests.
SELF = "checkpoint"


class Pace:
    """Keeps a reader to a rate by the loop's clock."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def after(self, count: int) -> None:
        """Wait as long as reading ``count`` bytes should have taken."""
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s) + count / self._bytes_per_s
        await asyncio.sleep(max(0.0, self._free_at_s - now_s))


class Scrubber:
    """Reads back what is committed. One scrub at a time."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: CheckpointSettings) -> None:
        self._bus, self._objects, self._settings = bus, objects, settings
        self._verifier = Verifier(objects, settings)
        self._jobs = JobQueue(bus, QUEUE, self.scrub, self._give_up)

    async def run(self) -> None:
        """Run requested scrubs, and request one of every run periodically, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._jobs.run())
            if self._settings.checkpoint_scrub_every_s:
                tasks.create_task(self._request_periodically())

    async def on_scrub_requested(self, received: Message[ScrubRequested]) -> None:
        """Make it a job.

        Raises:
            PoisonMessage: there is no such run, or nothing of it to read.
        """
        run_id = received.event.run_id
        if run_id and not await self._bus.get_last_sequence(subjects.fact("run", run_id, CheckpointCommitted.fact)):
            raise PoisonMessage(
                f"run {run_id!r} has no committed checkpoint: give the id of one that `trainbus ps` lists"
            )
        await self._jobs.submit(job_id(received.envelope), received)

    # -- scrubbing ----------------------------------------------------------

    async def scrub(self, received: Message[ScrubRequested]) -> None:
        """Read back every committed checkpoint (of the run), and publish what is rotten.

        After a kill it goes on behind the last checkpoint that was read. Those committed since it began are left out.
        """
        request, cause = received.event, received.envelope
        subject = subjects.fact("run", request.run_id or subjects.WILDCARD, CheckpointCommitted.fact)
        pace, seen, count = Pace(self._settings.checkpoint_scrub_bytes_per_s), SeenBlobs(), 0
        progress = await ScrubProgress.open(self._bus, job_id(cause), await self._bus.get_last_sequence(subject))
        deletions = RunDeletions(self._bus)
        async for message in self._list_commits(subject, progress):
            commit: CheckpointCommitted = message.event
            if not await deletions.has(commit):
                await self._scrub_one(commit, request.repair, pace, seen, cause)
                count += 1
            await progress.save(message.sequence)
        await progress.remove()
        metrics.SCRUBS.labels("done").inc()
        log.info("scrubbed", checkpoints=count, blobs=seen.count, rotten=seen.rotten)

    async def _list_commits(self, subject: str, progress: ScrubProgress) -> AsyncIterator[Message[Any]]:
        """Iterate over commits in the order of the log.

        Each page has a reader of its own: no reader stays open for the hours that reading a page's checkpoints takes.
        """
        position = progress.done
        while page := await self._read_page(subject, position + 1, progress.until):
            for message in page:
                yield message
            position = page[-1].sequence

    async def _read_page(self, subject: str, start: int, until: int) -> list[Message[Any]]:
        followed = self._bus.follow(topology.FACTS.name, (subject,), start, until_caught_up=True)
        async with aclosing(followed) as batches:
            async for batch in batches:
                return [message for message in batch if message.sequence <= until]
        return []

    async def _scrub_one(
        self, commit: CheckpointCommitted, repair: bool, pace: Pace, seen: SeenBlobs, cause: Envelope
    ) -> None:
        uri = commit.checkpoint.uri
        manifest = await self._read_manifest(commit)
        await pace.after(len(manifest or b""))
        found_at = self._bus.clock.now().isoformat()
        if manifest is None:
            if await self._is_deleted(commit):
                return
            await self._publish_rotten(commit, (uri,), repair, found_at, cause)
            sealed = await self._rebuild_manifest(commit) if repair else None
            if sealed is None:
                return
            await self._objects.put(uri, sealed.manifest, content_type="application/json")
            await self._bus.publish(
                CheckpointRepaired(
                    run_id=commit.run_id,
                    uri=uri,
                    step=commit.checkpoint.step,
                    blob=uri,
                    node_id=SELF,
                    found_at=found_at,
                ),
                cause,
            )
            manifest = sealed.manifest
        rotten = []
        blobs = await asyncio.to_thread(lambda: blobs_of_files(files_of(manifest)))
        for blob in sorted(blobs, key=lambda blob: blob.uri):
            is_intact = seen.find(blob.sha256)
            if is_intact is None:
                is_intact = await self._is_intact(blob.uri)
                seen.add(blob.sha256, is_intact)
                metrics.SCRUBBED_BYTES.inc(blob.size_bytes)
                await pace.after(blob.size_bytes)
            if not is_intact:
                rotten.append(blob.uri)
        if rotten and not await self._is_deleted(commit):
            await self._publish_rotten(commit, tuple(rotten), repair, found_at, cause)

    async def _read_manifest(self, commit: CheckpointCommitted) -> bytes | None:
        """The manifest as it was committed; None if it is gone or another."""
        try:
            manifest = await self._objects.get(commit.checkpoint.uri)
            await asyncio.to_thread(files_of, manifest)
        except (ObjectNotFound, ValueError):
            return None
        expected = commit.manifest_sha256
        return manifest if expected in (None, hashlib.sha256(manifest).hexdigest()) else None

    async def _is_intact(self, uri: str) -> bool:
        try:
            return await self._objects.hash(uri) == blob_sha256(uri)
        except ObjectNotFound:
            return False
        except TransientError:
            # A store that keeps sums of its own gives no rotten bytes out: it fails, at this one object for ever.
            await self._objects.head(uri)
            return False

    async def _is_deleted(self, commit: CheckpointCommitted) -> bool:
        return commit.checkpoint.uri in await read_deleted_uris(self._bus, commit.run_id)

    async def _publish_rotten(
        self, commit: CheckpointCommitted, blobs: tuple[str, ...], repair: bool, found_at: str, cause: Envelope | None
    ) -> None:
        metrics.ROTTEN.inc(len(blobs))
        log.error("checkpoint is rotten", run_id=commit.run_id, step=commit.checkpoint.step, blobs=blobs[:8])
        for number, start in enumerate(range(0, len(blobs), MAX_REPORTED_BLOBS), 1):
            # An event has a limit, and a store that was lost may lack all blobs of a large checkpoint.
            which = found_at if number == 1 else f"{found_at}, part {number}"
            await self._publish_report(commit, blobs[start : start + MAX_REPORTED_BLOBS], repair, which, cause)

    async def _publish_report(
        self, commit: CheckpointCommitted, blobs: tuple[str, ...], repair: bool, found_at: str, cause: Envelope | None
    ) -> None:
        fact = CheckpointRotten(
            run_id=commit.run_id,
            uri=commit.checkpoint.uri,
            step=commit.checkpoint.step,
            blobs=blobs,
            found_at=found_at,
            repair=repair,
        )
        await self._bus.publish(fact, cause)

    async def _rebuild_manifest(self, commit: CheckpointCommitted) -> SealedCheckpoint | None:
        """Rebuild the manifest from the facts; None unless the result is the committed one."""
        placements = await read_facts(self._bus, commit.run_id, RunPlaced)
        placed = next((each for each in placements if each.generation == commit.generation), None)
        if placed is None:
            return None
        bucket = self._settings.bucket_models
        selected = select_parts(placed, await self._read_parts(commit))
        whole = (
            selected
            if isinstance(selected, MissingParts)
            else await read_files_of_parts(self._objects, selected, bucket)
        )
        if not isinstance(whole, list):
            return None
        assembled = await asyncio.to_thread(assemble, placed, whole, bucket)
        if not isinstance(assembled, AssembledCheckpoint):
            return None
        digests = await self._verifier.contents(assembled.digest_files)
        sealed = None if isinstance(digests, str) else seal(placed, assembled, digests)
        if isinstance(sealed, SealedCheckpoint) and sealed.commit.manifest_sha256 == commit.manifest_sha256:
            return sealed
        return None

    async def _read_parts(self, commit: CheckpointCommitted) -> list[CheckpointStaged]:
        """Return what was staged of a committed step; of the other steps nothing is kept in memory."""
        key, subject = (
            (commit.generation, commit.checkpoint.step),
            subjects.fact("run", commit.run_id, CheckpointStaged.fact),
        )
        found = []
        async for batch in self._bus.follow(topology.FACTS.name, (subject,), until_caught_up=True):
            found += [each.event for each in batch if (each.event.generation, each.event.step) == key]
        return found

    # -- repairs ------------------------------------------------------------

    async def on_checkpoint_repaired(self, received: Message[CheckpointRepaired]) -> None:
        """Check a blob that a node wrote again; if it is still wrong, publish that again, a few times."""
        repaired = received.event
        if not blob_sha256(repaired.blob) or await self._is_intact(repaired.blob):
            metrics.REPAIRED.labels("right").inc()
            log.info("rotten blob repaired", blob=repaired.blob, node_id=repaired.node_id)
            return
        metrics.REPAIRED.labels("wrong").inc()
        reports = await read_facts(self._bus, repaired.run_id, CheckpointRotten)
        if sum(repaired.blob in report.blobs for report in reports) >= MAX_REPORTS:
            log.error("blob stays rotten after repairs: check the store's disks", blob=repaired.blob)
            return
        fact = CheckpointRotten(
            run_id=repaired.run_id,
            uri=repaired.uri,
            step=repaired.step,
            blobs=(repaired.blob,),
            # Derived, so that a repeated message publishes the fact once.
            found_at=f"{repaired.found_at}, again after {received.envelope.id[:200]}",
        )
        await self._bus.publish(fact, received.envelope)

    # -- the schedule -------------------------------------------------------

    async def _request_periodically(self) -> None:
        """Request a scrub of every run when the last request of any instance is long ago."""
        every = timedelta(seconds=self._settings.checkpoint_scrub_every_s)
        while True:
            try:
                await self._request_if_due(every)
            except (TimeoutError, TransientError, OSError) as error:
                log.warning("cannot see when the last scrub was", error=repr(error))
            await asyncio.sleep(min(CHECK_EVERY_S, self._settings.checkpoint_scrub_every_s))

    async def _request_if_due(self, every: timedelta) -> None:
        bucket = await self._bus.open_bucket(topology.JOBS)
        now = self._bus.clock.now()
        mark = json.dumps({"at": now.isoformat()}).encode()
        try:
            entry = await bucket.get(LAST)
        except KeyNotFoundError:
            with suppress(BadRequestError):  # a new cluster's first scrub is due when the interval is over
                await bucket.create(LAST, mark)
            return
        if now - _time(entry.value) < every:
            return
        try:
            await bucket.update(LAST, mark, last=entry.revision)
        except BadRequestError:
            return  # another instance was faster
        request = ScrubRequested()
        envelope = Envelope(id=uuid.uuid4().hex, source=self._bus.source, type=ScrubRequested.type, time=now)
        await self._bus.publish_event(request, request.subject, envelope)

    async def _give_up(self, received: Message[Any], reason: str) -> None:
        await (await ScrubProgress.open(self._bus, job_id(received.envelope), 0)).remove()
        metrics.SCRUBS.labels("failed").inc()
        log.error("scrub given up", run_id=received.event.run_id, reason=reason)


def job_id(request: Envelope) -> str:
    """Return the id of the job that a request is."""
    return hashlib.sha256(request.id.encode()).hexdigest()[:32]


def _time(value: bytes | None) -> datetime:
    """When a mark was written; one that cannot be read is older than everything."""
    try:
        return datetime.fromisoformat(json.loads(value or b"{}")["at"])
    except (ValueError, KeyError, TypeError):
        return datetime.fromisoformat("1970-01-01T00:00:00+00:00")
