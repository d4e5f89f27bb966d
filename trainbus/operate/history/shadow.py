"""Compares a candidate policy with the one in force: what would it have decided, from the same state?

The candidate always continues from what really happened, never from the outcome of its own decisions. So each
decision is compared fairly; ``what_if.py`` computes what many of them add up to.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from contracts import subjects
from contracts.base import Fact
from contracts.events.capacity import PolicyAdopted
from contracts.events.run import RunPlaced, RunStopping, RunWaiting
from contracts.scheduling import Policy
from services.scheduler.core.cycle_state import CycleResult
from services.scheduler.core.state.cluster import Cluster
from trainbus.operate.history.cycles import CycleKey, cycle_key_of, facts_of, replay_cycle
from trainbus.operate.history.log import Entry, fold_entry

#: Facts that are held back until it is known from which of them the leader decided. Beyond, the oldest are folded.
HELD_BACK = 10_000
#: The code of a run that a cycle neither starts nor explains.
NO_REASON = "not waiting"


def prefix(candidate: Policy) -> str:
    """Return the prefix of the subjects of a candidate's facts."""
    return subjects.shadow(candidate.digest, "")


@dataclass(frozen=True, slots=True)
class ShadowFact:
    """A fact that the candidate would have published, its subject, and the id that deduplicates it."""

    subject: str
    message_id: str
    fact: Fact


@dataclass(slots=True)
class Start:
    """A placement that was made, and when the candidate would have made it (None: not by then)."""

    run_id: str
    generation: int
    placed_at: datetime
    candidate_at: datetime | None
    #: Why the candidate would not have made it.
    reason: str = ""

    @property
    def earlier_s(self) -> float | None:
        return None if self.candidate_at is None else (self.placed_at - self.candidate_at).total_seconds()


@dataclass(slots=True)
class Comparison:
    """What has been compared so far."""

    points: int = 0
    #: Points at which both would have started and stopped the very same, on the same slots.
    agreeing: int = 0
    #: Points at which both would have started and stopped the same runs, some on other slots.
    agreeing_but_where: int = 0
    starts: list[Start] = field(default_factory=list)
    #: Placements the candidate would have made that have not been made yet, and since when.
    only_candidate: dict[tuple[str, int], datetime] = field(default_factory=dict)
    #: (run, generation) that would have been stopped: by the policy in force, by the candidate.
    stops_in_force: set[tuple[str, int]] = field(default_factory=set)
    stops_candidate: set[tuple[str, int]] = field(default_factory=set)
    #: Why the policy in force kept runs waiting that the candidate would have started, and the other way round.
    candidate_starts_while: Counter[str] = field(default_factory=Counter)
    candidate_waits_for: Counter[str] = field(default_factory=Counter)
    #: Cycles of the leader whose facts came after the cluster that they were made from was folded further.
    missed: int = 0


class Shadow:
    """Folds the log with a delay, and runs a cycle of both policies at each point. Deterministic."""

    def __init__(self, candidate: Policy, in_force: Policy, published_ids: Iterable[str] = ()) -> None:
        #: The same log in two folds: what one cycle caches for the next, and the shares of teams, follow the policy.
        self.cluster = Cluster(adopted=PolicyAdopted(digest=in_force.digest, policy=in_force))
        self.candidate_cluster = Cluster(adopted=PolicyAdopted(digest=candidate.digest, policy=candidate))
        self.candidate, self.in_force = candidate, in_force
        self.result = Comparison()
        self._policies: dict[str, Policy] = {in_force.digest: in_force}
        self._held: deque[Entry] = deque()
        self._published_ids = set(published_ids)
        self._compared: set[CycleKey] = set()
        #: Starts of waiting runs that the candidate would have made, and since when.
        self._would_start: dict[tuple[str, int], datetime] = {}
        self._why_not: dict[tuple[str, int], str] = {}
        self._reachable_since: datetime | None = None
        #: The decisions at the last point.
        self._point: object = None

    def catch_up(self, entries: Iterable[Entry]) -> None:
        """Fold the log up to the first comparison."""
        for entry in entries:
            self._learn(entry.fact)
            if (key := cycle_key_of(entry.fact)) is not None:
                self._reachable_since = key.reachable_since
            self._fold_both(entry)

    def process(self, entries: Iterable[Entry]) -> list[ShadowFact]:
        """Process new entries, and compare at every point at which the leader is known to have decided."""
        published: list[ShadowFact] = []
        for entry in entries:
            self._learn(entry.fact)
            if (key := cycle_key_of(entry.fact)) is not None and key not in self._compared:
                published += self._compare_at_cycle(key)
            self._held.append(entry)
        while len(self._held) > HELD_BACK:
            self._fold(self._held.popleft())
        return published

    def process_idle(self, now: datetime) -> list[ShadowFact]:
        """Compare at this moment, when nothing has come for a while: a cycle without decisions publishes no fact."""
        while self._held:
            self._fold(self._held.popleft())
        if not self.cluster.unqueued and not self.cluster.queued and not self.cluster.active:
            return []
        key = CycleKey(self.cluster.sequence, now, self.in_force.digest, self._reachable_since)
        return self._compare(key, self.in_force)

    # -- the log ------------------------------------------------------------

    def _learn(self, fact: Fact | None) -> None:
        if isinstance(fact, PolicyAdopted):
            self._policies[fact.digest] = self.in_force = fact.policy

    def _fold_both(self, entry: Entry) -> None:
        fold_entry(self.cluster, entry)
        if isinstance(entry.fact, PolicyAdopted):
            adopted = entry.fact.model_copy(update={"digest": self.candidate.digest, "policy": self.candidate})
            entry = entry._replace(fact=adopted)
        fold_entry(self.candidate_cluster, entry)

    def _fold(self, entry: Entry) -> None:
        self._fold_both(entry)
        if isinstance(entry.fact, RunPlaced):
            self._placed(entry.fact, entry.time)

    def _placed(self, fact: RunPlaced, time: datetime) -> None:
        """Compare a placement with when the candidate would have made it."""
        which = (fact.run_id, fact.generation)
        since, why = self._would_start.pop(which, None), self._why_not.pop(which, NO_REASON)
        self.result.only_candidate.pop(which, None)
        if since is None:
            self.result.candidate_waits_for[why] += 1
        self.result.starts.append(Start(fact.run_id, fact.generation, time, since, "" if since else why))

    # -- points -------------------------------------------------------------

    def _compare_at_cycle(self, key: CycleKey) -> list[ShadowFact]:
        """Compare at a cycle of the leader: with what it had folded, at its time."""
        self._compared.add(key)
        self._reachable_since = key.reachable_since
        while self._held and self._held[0].sequence <= key.at_sequence:
            self._fold(self._held.popleft())
        policy = self._policies.get(key.policy)
        if self.cluster.sequence > key.at_sequence or policy is None:
            self.result.missed += 1
            return []
        return self._compare(key, policy)

    def _compare(self, key: CycleKey, in_force: Policy) -> list[ShadowFact]:
        made = replay_cycle(self.cluster, key, in_force)
        other_key = key._replace(policy=self.candidate.digest)
        other = replay_cycle(self.candidate_cluster, other_key, self.candidate)
        facts, others = facts_of(made, self.cluster, key), facts_of(other, self.candidate_cluster, other_key)
        self._count(key.at, facts, others, made, other)
        return self._publish_new(others)

    def _count(
        self, at: datetime, facts: list[Fact], others: list[Fact], made: CycleResult, other: CycleResult
    ) -> None:
        result = self.result
        starts, stops = _starts(facts), _stops(facts)
        starts_other, stops_other = _starts(others), _stops(others)
        # While nothing happens, the same decision over and over is one point.
        point = (self.cluster.sequence, starts.keys(), stops, starts_other.keys(), stops_other)
        if point == self._point:
            return
        self._point = point
        result.points += 1
        if stops == stops_other and starts.keys() == starts_other.keys():
            same = all(starts[which].members == starts_other[which].members for which in starts)
            result.agreeing += same
            result.agreeing_but_where += not same
        result.stops_in_force |= stops
        result.stops_candidate |= stops_other
        for which in starts_other:
            self._would_start.setdefault(which, at)
            if which not in starts and which not in result.only_candidate:
                result.only_candidate[which] = at
                result.candidate_starts_while[_reason(made, which[0])] += 1
        for which in starts.keys() - starts_other.keys():
            self._why_not[which] = _reason(other, which[0])

    def _publish_new(self, facts: list[Fact]) -> list[ShadowFact]:
        """Return the candidate's facts that it has not published before."""
        published = []
        for fact in facts:
            message_id = f"shadow/{self.candidate.digest}/{_deduplication_key(fact)}"
            if message_id not in self._published_ids:
                self._published_ids.add(message_id)
                published.append(ShadowFact(subjects.shadow(self.candidate.digest, fact.subject), message_id, fact))
        return published


def _deduplication_key(fact: Fact) -> str:
    """Return a key that is equal for facts that need not be repeated: the same reason to wait at the next point."""
    if isinstance(fact, RunWaiting):
        return f"run/{fact.run_id}/waiting/{fact.next_generation}/{fact.code}"
    return fact.event_id


def _starts(facts: Iterable[Fact]) -> dict[tuple[str, int], RunPlaced]:
    return {(fact.run_id, fact.generation): fact for fact in facts if isinstance(fact, RunPlaced)}


def _stops(facts: Iterable[Fact]) -> set[tuple[str, int]]:
    return {(fact.run_id, fact.generation) for fact in facts if isinstance(fact, RunStopping)}


def _reason(made: CycleResult, run_id: str) -> str:
    """Return the code of the reason for which the run waits in this cycle."""
    why: Any = made.waits.get(run_id)
    return str(why.code) if why is not None else NO_REASON
