"""Which checkpoints stay: retention, and pins that go before it."""

from __future__ import annotations

from typing import TypeVar

import structlog

from contracts import subjects, topology
from contracts.envelope import Envelope
from contracts.events.checkpoint import CheckpointCommitted, CheckpointDeleted, CheckpointPinned
from contracts.events.run import RunAccepted, RunCompleted, RunFact, RunPlaced
from contracts.events.train import PinRequested
from services.checkpoint import metrics
from services.checkpoint.core.retention import HOLDING, Holds, judged_uris, pinned_uris, plan
from services.kit.bus import Bus, Conflict, ExpectedSequence, Message, PoisonMessage
from services.kit.placements import PlacementReader
from services.kit.store.objects import ObjectStore

log = structlog.get_logger(__name__)
F = TypeVar("F", bound=RunFact)

#: How often what crosses, a pin and a deletion for one, is decided again before the message is left to be redelivered.
MAX_ROUNDS = 20


async def read_facts(bus: Bus, run_id: str, fact: type[F]) -> list[F]:
    """Return the facts of one type about a run, in stream order."""
    return [received.event for received in await bus.read_history(subjects.fact("run", run_id, fact.fact))]


async def read_deleted_uris(bus: Bus, run_id: str) -> set[str]:
    """Return the manifests of a run that retention has removed."""
    return {fact.uri for fact in await read_facts(bus, run_id, CheckpointDeleted)}


class Keeper:
    """Applies retention and pins.

    A pin is published only if nothing was deleted since it was looked up, a deletion only if nothing was pinned:
    of the two that cross the first stands, and the second is decided again. The fact goes before the object, so
    that a checkpoint without the fact always has its manifest; a manifest that outlives its fact is swept, once no
    run that began with it is left.
    """

    def __init__(self, bus: Bus, objects: ObjectStore) -> None:
        self._bus, self._objects = bus, objects
        self._placements = PlacementReader(bus)
        self._holds = Holds()
        self._held_up_to = 0

    # -- retention ----------------------------------------------------------

    async def retain(self, placed: RunPlaced, cause: Envelope) -> None:
        """Remove what the run's retention does not keep. It decides from facts: after a kill it resumes."""
        pins_subject = subjects.fact("run", placed.run_id, CheckpointPinned.fact)
        committed = await read_facts(self._bus, placed.run_id, CheckpointCommitted)
        gone = await read_deleted_uris(self._bus, placed.run_id)
        if not plan(committed, gone, placed.spec.retention, ()):
            return
        await self._read_holds()
        fence = await self._bus.get_last_sequence(pins_subject)
        pins = pinned_uris(await read_facts(self._bus, placed.run_id, CheckpointPinned)) if fence else set()
        held = pins | judged_uris(placed.spec, committed, gone) | await self._read_result(placed.run_id)
        held |= {commit.checkpoint.uri for commit in committed if commit.checkpoint.uri in self._holds}
        for deletion in plan(committed, gone, placed.spec.retention, held):
            fact = CheckpointDeleted(run_id=placed.run_id, uri=deletion.uri, step=deletion.step, reason=deletion.reason)
            try:
                await self._bus.publish(fact, cause, expected=ExpectedSequence(fence, pins_subject))
            except Conflict:
                log.info("a checkpoint was pinned meanwhile: what is left is decided at the next commit")
                return
            metrics.DELETED.inc()
            log.info("checkpoint deleted", step=deletion.step, reason=deletion.reason)
            # A run that was accepted meanwhile counts on it: what it begins with goes when it has ended. One accepted
            # after the fact is failed by the scheduler, which reads both in the same order.
            await self._read_holds()
            if deletion.uri not in self._holds:
                await self._objects.delete(deletion.uri)

    async def _read_result(self, run_id: str) -> set[str]:
        """Return what the run is completed with: whoever reads that fact can fetch it."""
        completed = await self._bus.get_last_message(subjects.fact("run", run_id, RunCompleted.fact))
        result = completed.event.checkpoint if completed is not None else None
        return set() if result is None else {result.uri}

    async def _read_holds(self) -> None:
        """Fold what is new in the stream into ``_holds``."""
        filters = tuple(event.subject_filter() for event in HOLDING)
        start = self._held_up_to + 1
        async for batch in self._bus.follow(topology.FACTS.name, filters, start, until_caught_up=True):
            for received in batch:
                self._holds.apply(received.event)
                self._held_up_to = received.sequence

    # -- pins ---------------------------------------------------------------

    async def on_pin_requested(self, received: Message[PinRequested]) -> None:
        """Pin or unpin the newest committed checkpoint of the step, once for each request.

        Raises:
            PoisonMessage: there is no such run or checkpoint, or it was deleted.
        """
        request, cause = received.event, received.envelope
        run_id = request.run_id
        deletions = subjects.fact("run", run_id, CheckpointDeleted.fact)
        for _ in range(MAX_ROUNDS):
            if any(fact.request_id == cause.id for fact in await read_facts(self._bus, run_id, CheckpointPinned)):
                break
            fence = await self._bus.get_last_sequence(deletions)
            fact = CheckpointPinned(
                run_id=run_id,
                uri=await self._find_checkpoint(run_id, request.step),
                step=request.step,
                pinned=request.pinned,
                request_id=cause.id,
                reason=request.reason,
            )
            try:
                await self._bus.publish(fact, cause, expected=ExpectedSequence(fence, deletions))
            except Conflict:
                continue
            metrics.PINNED.labels("pinned" if request.pinned else "unpinned").inc()
            log.info("checkpoint pinned" if request.pinned else "checkpoint unpinned", run_id=run_id, step=request.step)
            break
        if not request.pinned:
            placement = await self._placements.find(run_id)
            if placement is not None:
                await self.retain(placement.placed, cause)

    async def _find_checkpoint(self, run_id: str, step: int) -> str:
        """The manifest of a run's newest committed checkpoint of a step, if it is still there."""
        committed = await read_facts(self._bus, run_id, CheckpointCommitted)
        if not committed:
            known = await self._bus.get_last_message(subjects.fact("run", run_id, RunAccepted.fact))
            what = "has no committed checkpoint" if known else "is unknown: give the id that `trainbus ps` lists"
            raise PoisonMessage(f"run {run_id!r} {what}")
        of_step = [commit.checkpoint.uri for commit in committed if commit.checkpoint.step == step]
        gone = await read_deleted_uris(self._bus, run_id)
        there = [uri for uri in of_step if uri not in gone]
        if there:
            return there[-1]
        if of_step:
            raise PoisonMessage(
                f"the checkpoint of step {step} of run {run_id} was deleted by retention: it is too late"
            )
        steps = ", ".join(str(each.checkpoint.step) for each in committed if each.checkpoint.uri not in gone)
        raise PoisonMessage(
            f"run {run_id} has no committed checkpoint of step {step}; it has {steps or 'none any more'}"
        )
