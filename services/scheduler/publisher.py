"""Publishes the decisions of a cycle as facts: in one atomic batch where the server can, else one by one.

No slot is ever allocated twice, even if two instances hold the lease. Every placement is part of a batch, or a
message, that the server stores only if the last ``run.*.placed`` in the stream is the one that the decision was made
from. No other leader can have allocated slots since; the slots of one cycle's placements are disjoint; slots freed
since are not used, which is safe. The server refuses the whole batch of a leader that resumes after an hour's pause,
because the last placement is another one. Every other fact expects no newer fact about its run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

import nats.errors
import structlog
from nats.js.errors import APIError, NotFoundError

from contracts import subjects
from contracts.envelope import Envelope
from contracts.events.run import DecisionRecord, RunFact, RunPlaced
from services.kit.batch import BatchPublisher, DuplicateMessage, WrongLastSequence, split_into_batches
from services.kit.bus import Bus, Conflict, ExpectedSequence, OutgoingMessage, PublishAck, TransientError
from services.scheduler import metrics
from services.scheduler.core.decisions import CancelRun, Decision, ExplainRun, PlaceRun, PreemptRun, fact_of
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.quarantine import describe_error, quarantine_run

log = structlog.get_logger(__name__)

#: The fewest facts for which a batch is faster than publishing them one by one.
BATCH_FROM = 4
#: How often a batch is tried again without the runs that have newer facts.
RETRIES = 8
#: Single publishes under way at a time.
WIDTH = 64


class PendingFact:
    """A decision on its way to being a fact."""

    __slots__ = ("cause", "decision", "fact", "fence")

    def __init__(self, decision: Decision, fact: RunFact, cause: Envelope, fence: ExpectedSequence) -> None:
        self.decision, self.fact, self.cause, self.fence = decision, fact, cause, fence

    @classmethod
    def of(cls, decision: Decision, cluster: Cluster, now: datetime, made: DecisionRecord) -> PendingFact:
        """The fact, what led to it, and the run's last sequence: it only counts if nothing has changed."""
        run = cluster.runs[decision.run_id]
        fact = fact_of(decision, cluster, now, made)
        # A placement in the pass that queues the run follows from a fact which is still on its way.
        queued = isinstance(decision, PlaceRun)
        cause = Envelope(
            id=f"run/{run.run_id}/queued/{run.next_generation}" if queued else run.last_event_id,
            source="",
            type="",
            time=now,
            correlation_id=run.correlation_id,
            traceparent=run.traceparent,
        )
        return cls(decision, fact, cause, ExpectedSequence(run.last_sequence, subjects.run(run.run_id)))

    @property
    def run_id(self) -> str:
        return self.decision.run_id

    @property
    def places(self) -> bool:
        return isinstance(self.decision, PlaceRun)

    def count(self) -> None:
        if isinstance(self.decision, PlaceRun):
            metrics.PLACEMENTS.inc()
        elif isinstance(self.decision, PreemptRun):
            metrics.PREEMPTIONS.labels(self.decision.queue_reason).inc()


def pending_facts(
    cluster: Cluster, decisions: Iterable[Decision], now: datetime, made: DecisionRecord
) -> list[PendingFact]:
    """Return the decisions as facts; a run whose decision cannot become a fact is quarantined."""
    pending: list[PendingFact] = []
    for decision in decisions:
        if decision.run_id in cluster.quarantined_runs and not isinstance(decision, CancelRun):
            continue
        try:
            pending.append(PendingFact.of(decision, cluster, now, made))
        except Exception as error:
            log.exception("a decision cannot become a fact", run_id=decision.run_id, decision=repr(decision)[:500])
            quarantine_run(cluster, decision.run_id, "cycle", describe_error(error))
    return pending


class Publisher:
    """Publishes the decisions of one pass after the other."""

    def __init__(self, bus: Bus, leads: Callable[[], bool]) -> None:
        self.bus = bus
        self._leads = leads
        self._batches = BatchPublisher(bus)

    async def publish(self, said: list[PendingFact], fence: int) -> int:
        """Make facts of ``said``, which was decided when the last placement had the sequence ``fence``.

        Returns the highest sequence published; 0 if nothing was. What is refused is decided again from newer facts.
        """
        if len(said) >= BATCH_FROM and await self._batches.is_available():
            highest, rest, fence = await self._publish_batch(said, fence)
        else:
            highest, rest = 0, said
        return max(highest, await self._publish_each(rest, fence)) if rest else highest

    # -- all of it at once ----------------------------------------------------

    async def _publish_batch(self, said: list[PendingFact], fence: int) -> tuple[int, list[PendingFact], int]:
        """(highest sequence, what is left to be published one by one, the last placement by then)."""
        messages = {id(saying): self.bus.build_message(saying.fact, saying.cause) for saying in said}
        highest, behind = 0, said
        for part in split_into_batches([messages[id(saying)] for saying in said]):
            mine, behind = behind[: len(part)], behind[len(part) :]
            (last, placed), undone = await self._batch(mine, messages, fence)
            if undone:
                return highest, undone + behind, fence
            highest, fence = max(highest, last), max(fence, placed)
        return highest, [], fence

    async def _batch(
        self, said: list[PendingFact], messages: dict[int, OutgoingMessage], fence: int
    ) -> tuple[tuple[int, int], list[PendingFact]]:
        """Publish one batch, without those that are outdated: ((last sequence, last placement's), what is undone)."""
        for _ in range(RETRIES):
            if not said:
                return (0, 0), []
            if not self._leads():
                _count_dropped(said)
                return (0, 0), []
            try:
                stored = await self._batches.publish(_fenced(said, messages, fence))
            except WrongLastSequence as conflict:
                metrics.CONFLICTS.inc()
                fresh = await self._without_outdated(said, conflict.sequence, fence)
                if len(fresh) == len(said):
                    break
                said = fresh
            except (DuplicateMessage, TransientError) as reason:
                # Perhaps all of it was stored and the answer was lost: one by one, each tells.
                log.info("no batch, publishing one by one", facts=len(said), reason=str(reason))
                break
            else:
                for saying in said:
                    saying.count()
                placed = [place for place, saying in enumerate(said) if saying.places]
                return (stored.last, stored.first + placed[-1] if placed else 0), []
        return (0, 0), said

    async def _without_outdated(self, said: list[PendingFact], sequence: int, fence: int) -> list[PendingFact]:
        """``said`` without the decisions that the fact of this sequence has outdated."""
        subject = await self._subject(sequence)
        aggregate, run_id, name = subjects.parts(subject)
        if aggregate != RunFact.aggregate:
            return said
        elsewhere = name == RunPlaced.fact and sequence != fence
        log.info("a newer fact was there first", subject=subject, sequence=sequence)
        return [saying for saying in said if saying.run_id != run_id and not (elsewhere and saying.places)]

    async def _subject(self, sequence: int) -> str:
        if not sequence:
            return ""
        try:
            return (await self.bus.js.get_msg(self._batches.stream, sequence)).subject or ""
        except (NotFoundError, TimeoutError, nats.errors.Error, APIError):
            return ""

    # -- one by one -----------------------------------------------------------

    async def _publish_each(self, said: list[PendingFact], fence: int) -> int:
        placements = [saying for saying in said if saying.places]
        explanations = [saying for saying in said if isinstance(saying.decision, ExplainRun)]
        others = [saying for saying in said if not saying.places and not isinstance(saying.decision, ExplainRun)]
        highest, complete = await self._publish_concurrently(others)
        if complete:
            highest = max(highest, await self._publish_in_order(placements, fence))
        explained, _ = await self._publish_concurrently(explanations)
        return max(highest, explained)

    async def _publish_concurrently(self, said: list[PendingFact]) -> tuple[int, bool]:
        """Publish what is independent side by side; (highest sequence, whether all of it was taken)."""
        gate = asyncio.Semaphore(WIDTH)

        async def one(saying: PendingFact) -> PublishAck | None:
            async with gate:
                return await self._publish(saying, saying.fence)

        acks = await asyncio.gather(*(one(saying) for saying in said))
        return max((ack.sequence for ack in acks if ack), default=0), all(acks)

    async def _publish_in_order(self, said: list[PendingFact], fence: int) -> int:
        """Publish placements one by one, each expecting the one before: no other leader placed in between."""
        highest = 0
        for place, saying in enumerate(said):
            if not self._leads():
                _count_dropped(said[place:])
                break
            ack = await self._publish(saying, ExpectedSequence(fence, RunPlaced.subject_filter()))
            if ack is None:
                break
            highest = fence = ack.sequence
            if ack.duplicate:
                # Another leader's placement of the same generation stands; ours were made without it.
                break
        return highest

    async def _publish(self, saying: PendingFact, expected: ExpectedSequence) -> PublishAck | None:
        try:
            ack = await self.bus.publish(saying.fact, saying.cause, expected=expected)
        except Conflict:
            metrics.CONFLICTS.inc()
            log.info("a newer fact came first, deciding again", run_id=saying.run_id)
            return None
        except TransientError as error:
            log.warning("not published, deciding again", run_id=saying.run_id, error=str(error))
            return None
        saying.count()
        return ack


def _count_dropped(pending: Sequence[PendingFact]) -> None:
    metrics.DROPPED_FACTS.inc(len(pending))
    log.warning("the lease was lost before the decisions were out, dropped", facts=len(pending))


def _fenced(said: Iterable[PendingFact], messages: dict[int, OutgoingMessage], fence: int) -> list[OutgoingMessage]:
    """The messages of a batch, with what must hold before it.

    The first placement stands for all: no other can come between them. Of a run's several facts the first one
    carries what is expected of the run, unless it is a placement.
    """
    found: list[OutgoingMessage] = []
    fenced, runs = False, set()
    for saying in said:
        expected: ExpectedSequence | None = None
        if saying.places:
            if not fenced:
                expected, fenced = ExpectedSequence(fence, RunPlaced.subject_filter()), True
        elif saying.run_id not in runs:
            expected = saying.fence
        runs.add(saying.run_id)
        message = messages[id(saying)]
        found.append(message.with_expected(expected) if expected is not None else message)
    return found
