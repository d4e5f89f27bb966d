"""Every recorded decision, made again from the log and compared. With the same code and policy nothing differs.

The log is read twice. ``Index`` takes down which passes there were: their decisions say from which sequence, at what
time and by which policy they were made. ``ReplayVerifier`` then folds the log once, repeats each cycle when it reaches
the pass's sequence, and holds each recorded decision against it. A pass may have been published in part (its leader
died, or was overtaken, or had too much to say at once); what was published must be what was decided, in that order.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from contracts.base import Fact
from contracts.events.capacity import PolicyAdopted
from contracts.events.run import (
    RunAccepted,
    RunCancelled,
    RunCompleted,
    RunFailed,
    RunPlaced,
    RunPreempting,
    RunQueued,
    RunRejected,
    RunReserved,
    RunWaiting,
)
from contracts.scheduling import Policy
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.replay.cycles import CycleKey, facts_of, key_of, replay_cycle, stamped, wanted_of
from services.scheduler.replay.diff import FieldDiff, diff_fields
from services.scheduler.replay.log import Entry, fold_entry
from services.scheduler.replay.requests import RequestIndex, is_answer

#: What only a scheduler that leads says about runs.
DECISIONS = (
    RunQueued,
    RunWaiting,
    RunPlaced,
    RunReserved,
    RunPreempting,
    RunCompleted,
    RunFailed,
    RunCancelled,
)
DifferenceKind = Literal["content", "not decided", "order", "unknown policy", "from the future", "answer"]
#: The decisions made instead that a difference names.
NAMED = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """A recorded decision that is not what is decided now."""

    kind: DifferenceKind
    sequence: int
    time: datetime
    subject: str
    text: str
    #: From what it says that it was decided.
    made_from: CycleKey | None = None
    fields: tuple[FieldDiff, ...] = ()


@dataclass(slots=True)
class Index:
    """What the first reading of the log takes down."""

    #: Sequence -> the passes made from it -> how many of their decisions are recorded.
    passes: dict[int, Counter[CycleKey]] = field(default_factory=dict)
    #: Sequence -> the runs whose answers were made from it.
    answers: dict[int, list[str]] = field(default_factory=dict)
    policies: dict[str, Policy] = field(default_factory=dict)
    #: Digests of policies that this code reads as something else: what it does not know is left out.
    foreign: list[str] = field(default_factory=list)
    facts: int = 0
    last_sequence: int = 0

    def add(self, entry: Entry) -> None:
        """Take down one entry."""
        self.facts += 1
        self.last_sequence = entry.sequence
        fact = entry.fact
        if isinstance(fact, PolicyAdopted):
            self._adopt(fact)
        elif isinstance(fact, RunAccepted | RunRejected):
            self.answers.setdefault(answered_from(entry), []).append(fact.run_id)
        elif (key := key_of(fact)) is not None:
            self.passes.setdefault(key.at_sequence, Counter())[key] += 1

    def _adopt(self, fact: PolicyAdopted) -> None:
        self.policies[fact.digest] = fact.policy
        if fact.policy.digest != fact.digest and fact.digest not in self.foreign:
            self.foreign.append(fact.digest)


def answered_from(entry: Entry) -> int:
    """The sequence that an answer was made from: what it says, else everything before it."""
    key = key_of(entry.fact)
    return key.at_sequence if key is not None else entry.sequence - 1


@dataclass(slots=True)
class Counts:
    """What was compared."""

    facts: int = 0
    passes: int = 0
    decisions: int = 0
    same: int = 0
    answers: int = 0
    #: Decided in a pass again and not recorded: overtaken, or left for the next pass.
    unpublished: int = 0
    #: Decisions that do not say from what they were made.
    unchecked: int = 0
    #: Answers whose requests are not there: a file has none.
    unasked: int = 0
    by_fact: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _ReplayedCycle:
    """A pass made again, until all of its recorded decisions have been seen."""

    facts: list[Fact]
    left: int
    by_id: dict[str, int]
    #: Run -> place of its last decision that was seen.
    reached: dict[str, int] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, facts: list[Fact], left: int) -> _ReplayedCycle:
        return cls(facts, left, {fact.event_id: place for place, fact in enumerate(facts)})

    @property
    def unpublished(self) -> int:
        """Decisions that were not recorded. Reasons to wait do not count: a cycle publishes only some of them."""
        places = (place for place, fact in enumerate(self.facts) if not isinstance(fact, RunWaiting))
        return sum(place not in self.taken for place in places)

    def find(self, fact: Fact) -> int | None:
        """The place of the decision that a recorded one should be: the same fact, else its like about the same run."""
        if (place := self.by_id.get(fact.event_id)) is not None:
            return place
        alike = (
            place
            for place, replayed in enumerate(self.facts)
            if type(replayed) is type(fact) and replayed.aggregate_id == fact.aggregate_id and place not in self.taken
        )
        return next(alike, None)


class ReplayVerifier:
    """The second reading: ``feed`` it the same entries again, in order."""

    def __init__(self, index: Index, requests: RequestIndex | None = None) -> None:
        self.cluster = Cluster()
        self.counts = Counts()
        self._index, self._requests = index, requests
        self._due = sorted({*index.passes, *(index.answers if requests is not None else ())})
        heapq.heapify(self._due)
        self._open: dict[CycleKey, _ReplayedCycle | None] = {}
        self._answers: dict[str, list[RunAccepted | RunRejected]] = {}

    def feed(self, entry: Entry) -> list[Difference]:
        """Hold an entry against what is decided again, then fold it."""
        while self._due and self._due[0] < entry.sequence:
            self._decide(heapq.heappop(self._due))
        self.counts.facts += 1
        found: list[Difference] = []
        if is_answer(entry.fact):
            found = self._compare_answer(entry)
        elif (key := key_of(entry.fact)) is not None:
            found = self._compare(entry, key)
        elif isinstance(entry.fact, DECISIONS):
            self.counts.unchecked += 1
        fold_entry(self.cluster, entry)
        return found

    # -- passes -------------------------------------------------------------

    def _decide(self, sequence: int) -> None:
        """Make the passes again that were made from the cluster as it is now."""
        for run_id in self._index.answers.get(sequence, ()):
            if self._requests is not None:
                self._answers[run_id] = self._requests.answers(self.cluster, run_id)
        for key, recorded in self._index.passes.get(sequence, {}).items():
            policy = self._index.policies.get(key.policy)
            if policy is None:
                self._open[key] = None
                continue
            facts = (
                wanted_of(self.cluster, key, policy)
                if key.about_nodes
                else facts_of(replay_cycle(self.cluster, key, policy), self.cluster, key)
            )
            self._open[key] = _ReplayedCycle.of(facts, recorded)
            self.counts.passes += 1

    def _compare(self, entry: Entry, key: CycleKey) -> list[Difference]:
        fact = entry.fact
        assert fact is not None
        self.counts.decisions += 1
        self.counts.by_fact[fact.fact] += 1
        if key.at_sequence >= entry.sequence:
            text = f"says that it was decided from sequence {key.at_sequence}, which comes after it"
            return [_difference("from the future", entry, text, key)]
        made = self._open.get(key)
        if made is None:
            text = f"was decided by the policy {key.policy or '(none)'}, which no adopted fact of the log holds"
            return [_difference("unknown policy", entry, text, key)]
        found = _held_against(made, entry, key)
        self.counts.same += not found
        made.left -= 1
        if made.left == 0:
            self.counts.unpublished += made.unpublished
            del self._open[key]
        return found

    # -- answers ------------------------------------------------------------

    def _compare_answer(self, entry: Entry) -> list[Difference]:
        fact = entry.fact
        assert isinstance(fact, RunAccepted | RunRejected)
        replayed = self._answers.pop(fact.run_id, [])
        if not replayed:
            self.counts.unasked += 1
            return []
        self.counts.answers += 1
        said = getattr(fact, "decision", None)
        tries = [_unlike(fact, stamped(answer, said)) for answer in replayed]
        if any(not fields for fields in tries):
            return []
        closest = min(tries, key=len)
        return [_difference("answer", entry, "the request is answered otherwise", key_of(fact), closest)]


def _held_against(made: _ReplayedCycle, entry: Entry, key: CycleKey) -> list[Difference]:
    """How a recorded decision differs from the pass made again."""
    fact = entry.fact
    assert fact is not None
    place = made.find(fact)
    if place is None:
        return [_difference("not decided", entry, f"is not decided again; {_instead(made, fact)}", key)]
    again = place in made.taken
    made.taken.add(place)
    found: list[Difference] = []
    if fields := diff_fields(fact, made.facts[place]):
        found.append(_difference("content", entry, "is decided otherwise", key, fields))
    run_id = fact.aggregate_id
    # What stands in the log twice changes nothing the second time.
    if not again and place < made.reached.get(run_id, -1):
        before = made.facts[made.reached[run_id]].subject
        found.append(_difference("order", entry, f"comes after {before}, and is decided before it", key))
    made.reached[run_id] = max(place, made.reached.get(run_id, -1))
    return found


def _unlike(fact: Fact, replayed: Fact) -> list[FieldDiff]:
    if type(fact) is not type(replayed):
        return [FieldDiff("", fact.fact, replayed.fact)]
    return diff_fields(fact, replayed)


def _instead(made: _ReplayedCycle, fact: Fact) -> str:
    """What is decided about the same run instead; else about any."""
    own = [replayed.event_id for replayed in made.facts if replayed.aggregate_id == fact.aggregate_id]
    if own:
        return f"instead: {', '.join(own)}"
    if not made.facts:
        return "nothing is"
    more = f" and {len(made.facts) - NAMED} more" if len(made.facts) > NAMED else ""
    return f"nothing about it is, but {', '.join(replayed.event_id for replayed in made.facts[:NAMED])}{more}"


def _difference(
    kind: DifferenceKind,
    entry: Entry,
    text: str,
    key: CycleKey | None,
    fields: list[FieldDiff] | tuple[FieldDiff, ...] = (),
) -> Difference:
    return Difference(kind, entry.sequence, entry.time, entry.subject, text, key, tuple(fields))


def verify_log(entries: Any, requests: RequestIndex | None = None) -> tuple[Counts, list[Difference]]:
    """Both readings of a log that is at hand: what was compared, and what differs. ``entries`` is read twice."""
    index = Index()
    for entry in entries:
        index.add(entry)
    remaker = ReplayVerifier(index, requests)
    found = [difference for entry in entries for difference in remaker.feed(entry)]
    return remaker.counts, found
