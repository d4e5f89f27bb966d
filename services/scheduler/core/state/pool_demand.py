"""What was last said of the nodes that are wanted of each pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from contracts.events.capacity import CapacityWanted


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What was last said of a pool."""

    nodes: int
    #: When it was said, or when a node of the pool last came or went: from then on patience counts.
    since: datetime
    spare: tuple[str, ...] = ()
    gave_up_at: datetime | None = None


def update_demand(known: PoolDemand | None, fact: CapacityWanted, time: datetime) -> PoolDemand:
    """Fold ``capacity.<pool>.wanted``."""
    gave_up_at = time if fact.timed_out else known.gave_up_at if known else None
    # Patience restarts when demand grows, not when spare nodes change.
    since = known.since if known is not None and fact.nodes <= known.nodes else time
    return PoolDemand(fact.nodes, since, fact.spare, gave_up_at)


def reset_patience(known: PoolDemand, time: datetime) -> PoolDemand:
    """Fold that a node of the pool has come or gone: from now on patience counts."""
    return replace(known, since=time)
