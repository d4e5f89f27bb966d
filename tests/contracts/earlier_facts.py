"""Facts as version 1 published them."""

from __future__ import annotations

from contracts.base import Fact
from contracts.earlier_events import PolicyAdoptedV1, RunPreempting
from contracts.events.capacity import PolicyAdopted
from contracts.events.run import RunStopping, queue_reason_of


def as_version_1(fact: Fact) -> Fact:
    """Return a stop or an adoption as version 1 would have published it; any other fact as it is."""
    if isinstance(fact, PolicyAdopted):
        data = fact.model_dump(mode="json")
        data["policy"]["reclaim"] = data["policy"].pop("preemption")
        return PolicyAdoptedV1.model_validate(data)
    if not isinstance(fact, RunStopping):
        return fact
    same = {name: getattr(fact, name) for name in fact.model_fields_set - {"reason", "message"}}
    return RunPreempting(**same, reason=fact.message, queue_reason=queue_reason_of(fact.reason))
