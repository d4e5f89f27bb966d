"""Why a run was where it was, as it would have been answered then."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from contracts.scheduling import Policy
from services.scheduler.core.explain.why import answer
from services.scheduler.core.quarantine import explain_quarantine
from services.scheduler.core.state.cluster import EPOCH, Cluster
from services.scheduler.replay.cycles import key_of
from services.scheduler.replay.log import Entry, fold_entry
from services.scheduler.replay.requests import is_answer


@dataclass(slots=True)
class PastState:
    """The cluster as it was at ``at``; ``feed`` it the log from the beginning until it says that it is enough."""

    at: datetime
    cluster: Cluster = field(default_factory=Cluster)
    reachable_since: datetime | None = None

    def feed(self, entry: Entry) -> bool:
        """Fold an entry, if it was there by then; False if it came later, and with it all that follow."""
        if entry.time > self.at:
            return False
        if (key := key_of(entry.fact)) is not None and not is_answer(entry.fact):
            self.reachable_since = key.reachable_since
        fold_entry(self.cluster, entry)
        return True

    @property
    def policy(self) -> Policy:
        """The policy in force; the default where none had been adopted."""
        return self.cluster.policy or Policy()

    def why(self, run_id: str) -> dict[str, Any]:
        """What the scheduler would have answered."""
        quarantined = explain_quarantine(self.cluster, run_id)
        said = quarantined or answer(self.cluster, run_id, self.at, self.policy, self.reachable_since or EPOCH)
        return said | {
            "at": self.at.isoformat(),
            "sequence": self.cluster.sequence,
            "policy": {"name": self.policy.name, "digest": self.policy.digest},
        }
