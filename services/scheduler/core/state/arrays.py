"""Arrays: runs of one user and name that are submitted in one go. What one of them has used counts for all.

So a run that is split into many does not stay among those that have used least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: A run belongs to the array of the one before it if it comes within this time.
ARRAY_GAP_S = 1.0


@dataclass(slots=True)
class RunArray:
    """Runs that are not over, and the slot-seconds of all placements that are."""

    run_ids: dict[str, None] = field(default_factory=dict)
    served_slot_s: float = 0.0


@dataclass(slots=True)
class RunArrays:
    """All arrays, by the first run of each."""

    arrays: dict[str, RunArray] = field(default_factory=dict)
    #: Team, user and name -> the last array, and when its last run came (seconds since the epoch).
    newest: dict[str, tuple[str, float]] = field(default_factory=dict)

    def add(self, run_id: str, owner: str, now_s: float) -> str:
        """Return the array of a new run."""
        array_id, at_s = self.newest.get(owner, (run_id, -math.inf))
        if now_s - at_s > ARRAY_GAP_S or array_id not in self.arrays:
            array_id = run_id
        self.newest[owner] = array_id, now_s
        self.arrays.setdefault(array_id, RunArray()).run_ids[run_id] = None
        return array_id

    def remove(self, array_id: str, run_id: str) -> None:
        """Remove a run that is over."""
        if (array := self.arrays.get(array_id)) is not None:
            array.run_ids.pop(run_id, None)
            if not array.run_ids:
                del self.arrays[array_id]

    def serve(self, array_id: str, slot_s: float) -> list[str]:
        """Count a placement that is over; return the runs whose service counts for more by it."""
        array = self.arrays.get(array_id)
        if array is None:
            return []
        before = _rounded(array.served_slot_s)
        array.served_slot_s += slot_s
        return list(array.run_ids) if _rounded(array.served_slot_s) > before else []

    def served_slot_s(self, array_id: str) -> float:
        """Return the service of the array, rounded down to a power of two: it changes rarely for all of its runs."""
        array = self.arrays.get(array_id)
        return _rounded(array.served_slot_s) if array is not None else 0.0


def _rounded(slot_s: float) -> float:
    return math.ldexp(0.5, math.frexp(slot_s)[1]) if slot_s >= 1.0 else 0.0
