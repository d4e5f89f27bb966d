"""What a model takes: time for an answer, bytes, and the slot-hours of its training. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from contracts.base import Fact
from contracts.events.run import RunExited, RunReleased
from contracts.state.placements import Placements


@dataclass(frozen=True, slots=True)
class Footprint:
    """What is known of it; None: not measured."""

    latency_ms: float | None = None
    #: Of the weights.
    size_bytes: int | None = None
    slot_hours: float | None = None


def slot_hours(facts: Iterable[tuple[Fact, datetime]]) -> float | None:
    """Return for how long a run held how many slots; None if it was never placed.

    Args:
        facts: ``PLACEMENT_FACTS`` and ends of its ranks, in stream order, each with its time.
    """
    held: dict[tuple[int, str], tuple[int, datetime]] = {}
    seconds, placements = 0.0, Placements()
    for fact, at in facts:
        if isinstance(fact, RunReleased | RunExited):
            slots, since = held.pop((fact.generation, fact.node_id), (0, at))
            seconds += slots * max(0.0, (at - since).total_seconds())
        elif placements.apply(fact) and (placed := placements.standing) is not None:
            for member in placed.members:
                held[placed.generation, member.node_id] = len(member.slots), at
    return seconds / 3600 if placements.standing is not None else None
