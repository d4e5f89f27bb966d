"""The checkpoint service: staged -> verified -> manifest -> committed, then retention, and now and then GC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import structlog

from contracts import topology
from contracts.envelope import Envelope
from contracts.events.checkpoint import CheckpointCommitted, CheckpointRefused, CheckpointRepaired, CheckpointStaged
from contracts.events.run import RunPlaced
from contracts.events.train import PinRequested, ScrubRequested
from services.checkpoint import metrics
from services.checkpoint.core.backlog import is_superseded, newest_first
from services.checkpoint.core.commit import (
    AssembledCheckpoint,
    MissingParts,
    Refusal,
    SealedCheckpoint,
    assemble,
    seal,
    select_parts,
)
from services.checkpoint.garbage_collection import GARBAGE
from services.checkpoint.keeper import MAX_ROUNDS, Keeper, read_deleted_uris, read_facts
from services.checkpoint.listings import read_files_of_parts
from services.checkpoint.scrubber import Scrubber
from services.checkpoint.settings import CheckpointSettings
from services.checkpoint.staged_steps import StagedSteps, StagedStepsReader
from services.checkpoint.verifier import Verifier
from services.kit.bus import Bus, Conflict, Message, PoisonMessage, TransientError
from services.kit.placements import PlacementReader, StandingPlacement
from services.kit.service import Service
from services.kit.settings import Settings
from services.kit.store.errors import ObjectExists
from services.kit.store.objects import ObjectStore

log = structlog.get_logger(__name__)

#: How often a part is looked at that cannot be understood, before it is refused. What passes by itself, a store that
#: is away among it, is waited for however long it takes.
MAX_ATTEMPTS = 12
#: Causes of a refusal that are no fault of the run: files are missing or wrong in the store, another manifest is there.
FAULTS_OF_THE_STORE = ("files", "manifest")
NOT_UNDERSTOOD = (ValueError, TypeError, LookupError)
#: The parts of one step by their places in the log, without their files.
StagedParts = Mapping[int, CheckpointStaged]
#: Runs whose backlog was gone through lately are remembered up to this many.
MAX_REMEMBERED = 10_000


class Committer:
    """Commits what is complete, refuses what is broken, and applies retention. Every step can be repeated."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: CheckpointSettings) -> None:
        self._bus, self._objects = bus, objects
        self._bucket = settings.bucket_models
        self._verifier = Verifier(objects, settings)
        self._placements = PlacementReader(bus)
        self._keeper = Keeper(bus, objects)
        self._steps = StagedStepsReader(bus)
        #: (run, generation) -> up to which sequence its staged parts were gone through, the newest first.
        self._caught_up: dict[tuple[str, int], int] = {}

    async def on_checkpoint_staged(self, received: Message[CheckpointStaged]) -> None:
        """Commit the step if this part completes it; where newer ones were staged meanwhile, those first."""
        staged, cause = received.event, received.envelope
        if received.sequence <= self._caught_up.get((staged.run_id, staged.generation), 0):
            metrics.IGNORED.labels("known").inc()
            return
        placement = await self._placements.find(staged.run_id)
        if placement is None or placement.placed.generation < staged.generation:
            text = f"generation {staged.generation} of run {staged.run_id} was staged but is not placed"
            # A replica of the stream may lag behind, but not for ever.
            raise TransientError(text) if received.deliveries < MAX_ATTEMPTS else PoisonMessage(text)
        placed = placement.placed
        if placed.generation > staged.generation:
            metrics.IGNORED.labels("zombie").inc()
            log.info("ignored a part of an old generation", generation=staged.generation, now=placed.generation)
            return
        steps = await self._steps.read(staged.run_id)
        if (staged.generation, staged.step) in steps.settled:
            metrics.IGNORED.labels("known").inc()
            # Killed between commit and retention, perhaps.
            await self._keeper.retain(placed, cause)
            return
        if steps.newest > (staged.generation, staged.step):
            await self._catch_up(placement, steps, received)
            return
        parts = steps.of_generation(placed.generation).get(staged.step, {})
        async with self._refused_in_the_end(staged, received):
            await self._commit(placement, staged, parts, cause)

    async def _catch_up(
        self, placement: StandingPlacement, steps: StagedSteps, received: Message[CheckpointStaged]
    ) -> None:
        """Commit what was staged of a placement, the newest first, but for what retention would delete at once.

        A step that cannot be understood stops no other one; its error is raised at the end.
        """
        placed, errors, position = placement.placed, list[Exception](), steps.position
        # Another generation's parts may be there already, if it was placed meanwhile: they are not gone through.
        for parts in newest_first(steps.of_generation(placed.generation)):
            first = next(iter(parts.values()))
            try:
                async with self._refused_in_the_end(first, received):
                    await self._commit_unless_superseded(placement, first, parts, received.envelope)
            except NOT_UNDERSTOOD as error:
                errors.append(error)
        if errors:
            raise errors[0]
        if len(self._caught_up) >= MAX_REMEMBERED:
            self._caught_up.clear()
        self._caught_up[placed.run_id, placed.generation] = position

    @asynccontextmanager
    async def _refused_in_the_end(
        self, staged: CheckpointStaged, received: Message[CheckpointStaged]
    ) -> AsyncIterator[None]:
        """Refuse the step that the block is about if it still cannot be understood at the last attempt."""
        try:
            yield
        except NOT_UNDERSTOOD as error:
            if received.deliveries < MAX_ATTEMPTS:
                raise
            await self._refuse(staged, f"it cannot be read: {error!r}", "error", received.envelope)

    async def _commit_unless_superseded(
        self, placement: StandingPlacement, staged: CheckpointStaged, parts: StagedParts, cause: Envelope
    ) -> None:
        if await self._is_settled(staged):
            return
        match await self._assemble(placement.placed, parts):
            case AssembledCheckpoint() as checkpoint if await self._is_superseded(placement.placed, checkpoint):
                await self._supersede(staged, cause)
            case _:
                await self._commit(placement, staged, parts, cause)

    async def _assemble(self, placed: RunPlaced, parts: StagedParts) -> AssembledCheckpoint | MissingParts | Refusal:
        """Put the parts together, with the files that they or their listings name."""
        if isinstance(waiting := select_parts(placed, parts.values()), MissingParts):
            return waiting
        selected = select_parts(placed, await self._steps.read_parts(list(parts)))
        if isinstance(selected, MissingParts):
            return selected
        whole = await read_files_of_parts(self._objects, selected, self._bucket)
        if isinstance(whole, Refusal):
            return whole
        return await asyncio.to_thread(assemble, placed, whole, self._bucket)

    async def _is_superseded(self, placed: RunPlaced, checkpoint: AssembledCheckpoint) -> bool:
        committed = await read_facts(self._bus, placed.run_id, CheckpointCommitted)
        gone = await read_deleted_uris(self._bus, placed.run_id)
        return is_superseded(checkpoint, placed.spec, committed, gone)

    async def _is_settled(self, staged: CheckpointStaged) -> bool:
        """Whether this step of this generation is committed or refused."""
        steps = await self._steps.read(staged.run_id)
        return (staged.generation, staged.step) in steps.settled

    async def _commit(
        self, placement: StandingPlacement, staged: CheckpointStaged, parts: StagedParts, cause: Envelope
    ) -> None:
        with metrics.COMMIT_SECONDS.time():
            await self._commit_step(placement, staged, parts, cause)

    async def _commit_step(
        self, placement: StandingPlacement, staged: CheckpointStaged, parts: StagedParts, cause: Envelope
    ) -> None:
        placed = placement.placed
        # 1. Every rank's part.
        match await self._assemble(placed, parts):
            case MissingParts(missing):
                log.info("waiting for other ranks", step=staged.step, missing=missing[:8])
                return
            case Refusal(reason, infrastructure_failure):
                await self._refuse(staged, reason, "files" if infrastructure_failure else "parts", cause)
                return
            case AssembledCheckpoint() as checkpoint:
                pass
        # 2. The store has what they name.
        if reason := await self._verifier.problem(await asyncio.to_thread(lambda: checkpoint.blobs)):
            await self._refuse(staged, reason, "files", cause)
            return
        # 3. The ranks agree about the state.
        digests = await self._verifier.contents(checkpoint.digest_files)
        if isinstance(digests, str):
            await self._refuse(staged, digests, "files", cause)
            return
        sealed = await asyncio.to_thread(seal, placed, checkpoint, digests)
        if isinstance(sealed, Refusal):
            await self._refuse(staged, sealed.reason, "digests", cause)
            return
        # 4. The manifest, then the fact that makes it count, unless the run was placed again meanwhile.
        if not await self._put_manifest(sealed):
            reason = f"{checkpoint.ref.uri} exists with another content: remove it if it is not needed"
            await self._refuse(staged, reason, "manifest", cause)
            return
        if not await self._publish_commit(sealed.commit, placement, cause):
            await self._withdraw(staged, checkpoint)
            return
        metrics.COMMITTED.inc()
        log.info("checkpoint committed", step=staged.step, generation=placed.generation, size=checkpoint.size_bytes)
        # 5. What is not kept any more.
        await self._keeper.retain(placed, cause)

    async def _publish_commit(self, commit: CheckpointCommitted, placement: StandingPlacement, cause: Envelope) -> bool:
        """Publish a commit; False if the run was placed again meanwhile.

        Raises:
            TransientError: placements that do not count kept coming between.
        """
        latest: StandingPlacement | None = placement
        for _ in range(MAX_ROUNDS):
            if latest is None or latest.placed.generation != placement.placed.generation:
                return False
            try:
                await self._bus.publish(commit, cause, expected=latest.fence)
            except Conflict:
                # Anybody can publish a placement. One that does not count takes nothing away from the one that does.
                latest = await self._placements.find(commit.run_id)
            else:
                return True
        raise TransientError(f"run {commit.run_id} was placed {MAX_ROUNDS} times while this was decided")

    async def _withdraw(self, staged: CheckpointStaged, checkpoint: AssembledCheckpoint) -> None:
        """Delete the manifest of a run that was placed again meanwhile, unless its commit was stored before that."""
        metrics.IGNORED.labels("zombie").inc()
        if not await self._is_settled(staged):
            # The name holds our generation, and the fence is shut for it: no other instance needs this manifest.
            await self._objects.delete(checkpoint.ref.uri)
        log.info("placed again before the commit: not committed", step=staged.step, generation=staged.generation)

    async def _refuse(self, staged: CheckpointStaged, reason: str, cause_label: str, cause: Envelope) -> None:
        log.warning("checkpoint refused", step=staged.step, generation=staged.generation, reason=reason)
        metrics.REFUSED.labels(cause_label).inc()
        fact = CheckpointRefused(
            run_id=staged.run_id,
            generation=staged.generation,
            step=staged.step,
            reason=reason,
            infrastructure_failure=cause_label in FAULTS_OF_THE_STORE,
        )
        await self._bus.publish(fact, cause)

    async def _supersede(self, staged: CheckpointStaged, cause: Envelope) -> None:
        """Publish that a checkpoint came too late to be kept, so that nobody waits for it."""
        metrics.IGNORED.labels("superseded").inc()
        log.info("superseded before it was committed", step=staged.step, generation=staged.generation)
        reason = "newer ones were committed first, and retention would have deleted it at once"
        fact = CheckpointRefused(
            run_id=staged.run_id, generation=staged.generation, step=staged.step, reason=reason, superseded=True
        )
        await self._bus.publish(fact, cause)

    async def _put_manifest(self, sealed: SealedCheckpoint) -> bool:
        """Store the manifest; False if another one has its name, which must not be replaced."""
        uri = sealed.commit.checkpoint.uri
        try:
            await self._objects.put(uri, sealed.manifest, if_absent=True, content_type="application/json")
        except ObjectExists:
            # Ours, from before a kill or from another instance, is the same to the byte.
            return await self._objects.get(uri) == sealed.manifest
        return True


def build(settings: Settings) -> Service:
    """The service, ready to be run."""
    own = CheckpointSettings.of(settings)
    service = Service("checkpoint", own)
    objects = service.add_object_store(ObjectStore(own))
    committer = Committer(service.bus, objects, own)
    keeper = Keeper(service.bus, objects)
    scrubber = Scrubber(service.bus, objects, own)
    service.bus.subscriber(topology.CHECKPOINT, CheckpointStaged)(committer.on_checkpoint_staged)
    service.bus.subscriber(topology.CHECKPOINT, CheckpointRepaired)(scrubber.on_checkpoint_repaired)
    service.bus.subscriber(topology.CHECKPOINT_REQUESTS, PinRequested)(keeper.on_pin_requested)
    service.bus.subscriber(topology.CHECKPOINT_REQUESTS, ScrubRequested)(scrubber.on_scrub_requested)

    @asynccontextmanager
    async def bucket() -> AsyncIterator[None]:
        await objects.ensure_bucket(own.bucket_models)
        yield

    async def collect() -> None:
        await GARBAGE.run_periodically(own.checkpoint_gc_every_s, service.bus, objects, own)

    service.add_resource(bucket())
    service.add_background_task(collect)
    service.add_background_task(scrubber.run)
    return service
