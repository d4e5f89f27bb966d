"""Publishes the decisions of a cycle as facts: in one atomic batch where the server can, else one by one.

No slot is ever allocated twice, even if two instances hold the lease. Every placement is part of a batch, or a
message, that the server stores only if the last ``run.*.placed`` in the stream is the one that the decision was made
from. No other leader can have allocated slots since; the slots of one cycle's placements are disjoint; slots freed
since are not used, which is safe. The server refuses the whole batch of a leader that resumes after an hour's pause,
because the last placement is another one. Every other fact expects no newer fact about its run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import nats.errors
import structlog
from nats.js.errors import APIError, NotFoundError

from contracts import subjects
from contracts.envelope import MAX_BODY_BYTES, Envelope
from contracts.events.run import DecisionRecord, RunFact, RunPlaced
from services.kit.batch import BatchPublisher, DuplicateMessage, WrongLastSequence, split_into_batches
from services.kit.bus import Bus, Conflict, ExpectedSequence, OutgoingMessage, PublishAck, TransientError
from services.kit.concurrency import gather_limited
from services.scheduler import metrics
from services.scheduler.core.decisions import CancelRun, Decision, ExplainRun, PlaceRun, StopRun, fact_of
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.quarantine import describe_error, quarantine_run

log = structlog.get_logger(__name__)

#: The fewest facts for which a batch is faster than publishing them one by one.
BATCH_FROM = 4
#: How often a batch is tried again without the runs that have newer facts.
RETRIES = 8
#: Single publishes under way at a time.
WIDTH = 64


@dataclass(frozen=True, slots=True, eq=False)
class PendingFact:
    """A decision that is to be published, and what must hold for that."""

    decision: Decision
    fact: RunFact
    #: The envelope of what led to it.
    cause: Envelope
    #: The run's last sequence: the fact only counts if nothing has changed.
    fence: ExpectedSequence

    @classmethod
    def of(cls, decision: Decision, cluster: Cluster, now: datetime, made: DecisionRecord) -> PendingFact:
        """Make the fact of a decision.

        Raises:
            ValueError: no reader would read it.
        """
        run = cluster.runs[decision.run_id]
        fact = fact_of(decision, cluster, now, made)
        if isinstance(fact, RunPlaced) and (size := len(fact.model_dump_json(exclude_defaults=True))) > MAX_BODY_BYTES:
            raise ValueError(
                f"its placement has {size:,} bytes, more than the {MAX_BODY_BYTES:,} that an event may have"
            )
        # A placement in the cycle that queues the run follows from a fact that is not stored yet.
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
        elif isinstance(self.decision, StopRun):
            metrics.STOPS.labels(self.decision.reason).inc()


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
    """Publishes the decisions of one cycle after the other."""

    def __init__(self, bus: Bus, leads: Callable[[], bool]) -> None:
        self.bus = bus
        self._leads = leads
        self._batches = BatchPublisher(bus)

    async def publish(self, pending: list[PendingFact], fence: int) -> int:
        """Publish facts that were decided when the last placement had the sequence ``fence``.

        Returns the highest sequence published; 0 if none was. A later cycle decides again on what is refused.
        """
        if len(pending) >= BATCH_FROM and await self._batches.is_available():
            highest, rest, fence = await self._publish_batch(pending, fence)
        else:
            highest, rest = 0, pending
        return max(highest, await self._publish_each(rest, fence)) if rest else highest

    # -- all of it at once ----------------------------------------------------

    async def _publish_batch(self, pending: list[PendingFact], fence: int) -> tuple[int, list[PendingFact], int]:
        """(highest sequence, what is left to be published one by one, the last placement by then)."""
        messages = {each: self.bus.build_message(each.fact, each.cause) for each in pending}
        highest, rest = 0, pending
        for part in split_into_batches(list(messages.values())):
            batch, rest = rest[: len(part)], rest[len(part) :]
            (last, placed), undone = await self._batch(batch, messages, fence)
            if undone:
                return highest, undone + rest, fence
            highest, fence = max(highest, last), max(fence, placed)
        return highest, [], fence

    async def _batch(
        self, pending: list[PendingFact], messages: dict[PendingFact, OutgoingMessage], fence: int
    ) -> tuple[tuple[int, int], list[PendingFact]]:
        """Publish one batch, without those that are outdated: ((last sequence, last placement's), what is undone)."""
        for _ in range(RETRIES):
            if not pending:
                return (0, 0), []
            if not self._leads():
                _count_dropped(pending)
                return (0, 0), []
            try:
                stored = await self._batches.publish(_fenced(pending, messages, fence))
            except WrongLastSequence as conflict:
                metrics.CONFLICTS.inc()
                fresh = await self._without_outdated(pending, conflict.sequence, fence)
                if len(fresh) == len(pending):
                    break
                pending = fresh
            except (DuplicateMessage, TransientError) as reason:
                # Perhaps all of it was stored and the answer was lost: one by one, each tells.
                log.info("no batch, publishing one by one", facts=len(pending), reason=str(reason))
                break
            else:
                for each in pending:
                    each.count()
                placed = [place for place, each in enumerate(pending) if each.places]
                return (stored.last, stored.first + placed[-1] if placed else 0), []
        return (0, 0), pending

    async def _without_outdated(self, pending: list[PendingFact], sequence: int, fence: int) -> list[PendingFact]:
        """``pending`` without the decisions that the fact of this sequence has outdated."""
        subject = await self._subject(sequence)
        aggregate, run_id, name = subjects.parts(subject)
        if aggregate != RunFact.aggregate:
            return pending
        elsewhere = name == RunPlaced.fact and sequence != fence
        log.info("a newer fact was there first", subject=subject, sequence=sequence)
        return [each for each in pending if each.run_id != run_id and not (elsewhere and each.places)]

    async def _subject(self, sequence: int) -> str:
        if not sequence:
            return ""
        try:
            return (await self.bus.js.get_msg(self._batches.stream, sequence)).subject or ""
        except (NotFoundError, TimeoutError, nats.errors.Error, APIError):
            return ""

    # -- one by one -----------------------------------------------------------

    async def _publish_each(self, pending: list[PendingFact], fence: int) -> int:
        placements = [each for each in pending if each.places]
        explanations = [each for each in pending if isinstance(each.decision, ExplainRun)]
        others = [each for each in pending if not each.places and not isinstance(each.decision, ExplainRun)]
        highest, complete = await self._publish_concurrently(others)
        if complete:
            highest = max(highest, await self._publish_in_order(placements, fence))
        explained, _ = await self._publish_concurrently(explanations)
        return max(highest, explained)

    async def _publish_concurrently(self, pending: list[PendingFact]) -> tuple[int, bool]:
        """Publish independent facts concurrently; (highest sequence, whether all were stored)."""
        acks = await gather_limited([self._publish(each, each.fence) for each in pending], limit=WIDTH)
        return max((ack.sequence for ack in acks if ack), default=0), all(acks)

    async def _publish_in_order(self, pending: list[PendingFact], fence: int) -> int:
        """Publish placements one by one, each expecting the one before: no other leader placed in between."""
        highest = 0
        for place, each in enumerate(pending):
            if not self._leads():
                _count_dropped(pending[place:])
                break
            ack = await self._publish(each, ExpectedSequence(fence, RunPlaced.subject_filter()))
            if ack is None:
                break
            highest = fence = ack.sequence
            if ack.duplicate:
                # Another leader's placement of the same generation stands; ours were made without it.
                break
        return highest

    async def _publish(self, each: PendingFact, expected: ExpectedSequence) -> PublishAck | None:
        try:
            ack = await self.bus.publish(each.fact, each.cause, expected=expected)
        except Conflict:
            metrics.CONFLICTS.inc()
            log.info("a newer fact came first, deciding again", run_id=each.run_id)
            return None
        except TransientError as error:
            log.warning("not published, deciding again", run_id=each.run_id, error=str(error))
            return None
        each.count()
        return ack


def _count_dropped(pending: Sequence[PendingFact]) -> None:
    metrics.DROPPED_FACTS.inc(len(pending))
    log.warning("the lease was lost before the decisions were out, dropped", facts=len(pending))


def _fenced(
    pending: Iterable[PendingFact], messages: dict[PendingFact, OutgoingMessage], fence: int
) -> list[OutgoingMessage]:
    """The messages of a batch, with what must hold before it.

    The first placement stands for all: no other can come between them. Of a run's several facts the first one
    carries what is expected of the run, unless it is a placement.
    """
    found: list[OutgoingMessage] = []
    fenced, runs = False, set()
    for each in pending:
        expected: ExpectedSequence | None = None
        if each.places:
            if not fenced:
                expected, fenced = ExpectedSequence(fence, RunPlaced.subject_filter()), True
        elif each.run_id not in runs:
            expected = each.fence
        runs.add(each.run_id)
        message = messages[each]
        found.append(message.with_expected(expected) if expected is not None else message)
    return found
