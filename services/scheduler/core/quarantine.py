"""Quarantine: a run or a node on which a step fails is put aside, and the scheduler goes on with the rest.

A defect, or a fact that no version of this code should have published, must not stop every scheduler for ever. The
fold quarantines the run or node of a fact that it cannot apply. ``run_cycle`` quarantines the run or node on which a
scheduling cycle fails, and repeats the cycle. A quarantined run is neither placed nor preempted, and keeps its slots;
nothing is placed on a quarantined node. Both are shown by ``why`` and ``state``, by a metric and by an alert.

A run leaves quarantine when a new fact about it arrives (if a cycle failed on it) or when it is cancelled; a node
leaves it when it joins again.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from types import FrameType
from typing import Any

from contracts.scheduling import Policy
from services.scheduler.core.cycle_state import CycleResult
from services.scheduler.core.decide import run_steps
from services.scheduler.core.decisions import CancelRun, PlaceRun
from services.scheduler.core.state.cluster import EPOCH, Cluster, Node, Run
from services.scheduler.core.state.quarantine import (
    describe_error,
    quarantine_node,
    quarantine_run,
    release_node,
    release_run,
    reset_index,
)

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

    Where the failing code looks at a run and a node together, the run is suspected first. If the same node turns up
    with a second run, it is the node, and the runs suspected with it are released. Where it looks at a node alone, on
    behalf of a run, the node is suspected first (see ``Suspects``).
    """
    reason = describe_error(error)
    inspected = [
        (
            run if run and run.run_id in cluster.runs and run.run_id not in cluster.quarantined_runs else None,
            node if node and node.node_id in cluster.nodes and not node.quarantined else None,
        )
        for run, node in _inspected(error)
    ]
    behalf = next((run for run, _ in inspected if run), None)
    for run, node in inspected:
        if node and (not run or node.node_id in suspects.runs):
            if node.node_id in suspects.runs:
                for run_id in suspects.runs.pop(node.node_id):
                    release_run(cluster, run_id)
            elif behalf:
                suspects.nodes[behalf.run_id].append(node.node_id)
            quarantine_node(cluster, node.node_id, "cycle", reason)
            return True
        if run:
            if node:
                suspects.runs[node.node_id].append(run.run_id)
            quarantine_run(cluster, run.run_id, "cycle", reason)
            return True
    # The newest change is the most likely cause.
    rest = [run_id for members in (cluster.unqueued, cluster.queued, cluster.active) for run_id in members]
    if not rest:
        reset_index(cluster)
        return False
    quarantine_run(cluster, max(rest, key=lambda run_id: cluster.runs[run_id].last_sequence), "cycle", reason)
    return True


def _inspected(error: Exception) -> Iterator[tuple[Run | None, Node | None]]:
    """Yield the run and the node that each frame of the error's traceback was looking at, the innermost first."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        run, node = _find(frame, "run", Run), _find(frame, "node", Node)
        if run is not None or node is not None:
            yield run, node


def _find(frame: FrameType, name: str, kind: type[Any]) -> Any:
    """Return the frame's variable of that name, else its last variable that holds one (also as ``value.run``)."""
    values = frame.f_locals
    ordered = [values[name]] if name in values else []
    for value in (*ordered, *reversed(list(values.values()))):
        if isinstance(value, kind):
            return value
        if isinstance(inner := getattr(value, name, None), kind):
            return inner
    return None
