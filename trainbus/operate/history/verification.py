"""Every recorded decision, repeated from the log and compared. With the same code and policy nothing differs.

The log is read twice. ``Index`` lists the cycles: their decisions contain the sequence, the time and the policy that
they were made from. ``ReplayVerifier`` then folds the log once, repeats each cycle when it reaches the cycle's
sequence, and compares each recorded decision. A cycle may have been published in part (its leader died, or was
overtaken, or decided too much at once); what was published must be what was decided, in that order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
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
    RunQueued,
    RunRejected,
    RunReserved,
    RunStaging,
    RunStopping,
    RunWaiting,
)
from contracts.scheduling import Policy
from services.scheduler.core.state.cluster import Cluster
from trainbus.operate.history.cycles import CycleKey, cycle_key_of, demand_facts, facts_of, key_of, replay_cycle
from trainbus.operate.history.log import Entry, fold_entry
from trainbus.operate.history.requests import RequestIndex

#: Facts about runs that only a leader publishes.
DECISIONS = (
    RunStaging,
    RunQueued,
    RunWaiting,
    RunPlaced,
    RunReserved,
    RunStopping,
    RunCompleted,
    RunFailed,
    RunCancelled,
)
DifferenceKind = Literal["content", "not decided", "order", "unknown policy", "from the future", "answer"]
#: The decisions made instead that a difference names.
MAX_NAMED_FACTS = 5
#: What stands for a value that one side does not have.
ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class FieldDiff:
    """One field in which a recorded fact is not what was decided. ``field`` is dotted."""

    field: str
    recorded: Any
    replayed: Any


@dataclass(frozen=True, slots=True)
class Difference:
    """A recorded decision that is not what the replay decides."""

    kind: DifferenceKind
    sequence: int
    time: datetime
    subject: str
    text: str
    #: The inputs of the decision, as the fact names them.
    made_from: CycleKey | None = None
    fields: tuple[FieldDiff, ...] = ()


@dataclass(slots=True)
class Index:
    """What the first reading of the log finds."""

    #: Sequence -> the cycles made from it -> how many of their decisions are recorded.
    cycles: defaultdict[int, Counter[CycleKey]] = field(default_factory=lambda: defaultdict(Counter))
    #: Sequence -> the runs whose answers were made from it.
    answers: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    policies: dict[str, Policy] = field(default_factory=dict)
    #: Digests of policies that this code reads as something else: what it does not know is left out.
    foreign: list[str] = field(default_factory=list)
    facts: int = 0
    last_sequence: int = 0

    def add(self, entry: Entry) -> None:
        """Add one entry."""
        self.facts += 1
        self.last_sequence = entry.sequence
        fact, key = entry.fact, key_of(entry.fact)
        if isinstance(fact, PolicyAdopted):
            self.policies[fact.digest] = fact.policy
            if fact.policy.digest != fact.digest and fact.digest not in self.foreign:
                self.foreign.append(fact.digest)
        elif isinstance(fact, RunAccepted | RunRejected):
            # An answer without a decision record was made from everything before it.
            self.answers[key.at_sequence if key is not None else entry.sequence - 1].append(fact.run_id)
        elif key is not None:
            self.cycles[key.at_sequence][key] += 1


@dataclass(slots=True)
class Counts:
    """What was compared."""

    facts: int = 0
    cycles: int = 0
    decisions: int = 0
    same: int = 0
    answers: int = 0
    #: Decided in a replayed cycle and not recorded: overtaken, or left for the next cycle.
    unpublished: int = 0
    #: Decisions without a decision record.
    unchecked: int = 0
    #: Answers whose requests are not there: a file has none.
    unasked: int = 0
    by_fact: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _ReplayedCycle:
    """A repeated cycle, until all of its recorded decisions have been compared."""

    facts: list[Fact]
    left: int
    places: dict[str, int] = field(init=False)
    #: Run -> the place of its last decision that was compared.
    reached: dict[str, int] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places = {fact.event_id: place for place, fact in enumerate(self.facts)}

    @property
    def unpublished(self) -> int:
        """Decisions that were not recorded. Reasons to wait do not count: a cycle publishes only some of them."""
        return sum(
            place not in self.taken and not isinstance(fact, RunWaiting) for place, fact in enumerate(self.facts)
        )

    def find(self, fact: Fact) -> int | None:
        """Return the place of the decision that a recorded one should be.

        It is the same fact, or else a fact of the same type about the same run.
        """
        if (place := self.places.get(fact.event_id)) is not None:
            return place
        for place, replayed in enumerate(self.facts):
            is_alike = type(replayed) is type(fact) and replayed.aggregate_id == fact.aggregate_id
            if is_alike and place not in self.taken:
                return place
        return None


class ReplayVerifier:
    """The second reading: ``feed`` it the same entries again, in order."""

    def __init__(self, index: Index, requests: RequestIndex | None = None) -> None:
        self.cluster = Cluster()
        self.counts = Counts()
        self._index, self._requests = index, requests
        self._due = deque(sorted({*index.cycles, *(index.answers if requests is not None else ())}))
        self._open: dict[CycleKey, _ReplayedCycle] = {}
        self._answers: dict[str, list[RunAccepted | RunRejected]] = {}

    def feed(self, entry: Entry) -> list[Difference]:
        """Compare an entry with what the replay decides, then fold it."""
        while self._due and self._due[0] < entry.sequence:
            self._decide(self._due.popleft())
        self.counts.facts += 1
        found: list[Difference] = []
        if isinstance(entry.fact, RunAccepted | RunRejected):
            found = self._compare_answer(entry, entry.fact)
        elif entry.fact is not None and (key := cycle_key_of(entry.fact)) is not None:
            found = self._compare(entry, entry.fact, key)
        elif isinstance(entry.fact, DECISIONS):
            self.counts.unchecked += 1
        fold_entry(self.cluster, entry)
        return found

    def _decide(self, sequence: int) -> None:
        """Repeat the cycles and the answers that were made from the cluster as it is now."""
        if self._requests is not None:
            for run_id in self._index.answers.get(sequence, ()):
                self._answers[run_id] = self._requests.answers(self.cluster, run_id)
        for key, recorded in self._index.cycles.get(sequence, {}).items():
            if (policy := self._index.policies.get(key.policy)) is None:
                continue
            if key.about_nodes:
                facts = demand_facts(self.cluster, key, policy)
            else:
                facts = facts_of(replay_cycle(self.cluster, key, policy), self.cluster, key)
            self._open[key] = _ReplayedCycle(facts, recorded)
            self.counts.cycles += 1

    def _compare(self, entry: Entry, fact: Fact, key: CycleKey) -> list[Difference]:
        self.counts.decisions += 1
        self.counts.by_fact[fact.fact] += 1
        if key.at_sequence >= entry.sequence:
            text = f"says that it was decided from sequence {key.at_sequence}, which comes after it"
            return [_difference("from the future", entry, text)]
        cycle = self._open.get(key)
        if cycle is None:
            text = f"was decided by the policy {key.policy or '(none)'}, which no adopted fact of the log holds"
            return [_difference("unknown policy", entry, text)]
        found = _differences(cycle, entry, fact)
        self.counts.same += not found
        cycle.left -= 1
        if cycle.left == 0:
            self.counts.unpublished += cycle.unpublished
            del self._open[key]
        return found

    def _compare_answer(self, entry: Entry, fact: RunAccepted | RunRejected) -> list[Difference]:
        answers = self._answers.pop(fact.run_id, [])
        if not answers:
            self.counts.unasked += 1
            return []
        self.counts.answers += 1
        # A repeated answer has no decision record of its own.
        replayed = [answer.model_copy(update={"decision": fact.decision}) for answer in answers]
        closest = min((diff_fields(fact, answer) for answer in replayed), key=len)
        return [_difference("answer", entry, "the request is answered otherwise", closest)] if closest else []


def _differences(cycle: _ReplayedCycle, entry: Entry, fact: Fact) -> list[Difference]:
    """Return how a recorded decision differs from the repeated cycle."""
    place = cycle.find(fact)
    if place is None:
        return [_difference("not decided", entry, f"is not decided again; {_describe_decisions(cycle, fact)}")]
    is_repeated = place in cycle.taken
    cycle.taken.add(place)
    found: list[Difference] = []
    if fields := diff_fields(fact, cycle.facts[place]):
        found.append(_difference("content", entry, "is decided otherwise", fields))
    run_id = fact.aggregate_id
    # A fact that is in the log twice changes nothing the second time.
    if not is_repeated and place < cycle.reached.get(run_id, -1):
        before = cycle.facts[cycle.reached[run_id]].subject
        found.append(_difference("order", entry, f"comes after {before}, and is decided before it"))
    cycle.reached[run_id] = max(place, cycle.reached.get(run_id, -1))
    return found


def _describe_decisions(cycle: _ReplayedCycle, fact: Fact) -> str:
    """Return what is decided about the same run instead; else about any."""
    own = [replayed.event_id for replayed in cycle.facts if replayed.aggregate_id == fact.aggregate_id]
    if own:
        return f"instead: {', '.join(own)}"
    if not cycle.facts:
        return "nothing is"
    more = f" and {len(cycle.facts) - MAX_NAMED_FACTS} more" if len(cycle.facts) > MAX_NAMED_FACTS else ""
    return (
        f"nothing about it is, but {', '.join(replayed.event_id for replayed in cycle.facts[:MAX_NAMED_FACTS])}{more}"
    )


def _difference(kind: DifferenceKind, entry: Entry, text: str, fields: Iterable[FieldDiff] = ()) -> Difference:
    return Difference(kind, entry.sequence, entry.time, entry.subject, text, key_of(entry.fact), tuple(fields))


def verify_log(entries: Sequence[Entry], requests: RequestIndex | None = None) -> tuple[Counts, list[Difference]]:
    """Read a log twice; return what was compared, and the differences."""
    index = Index()
    for entry in entries:
        index.add(entry)
    verifier = ReplayVerifier(index, requests)
    found = [difference for entry in entries for difference in verifier.feed(entry)]
    return verifier.counts, found


def diff_fields(recorded: Fact, replayed: Fact) -> list[FieldDiff]:
    """Return the fields in which two facts differ as JSON, which has no tuples and one NaN; none if they are equal."""
    if type(recorded) is not type(replayed):
        return [FieldDiff("", recorded.fact, replayed.fact)]
    if isinstance(recorded, RunWaiting) and isinstance(replayed, RunWaiting):
        # The sentence is for people and changes between versions; ``code`` is the decision.
        replayed = replayed.model_copy(update={"message": recorded.message})
    if recorded == replayed:
        return []
    return list(_diff_values("", recorded.model_dump(mode="json"), replayed.model_dump(mode="json")))


def _diff_values(field: str, one: Any, other: Any) -> Iterator[FieldDiff]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in one | other:
            inner = f"{field}.{name}" if field else str(name)
            yield from _diff_values(inner, one.get(name, ABSENT), other.get(name, ABSENT))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _diff_values(f"{field}.{place}", left, right)
    elif one != other or (type(one) is not type(other) and not (_is_number(one) and _is_number(other))):
        yield FieldDiff(field, one, other)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
