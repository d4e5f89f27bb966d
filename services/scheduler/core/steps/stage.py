"""Stage: the files of a script's data are copied to nodes before the script is queued, so that no slot waits for them.

The nodes are those that it would get if it were placed now, or if all others had ended. It is queued once each has
answered, has gone or takes no run any more, and at the policy's limit in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from contracts.scheduling import Policy
from services.scheduler.core.cycle_state import GO_ON_S, MAX_PLACEMENT_WORK, CycleState
from services.scheduler.core.decisions import StageRun
from services.scheduler.core.place.placer import has_data
from services.scheduler.core.place.resource_request import resource_request_of, useful
from services.scheduler.core.place.snapshot import ClusterSnapshot, NodeSlots
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.suspects import note_suspect


def staging_end_s(run: Run, policy: Policy) -> float:
    """Return when a run that is staged is queued in any case, in seconds since the epoch."""
    return run.staging_at.timestamp() + policy.place.staging_limit_s


def awaited_nodes(cluster: Cluster, run: Run) -> Iterator[str]:
    """Yield the nodes whose answer a run that is staged waits for."""
    for node_id, incarnation in run.awaited_nodes.items():
        node = cluster.nodes.get(node_id)
        # One that lives again, or is left, may have stopped; and the run does not go to one that takes none.
        if node is not None and node.incarnation == incarnation and node.is_schedulable:
            yield node_id


def stage_runs(cycle: CycleState, runs: Iterable[Run]) -> list[Run]:
    """Decide where the files of new scripts are to be; return the runs that are queued at once."""
    limit_s = cycle.policy.place.staging_limit_s
    if limit_s <= 0:
        return list(runs)
    likely, queued, run_id = LikelyNodes(cycle), [], ""
    try:
        for run in sorted(runs, key=lambda each: (each.submitted, each.run_id)):
            run_id = run.run_id
            if likely.work >= MAX_PLACEMENT_WORK:
                # The others stay as they are until the next cycle.
                cycle.wake_at(cycle.now_s + GO_ON_S)
                break
            nodes = (cycle.cluster.nodes[node_id] for node_id in likely.choose(run))
            absent = tuple(node.node_id for node in nodes if node.stages_data and not has_data(node, run))
            if absent:
                cycle.result.decisions.append(StageRun(run_id, absent, limit_s))
            else:
                queued.append(run)
    except Exception as error:
        note_suspect(error, run_id=run_id)
        raise
    return queued


class LikelyNodes:
    """Chooses nodes for runs that are not queued yet, as if each of them were placed where it is chosen for."""

    def __init__(self, cycle: CycleState) -> None:
        self._cycle = cycle
        #: Nodes evaluated.
        self.work = 0
        self._staged: tuple[ClusterSnapshot, ClusterSnapshot] | None = None

    def choose(self, run: Run) -> list[str]:
        """Return the nodes that the run will probably get; none if it fits on none."""
        placer, request = self._cycle.placer, resource_request_of(self._cycle.cluster, run)
        for snapshot in (*self._snapshots(), placer.empty().copy()):
            self.work += len(placer.eligible(request))
            # As wide as it would be placed there.
            count = max(run.least, useful(run, min(run.most, placer.most(snapshot, run, request))))
            slots = placer.find(snapshot, run, count, request)
            if slots is not None:
                snapshot.allocate(request.slot_spec, slots)
                return sorted(node_id for node_id, _ in slots)
        return []

    def _snapshots(self) -> tuple[ClusterSnapshot, ClusterSnapshot]:
        """Return what is free, and all there is, without what the runs get whose data is being copied."""
        if self._staged is None:
            cluster = self._cycle.cluster
            self._staged = free, whole = self._cycle.snapshot.copy(), self._cycle.placer.empty().copy()
            for run_id in cluster.unqueued:
                run = cluster.runs[run_id]
                if run.staging is not None:
                    any(_allocate(snapshot, run, run.staging.node_ids) for snapshot in (free, whole))
        return self._staged


def _allocate(snapshot: ClusterSnapshot, run: Run, node_ids: Iterable[str]) -> bool:
    """Allocate a run's slots on the nodes; False if they have none left."""
    taken: list[NodeSlots] = []
    left = run.least
    for capacity in (snapshot.nodes[node_id] for node_id in dict.fromkeys(node_ids) if node_id in snapshot.nodes):
        count = min(left, capacity.fits(run.slot_spec))
        taken += [(capacity.node.node_id, capacity.pick(run.slot_spec, count))] if count else []
        left -= count
    snapshot.allocate(run.slot_spec, taken)
    return bool(taken)
