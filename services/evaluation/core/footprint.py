"""What a model takes: time for an answer, bytes, and the slot-hours of its training. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from contracts.events.run import RunExited, RunFact, RunPlaced, RunReleased


@dataclass(frozen=True, slots=True)
class Footprint:
    """What is known of it; None: not measured."""

    latency_ms: float | None = None
    #: Of the weights.
    size_bytes: int | None = None
    slot_hours: float | None = None


def slot_hours(facts: Iterable[tuple[RunFact, datetime]]) -> float | None:
    """Return for how long a run held how many slots, from its placements and ends; None if it was never placed."""
    held: dict[tuple[int, str], tuple[int, datetime]] = {}
    seconds, was_placed = 0.0, False
    for fact, at in facts:
        if isinstance(fact, RunPlaced):
            was_placed = True
            for member in fact.members:
                held[fact.generation, member.node_id] = len(member.slots), at
        elif isinstance(fact, RunReleased | RunExited):
            slots, since = held.pop((fact.generation, fact.node_id), (0, at))
            seconds += slots * max(0.0, (at - since).total_seconds())
    return seconds / 3600 if was_placed else None
