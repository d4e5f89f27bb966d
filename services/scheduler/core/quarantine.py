"""Quarantine: a run or a node on which a step fails is put aside, and the scheduler goes on with the rest.

A defect, or a fact that no version of this code should have published, must not stop every scheduler for ever. The
fold quarantines the run or node of a fact that it cannot apply. ``run_cycle`` quarantines the run or node on which a
scheduling cycle fails, and repeats the cycle. A quarantined run is neither placed nor preempted, and keeps its slots;
nothing is placed on a quarantined node. Both are shown by ``why`` and ``state``, by a metric and by an alert.

A run leaves quarantine when a new fact about it arrives (if a cycle failed on it) or when it is cancelled; a node
leaves it when it joins again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from contracts.scheduling import Policy
from services.scheduler.core.cycle_state import CycleResult
from services.scheduler.core.decide import run_steps
from services.scheduler.core.decisions import CancelRun, PlaceRun
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.quarantine import (
    describe_error,
    quarantine_node,
    quarantine_run,
    release_node,
    release_run,
    reset_index,
)
from services.scheduler.core.state.run import EPOCH
from services.scheduler.core.state.suspects import Suspect, suspects_of

#: Runs and nodes that one cycle may quarantine. Beyond it the cycle decides nothing.
MAX_QUARANTINED_PER_CYCLE = 100


def run_cycle(
    cluster: Cluster, now: datetime, policy: Policy, reachable_since: datetime = EPOCH, **options: Any
) -> CycleResult:
    """Run a scheduling cycle that quarantines what it fails on. Same input, same output; never raises."""
    suspects = Suspects()
    for _ in range(MAX_QUARANTINED_PER_CYCLE):
        try:
            made = run_steps(cluster, now, policy, reachable_since, **options)
        except Exception as error:
            if not _quarantine_culprit(cluster, error, suspects):
                break
        else:
            if suspects.accuse_waiting_run(cluster, made):
                continue
            made.decisions += cancellations(cluster)
            return made
    return CycleResult(list(cancellations(cluster)))


@dataclass(slots=True)
class Suspects:
    """Runs and nodes that steps of one cycle failed on together, one of each pair in quarantine."""

    #: Node -> the runs that are in quarantine, although it may be the node.
    runs: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    #: Run -> the nodes that are in quarantine, although it may be the run.
    nodes: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    #: Run that may be preempted -> the runs that are in quarantine, although it may be that one.
    preemptors: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def release_runs(self, cluster: Cluster, node_id: str) -> None:
        """Release the runs that were suspected in place of the node."""
        for run_id in self.runs.pop(node_id, ()):
            release_run(cluster, run_id)

    def release_preemptors(self, cluster: Cluster, victim_id: str) -> None:
        """Release the runs that were suspected in place of the victim."""
        for run_id in self.preemptors.pop(victim_id, ()):
            release_run(cluster, run_id)

    def accuse_waiting_run(self, cluster: Cluster, made: CycleResult) -> bool:
        """Swap the nodes of a run that is not placed without them for the run itself; False if there is none.

        One run waits rather than nodes are lost to all others. If a second run fails on such a node, it is the node.
        """
        placed = {decision.run_id for decision in made.decisions if isinstance(decision, PlaceRun)}
        run_id = next((run_id for run_id in self.nodes if run_id not in placed and run_id in cluster.runs), None)
        if run_id is None:
            return False
        reason = ""
        for node_id in self.nodes.pop(run_id):
            if (record := cluster.quarantined_nodes.get(node_id)) is not None:
                reason = record.reason
                release_node(cluster, node_id)
                self.runs[node_id].append(run_id)
        quarantine_run(cluster, run_id, "cycle", reason)
        return True


def cancellations(cluster: Cluster) -> list[CancelRun]:
    """Return the cancellations of quarantined runs: the way out that an operator has."""
    runs = (cluster.runs.get(run_id) for run_id in cluster.quarantined_runs)
    return [
        CancelRun(run.run_id, run.cancel_reason)
        for run in runs
        if run is not None and run.cancel_reason is not None and not run.terminal
    ]


def explain_quarantine(cluster: Cluster, run_id: str) -> dict[str, Any] | None:
    """Return the answer to "why does this run wait" for a quarantined run; None for any other."""
    record = cluster.quarantined_runs.get(run_id)
    if record is None:
        return None
    message = (
        f"the scheduler fails on this run and has put it aside, so that others go on ({record.step}: {record.reason}). "
        f"This is a defect: please report it. `trainbus cancel {run_id}` ends the run; submit it again under a new id"
    )
    return {"run_id": run_id, "state": "quarantined", "code": "quarantined", "message": message}


def describe_quarantine(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Return everything in quarantine with its reason, by ``runs`` and ``nodes``."""
    return {
        "runs": {run_id: record.reason for run_id, record in cluster.quarantined_runs.items()},
        "nodes": {node_id: record.reason for node_id, record in cluster.quarantined_nodes.items()},
    }


def _quarantine_culprit(cluster: Cluster, error: Exception, suspects: Suspects) -> bool:
    """Quarantine what the cycle failed on; False if nothing is left to be quarantined.

    Where the failing code looks at a run and a node together, or at a run and its victim, the run is suspected first.
    If the same node or victim turns up with a second run, it is that one, and the runs suspected with it are released.
    Where it looks at a node alone, on behalf of a run, the node is suspected first (see ``Suspects``).
    """
    reason = describe_error(error)
    noted = [_without_known(cluster, each) for each in suspects_of(error)]
    behalf = next((each.run_id for each in noted if each.run_id), "")
    for run_id, node_id, victim_id in noted:
        if node_id and (not run_id or node_id in suspects.runs):
            if node_id in suspects.runs:
                suspects.release_runs(cluster, node_id)
            elif behalf:
                suspects.nodes[behalf].append(node_id)
            quarantine_node(cluster, node_id, "cycle", reason)
            return True
        if victim_id and (not run_id or victim_id in suspects.preemptors):
            suspects.release_preemptors(cluster, victim_id)
            quarantine_run(cluster, victim_id, "cycle", reason)
            return True
        if run_id:
            if node_id:
                suspects.runs[node_id].append(run_id)
            if victim_id:
                suspects.preemptors[victim_id].append(run_id)
            quarantine_run(cluster, run_id, "cycle", reason)
            return True
    # The newest change is the most likely cause.
    rest = [run_id for members in (cluster.unqueued, cluster.queued, cluster.active) for run_id in members]
    if not rest:
        reset_index(cluster)
        return False
    quarantine_run(cluster, max(rest, key=lambda run_id: cluster.runs[run_id].last_sequence), "cycle", reason)
    return True


def _without_known(cluster: Cluster, noted: Suspect) -> Suspect:
    """Return what was noted without what is no part of the cluster, or in quarantine already."""
    runs, nodes = cluster.runs, cluster.nodes
    run_id, victim_id = (
        each if each in runs and each not in cluster.quarantined_runs else ""
        for each in (noted.run_id, noted.victim_id)
    )
    node = nodes.get(noted.node_id)
    return Suspect(run_id, "" if node is None or node.quarantined else node.node_id, victim_id)
