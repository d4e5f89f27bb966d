"""The states of a run. Apart from the facts that lead to them: a list of runs needs the names alone."""

from __future__ import annotations

STATES = (
    "requested",
    "accepted",
    "preparing",
    "queued",
    "placed",
    "running",
    "stopping",
    "cancelling",
    "completed",
    "failed",
    "cancelled",
    "rejected",
)
#: After these nothing more happens to the run itself; what follows is about its result.
TERMINAL_STATES = frozenset({"completed", "failed", "cancelled", "rejected"})
#: In these a run may hold slots.
HOLDING_STATES = frozenset({"placed", "running", "stopping", "cancelling"})
