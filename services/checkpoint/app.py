"""The checkpoint service: staged -> verified -> manifest -> committed, then retention, and now and then GC."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from contracts import subjects, topology
from contracts.envelope import Envelope
from contracts.events.checkpoint import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointFile,
    CheckpointRefused,
    CheckpointStaged,
    Chunk,
)
from contracts.events.model import ModelPromoted
from contracts.events.run import RunAccepted, RunCancelled, RunCompleted, RunFailed, RunPlaced
from services.checkpoint import metrics
from services.checkpoint.collect import collect_rarely, run_gc
from services.checkpoint.core.commit import Assembled, Refusal, Waiting, assemble
from services.checkpoint.core.retention import Holds, plan
from services.checkpoint.settings import CheckpointSettings
from services.kit.bus import Bus, Conflict, Expect, Received, Transient
from services.kit.objects import Exists, Missing, Objects
from services.kit.service import Service
from services.kit.settings import Settings

log = structlog.get_logger(__name__)

#: What tells which checkpoints somebody counts on, for ``Holds``.
HOLDING = (RunAccepted, RunPlaced, RunCompleted, RunFailed, RunCancelled, ModelPromoted)


class Committer:
    """Commits what is complete, refuses what is broken, and applies retention. Every step can be repeated."""

    def __init__(self, bus: Bus, objects: Objects, settings: CheckpointSettings) -> None:
        self._bus, self._objects, self._settings = bus, objects, settings
        self._bucket = settings.bucket_models
        self._slots = asyncio.Semaphore(settings.checkpoint_verify_parallel)
        #: (uri, etag) of blobs that were read back and found right.
        self._verified: set[tuple[str, str]] = set()
        self._holds = Holds()
        self._held_up_to = 0

    async def on_checkpoint_staged(self, received: Received[CheckpointStaged]) -> None:
        """Commit the step if this part completes it."""
        staged, cause = received.event, received.envelope
        last_placed = await self._bus.last(subjects.fact("run", staged.run_id, RunPlaced.fact))
        if last_placed is None or last_placed.event.generation < staged.generation:
            raise Transient(f"generation {staged.generation} of run {staged.run_id} was staged but is not placed yet")
        placed: RunPlaced = last_placed.event
        if placed.generation > staged.generation:
            metrics.IGNORED.labels("zombie").inc()
            log.info("ignored a part of an old generation", generation=staged.generation, now=placed.generation)
            return
        if await self._settled(staged):
            metrics.IGNORED.labels("known").inc()
            # Killed between commit and retention, perhaps.
            await self._retain(placed, cause)
            return
        with metrics.COMMIT_SECONDS.time():
            await self._commit(placed, last_placed.sequence, staged, cause)

    async def _settled(self, staged: CheckpointStaged) -> bool:
        """Whether this step of this generation is committed or refused."""
        for commit in await self._commits(staged.run_id):
            if (commit.generation, commit.checkpoint.step) == (staged.generation, staged.step):
                return True
        refused = await self._bus.history(subjects.fact("run", staged.run_id, CheckpointRefused.fact))
        return any((r.event.generation, r.event.step) == (staged.generation, staged.step) for r in refused)

    async def _commits(self, run_id: str) -> list[CheckpointCommitted]:
        found = await self._bus.history(subjects.fact("run", run_id, CheckpointCommitted.fact))
        return [received.event for received in found]

    async def _commit(self, placed: RunPlaced, placed_at: int, staged: CheckpointStaged, cause: Envelope) -> None:
        history = await self._bus.history(subjects.fact("run", staged.run_id, CheckpointStaged.fact))
        parts = [each.event for each in history if each.event.step == staged.step]
        match assemble(placed, parts, self._bucket):
            case Waiting(missing):
                log.info("waiting for other ranks", step=staged.step, missing=missing[:8])
                return
            case Refusal(reason):
                await self._refuse(staged, reason, "parts", cause)
                return
            case Assembled() as checkpoint:
                pass
        if reason := await self._verify(checkpoint.files):
            await self._refuse(staged, reason, "files", cause)
            return
        if not await self._put_manifest(checkpoint):
            reason = f"{checkpoint.ref.uri} is there with another content: remove it if nobody needs it"
            await self._refuse(staged, reason, "manifest", cause)
            return
        commit = CheckpointCommitted(
            run_id=placed.run_id,
            generation=placed.generation,
            checkpoint=checkpoint.ref,
            size_bytes=checkpoint.size_bytes,
            metrics=checkpoint.metrics,
            final=checkpoint.final,
        )
        try:
            await self._bus.publish(
                commit, cause, expect=Expect(placed_at, subjects.fact("run", placed.run_id, RunPlaced.fact))
            )
        except Conflict:
            await self._withdraw(staged, checkpoint)
            return
        metrics.COMMITTED.inc()
        log.info("checkpoint committed", step=staged.step, generation=placed.generation, size=checkpoint.size_bytes)
        await self._retain(placed, cause)

    async def _withdraw(self, staged: CheckpointStaged, checkpoint: Assembled) -> None:
        """The run was placed anew meanwhile: unless the commit was stored before that, nobody may make it now."""
        metrics.IGNORED.labels("zombie").inc()
        if not await self._settled(staged):
            # The name holds our generation, and the fence is shut for it: no other instance needs this manifest.
            await self._objects.delete(checkpoint.ref.uri)
        log.info("placed anew before the commit: not committed", step=staged.step, generation=staged.generation)

    async def _refuse(self, staged: CheckpointStaged, reason: str, cause_label: str, cause: Envelope) -> None:
        log.warning("checkpoint refused", step=staged.step, generation=staged.generation, reason=reason)
        metrics.REFUSED.labels(cause_label).inc()
        refused = CheckpointRefused(run_id=staged.run_id, generation=staged.generation, step=staged.step, reason=reason)
        await self._bus.publish(refused, cause)

    async def _put_manifest(self, checkpoint: Assembled) -> bool:
        """Store the manifest; False if another one has its name, which must not be replaced."""
        try:
            await self._objects.put(
                checkpoint.ref.uri, checkpoint.manifest, if_absent=True, content_type="application/json"
            )
        except Exists:
            # Ours, from before a kill or from another instance, is the same to the byte.
            return await self._objects.get(checkpoint.ref.uri) == checkpoint.manifest
        return True

    # -- verifying ----------------------------------------------------------

    async def _verify(self, files: Sequence[CheckpointFile]) -> str:
        """Compare the files with what is in the store; the first problem in words, or ''."""
        chunks = [(file.path, chunk) for file in files for chunk in file.chunks]
        problems = await asyncio.gather(*(self._verify_chunk(path, chunk) for path, chunk in chunks))
        return next((problem for problem in problems if problem), "")

    async def _verify_chunk(self, path: str, chunk: Chunk) -> str:
        async with self._slots:
            try:
                info = await self._objects.head(chunk.uri)
                if info.size_bytes != chunk.size_bytes:
                    return f"{path!r} has {info.size_bytes} bytes in the store, {chunk.size_bytes} were announced"
                known = (chunk.uri, info.etag)
                if info.size_bytes > self._settings.checkpoint_verify_bytes or known in self._verified:
                    return ""
                digest = await self._objects.hash(chunk.uri)
            except Missing:
                return f"{path!r} is not in the store: {chunk.uri} is missing"
            metrics.VERIFIED_BYTES.inc(info.size_bytes)
            if digest != chunk.sha256:
                return f"{path!r} is corrupt in the store: its hash is {digest}, {chunk.sha256} was announced"
            if len(self._verified) > 100_000:
                self._verified.clear()
            self._verified.add(known)
            return ""

    # -- retention ----------------------------------------------------------

    async def _retain(self, placed: RunPlaced, cause: Envelope) -> None:
        """Remove what the run's retention does not keep. Decided from facts, so a kill in between is made up for."""
        commits = await self._commits(placed.run_id)
        gone = await self._bus.history(subjects.fact("run", placed.run_id, CheckpointDeleted.fact))
        deleted = {each.event.uri for each in gone}
        if not plan(commits, deleted, placed.spec.retention, ()):
            return
        await self._read_holds()
        for deletion in plan(commits, deleted, placed.spec.retention, self._holds.uris):
            await self._objects.delete(deletion.uri)
            fact = CheckpointDeleted(run_id=placed.run_id, uri=deletion.uri, step=deletion.step, reason=deletion.reason)
            await self._bus.publish(fact, cause)
            metrics.DELETED.inc()
            log.info("checkpoint deleted", step=deletion.step, reason=deletion.reason)

    async def _read_holds(self) -> None:
        """Bring ``_holds`` up to what the stream says now; only what is new is read."""
        filters = tuple(event.subject_filter() for event in HOLDING)
        start = self._held_up_to + 1
        async for batch in self._bus.follow(topology.FACTS.name, filters, start, until_caught_up=True):
            for received in batch:
                self._holds.apply(received.event)
                self._held_up_to = received.sequence


def build(settings: Settings) -> Service:
    """The service, ready to be run."""
    own = CheckpointSettings.of(settings)
    service = Service("checkpoint", own)
    objects: Objects = service.resource(Objects(own))
    committer = Committer(service.bus, objects, own)
    service.bus.on(topology.CHECKPOINT, CheckpointStaged)(committer.on_checkpoint_staged)

    @asynccontextmanager
    async def bucket() -> AsyncIterator[None]:
        await objects.ensure_bucket(own.bucket_models)
        yield

    async def collect() -> None:
        await collect_rarely(service.bus, objects, own)

    service.resource(bucket())
    service.background(collect)
    return service


def main() -> None:
    """``python -m services.checkpoint [gc]``: run the service, or collect garbage once."""
    settings = CheckpointSettings()
    match sys.argv[1:]:
        case []:
            build(settings).main()
        case ["gc"]:
            run_gc(settings)
        case _:
            sys.exit("usage: python -m services.checkpoint [gc]")
