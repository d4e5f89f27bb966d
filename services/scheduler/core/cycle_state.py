"""What the steps of one scheduling cycle share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Literal, NamedTuple

from contracts.scheduling import Policy
from services.scheduler.core.decisions import NOTHING_LEFT, Decision, LeftOver
from services.scheduler.core.place.placer import Placer
from services.scheduler.core.place.resource_request import ResourceRequest
from services.scheduler.core.place.snapshot import ClusterSnapshot, NodeSlots
from services.scheduler.core.policy_features import PolicyFeatures
from services.scheduler.core.quota.entitlements import Entitlements
from services.scheduler.core.quota.transaction import Transaction
from services.scheduler.core.reasons import Why
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import EPOCH, Run

#: More than there can be of anything that is counted.
UNLIMITED = 1 << 60
#: Nodes that one cycle evaluates for the runs that it tries to place, each node once for each run. It takes about a
#: second: a tenth of the leases that clusters have. A count, and not a time, so that a replay decides the same.
MAX_PLACEMENT_WORK = 500_000
#: The same for the search for victims, which takes about 200 microseconds for each node and each slot.
MAX_SEARCH_WORK = 5_000
#: After how many seconds the next cycle goes on with what one has left over.
GO_ON_S = 0.001
#: The end of what a clock can tell, in seconds since the epoch.
END_OF_TIME_S = datetime.max.replace(tzinfo=UTC).timestamp()
#: The parts of a cycle whose durations are measured. Runs are nominated one by one while they are placed.
CyclePhase = Literal["settle", "order", "place", "preempt", "grow", "explain"]
#: Called when a phase begins, which ends the one before: the core has no clock.
BeginPhase = Callable[[CyclePhase], None]


def ignore_phase(phase: CyclePhase) -> None:
    """Measure nothing."""


@dataclass(slots=True)
class CycleResult:
    """The outcome of one cycle."""

    decisions: list[Decision] = field(default_factory=list)
    #: Each run that was examined and waits -> why.
    waits: dict[str, Why] = field(default_factory=dict)
    #: When the clock alone may change what is decided; None: only a new fact does.
    wake_at: datetime | None = None
    #: What the next cycle goes on with; and whether that includes the run that is asked about.
    left_over: LeftOver = NOTHING_LEFT
    is_left_over: bool = False


class Placement(NamedTuple):
    """A run that is placed in this cycle."""

    run: Run
    request: ResourceRequest
    slots: list[NodeSlots]


class CycleState:
    """The inputs of a cycle, the snapshot that its steps change, and what they have decided so far."""

    def __init__(
        self,
        cluster: Cluster,
        now: datetime,
        policy: Policy,
        reachable_since: datetime = EPOCH,
        about: str | None = None,
        left_over: LeftOver = NOTHING_LEFT,
    ) -> None:
        #: What the cycle before has left over.
        self.left_over = left_over
        self.cluster, self.now, self.policy, self.reachable_since = cluster, now, policy, reachable_since
        #: The run that is asked about: it is examined in any case.
        self.about = about
        self.now_s = now.timestamp()
        self.result = CycleResult()
        #: What is on in this cycle; that a run may get a reservation is known once the queue is in order.
        self.features = PolicyFeatures.of(policy, now)
        self.placer = Placer(cluster, policy, now, self.features)
        self.entitlements = Entitlements(cluster, policy, self.now_s, self.placer)
        #: Runs that are asked to release their slots by this cycle; runs that it queues, which compete in it.
        self.leaving: set[str] = set()
        self.queued: dict[str, Run] = {}
        self.placements: list[Placement] = []
        #: Runs that do not fit, in order.
        self.blocked: list[Run] = []
        #: Request -> the least number of slots that did not fit; what is free only shrinks while runs are placed.
        self.misfits: dict[ResourceRequest, int] = {}
        #: Nodes -> their free slots at the end of the cycle, and all their slots; for texts.
        self.slot_counts: dict[frozenset[str], tuple[int, int]] = {}
        #: Nodes evaluated to place runs, and to find victims.
        self.placement_work = self.search_work = 0
        self._wake_s = math.inf

    @cached_property
    def snapshot(self) -> ClusterSnapshot:
        """What is free; built only if a run could use it."""
        return ClusterSnapshot.free(self.cluster)

    def transaction(self) -> Transaction:
        """Begin changes of the snapshot that are kept or undone together."""
        return Transaction(self.snapshot, self.entitlements)

    def wake_at(self, at_s: float) -> None:
        """Run another cycle at this time at the latest; one that no clock can tell never comes."""
        if self.now_s < at_s < END_OF_TIME_S:
            self._wake_s = min(self._wake_s, at_s)

    def finish(self) -> CycleResult:
        left_over = self.result.left_over
        if left_over.preempt is not None:
            # The next cycle examines the same runs, until victims have been searched for all of them.
            self.result.left_over = left_over._replace(place=self.left_over.place)
        if any(left_over):
            self.wake_at(self.now_s + GO_ON_S)
        if self._wake_s < math.inf:
            self.result.wake_at = datetime.fromtimestamp(self._wake_s, UTC)
        return self.result
