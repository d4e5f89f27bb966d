"""The cluster as it was at a time in the past, and what the scheduler would have answered then."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from contracts.scheduling import Policy
from services.scheduler.core.explain.why import answer
from services.scheduler.core.quarantine import explain_quarantine
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import EPOCH
from trainbus.operate.history.cycles import cycle_key_of
from trainbus.operate.history.log import Entry, fold_entry


@dataclass(slots=True)
class PastState:
    """The cluster as it was at ``at``; ``feed`` it the log from the beginning until it returns False."""

    at: datetime
    cluster: Cluster = field(default_factory=Cluster)
    reachable_since: datetime | None = None

    def feed(self, entry: Entry) -> bool:
        """Fold an entry; False if it is newer than ``at``, as are all that follow."""
        if entry.time > self.at:
            return False
        if (key := cycle_key_of(entry.fact)) is not None:
            self.reachable_since = key.reachable_since
        fold_entry(self.cluster, entry)
        return True

    @property
    def policy(self) -> Policy:
        """Return the policy in force; the default where none had been adopted."""
        return self.cluster.policy or Policy()

    def why(self, run_id: str) -> dict[str, Any]:
        """Return what the scheduler would have answered."""
        found = explain_quarantine(self.cluster, run_id)
        found = found or answer(self.cluster, run_id, self.at, self.policy, self.reachable_since or EPOCH)
        return found | {
            "at": self.at.isoformat(),
            "sequence": self.cluster.sequence,
            "policy": {"name": self.policy.name, "digest": self.policy.digest},
        }
