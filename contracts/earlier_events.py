"""Events of an earlier version that streams still hold: what they were, and the event that each of them is read as.

``EARLIER_EVENTS`` lists them; ``BY_TYPE`` of ``contracts.events`` lists the present ones. No other module knows the
earlier ones: readers get the present event, and nothing publishes another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

from contracts import subjects
from contracts.base import Event, Fact, Token, token
from contracts.events import BY_TYPE
from contracts.events.capacity import PolicyAdopted
from contracts.events.run import DecisionRecord, GenerationFact, RunStopping, StopReason
from contracts.events.train import AdoptPolicyRequested
from contracts.lenient import Lenient
from contracts.scheduling import EARLIER_PREEMPTION, Policy, Preemption, rename_setting


class RunPreempting(GenerationFact, fact="preempting"):
    """The ranks must checkpoint and release their slots within ``grace_s``; 0: at once, without a checkpoint."""

    reason: str
    queue_reason: Literal["new", "preempted", "resized", "node lost", "crashed"] = "preempted"
    grace_s: float = Field(ge=0)
    #: What becomes of the run once every node has released its slots.
    then: Literal["queue", "cancel", "fail"] = "queue"
    #: The run that gets the slots.
    preemptor: Token | None = None
    #: Slot-seconds that the restart costs (work lost, and the time to resume), and those that it gains.
    cost_slot_s: float | None = None
    gain_slot_s: float | None = None
    decision: DecisionRecord | None = None


#: What the sentences of a stop say more precisely, as schedulers wrote them: (queue_reason, sentence, reason).
#: Anybody can publish a long sentence: no pattern may take more than linear time.
_SENTENCES: tuple[tuple[str, re.Pattern[str], StopReason], ...] = (
    ("node lost", re.compile(r"node \S+ is unfit: "), "unfit"),
    ("node lost", re.compile(r"rank \d+ on \S+ has made no step for "), "stalled"),
    ("node lost", re.compile(r"its ranks on .+ have not started within "), "start_deadline"),
    ("node lost", re.compile(r"ranks on \S+ failed"), "infrastructure"),
    ("preempted", re.compile(r"node \S+ is being drained$"), "drained"),
    ("preempted", re.compile(r"node \S+ is taken away"), "notice"),
    ("preempted", re.compile(r"node \S+ has released its ranks$"), "released"),
    ("preempted", re.compile(r"maintenance of node \S+ begins$"), "maintenance"),
    ("preempted", re.compile(r"[^;]* of this period; the next one begins at "), "quota_spent"),
)
_REASONS: dict[str, StopReason] = {
    "new": "preempted",
    "preempted": "preempted",
    "resized": "resized",
    "node lost": "node_lost",
    "crashed": "crashed",
}


def stop_reason(old: RunPreempting) -> StopReason:
    """Return the reason that an old stop had, from all that it says."""
    if old.then == "cancel":
        return "run_over" if old.reason == "the run is over" else "cancelled"
    if old.then == "fail":
        return "time_limit"
    for queue_reason, sentence, reason in _SENTENCES:
        if old.queue_reason == queue_reason and sentence.match(old.reason):
            return reason
    return _REASONS[old.queue_reason]


def _to_stopping(old: RunPreempting) -> RunStopping:
    same = {name: getattr(old, name) for name in old.model_fields_set - {"reason", "queue_reason"}}
    return RunStopping(**same, reason=stop_reason(old), message=old.reason)


class PolicyV1(Policy):
    """A policy whose section ``preemption`` is called ``reclaim``."""

    model_config = ConfigDict(serialize_by_alias=True)

    preemption: Preemption = Field(Preemption.defaults(), alias=EARLIER_PREEMPTION)


class PolicyAdoptedV1(PolicyAdopted, fact="adopted", version=1):
    """The scheduler decides by this policy from its next cycle on."""

    policy: Lenient[PolicyV1]


class AdoptPolicyRequestedV1(AdoptPolicyRequested, verb="adopt_policy", version=1):
    """Decide by this policy from the next scheduling cycle on."""

    policy: PolicyV1


def _to_policy(old: PolicyV1) -> Policy:
    # Without its rules: one that was recorded may break a rule of today.
    return Policy.model_construct(**{name: getattr(old, name) for name in old.model_fields_set})


def _to_adopted(old: PolicyAdoptedV1) -> PolicyAdopted:
    same = {name: getattr(old, name) for name in old.model_fields_set}
    settings = tuple(map(rename_setting, old.settings))
    return PolicyAdopted(**same | {"policy": _to_policy(old.policy), "settings": settings})


def _to_adopt_policy(old: AdoptPolicyRequestedV1) -> AdoptPolicyRequested:
    same = {name: getattr(old, name) for name in old.model_fields_set}
    return AdoptPolicyRequested(**same | {"policy": _to_policy(old.policy)})


class EarlierEvent(NamedTuple):
    """An event of an earlier version: its class, the one that it is read as, and how."""

    recorded: type[Event]
    current: type[Event]
    upgrade: Callable[[Any], Event]


#: By the type under which they are stored.
EARLIER_EVENTS: dict[str, EarlierEvent] = {
    RunPreempting.type: EarlierEvent(RunPreempting, RunStopping, _to_stopping),
    PolicyAdoptedV1.type: EarlierEvent(PolicyAdoptedV1, PolicyAdopted, _to_adopted),
    AdoptPolicyRequestedV1.type: EarlierEvent(AdoptPolicyRequestedV1, AdoptPolicyRequested, _to_adopt_policy),
}


def model_of(event_type: str) -> type[Event] | None:
    """Return the class of the data that is stored under a type; None if there is no such event."""
    old = EARLIER_EVENTS.get(event_type)
    return old.recorded if old is not None else BY_TYPE.get(event_type)


def read_data(event_type: str, data: Any, extra: Literal["ignore"] | None = None) -> Event:
    """Return stored data as the present event.

    Args:
        extra: "ignore" ignores unknown fields even where the event refuses them.

    Raises:
        KeyError: no event has the type.
        ValidationError: the data does not fit it.
    """
    old = EARLIER_EVENTS.get(event_type)
    if old is None:
        return BY_TYPE[event_type].model_validate(data, extra=extra)
    return old.upgrade(old.recorded.model_validate(data, extra=extra))


def stored_subject(event: Event, event_type: str) -> str:
    """Return the subject that an event read from ``event_type`` was published on."""
    old = EARLIER_EVENTS.get(event_type)
    if old is None:
        return event.subject
    if issubclass(old.recorded, Fact) and isinstance(event, Fact):
        return subjects.fact(old.recorded.aggregate, token(event.aggregate_id), old.recorded.fact)
    return old.recorded.subject_filter()


def subject_filters(event: type[Event]) -> tuple[str, ...]:
    """Return the subjects that carry every event of a class, those of earlier versions too; each once."""
    earlier = (old.recorded.subject_filter() for old in EARLIER_EVENTS.values() if old.current is event)
    return tuple(dict.fromkeys((event.subject_filter(), *earlier)))
