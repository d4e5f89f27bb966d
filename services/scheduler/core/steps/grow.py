"""Growing: idle slots go to runs that can use more than they have."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta

from contracts.scheduling import Policy
from services.scheduler.core.decisions import PreemptRun
from services.scheduler.core.order import queue
from services.scheduler.core.place.placer import Placer
from services.scheduler.core.place.resource_request import avoided, resource_request_of, useful
from services.scheduler.core.place.snapshot import ClusterSnapshot, NodeCapacity
from services.scheduler.core.quota.entitlements import Entitlements, held
from services.scheduler.core.state.cluster import EPOCH, Cluster, Phase, Run


def grow_runs(
    cluster: Cluster,
    free: Callable[[], ClusterSnapshot],
    now: datetime,
    policy: Policy,
    placer: Placer,
    entitlements: Entitlements,
) -> tuple[list[PreemptRun], float]:
    """The restarts that put idle slots to use, and when to look again (seconds since the epoch).

    Only called when nobody waits for them.
    """
    candidates = []
    for run_id in cluster.active:
        run = cluster.runs[run_id]
        if run.preempting is not None:
            return [], math.inf
        if run.least < run.most and run.slot_count < run.most and _resumable(run):
            candidates.append(run)
    if not candidates or not (snapshot := free()).whole():
        return [], math.inf
    idle, wake_s = _at_rest(cluster, snapshot, now, policy)
    chosen: list[PreemptRun] = []
    for run in sorted(candidates, key=lambda run: queue.key_of(cluster, run, now, policy)):
        settled_s = run.placed_at.timestamp() + policy.elastic.resize_interval_s
        if settled_s > now.timestamp():
            wake_s = min(wake_s, settled_s)
            continue
        trial = _with_own(cluster, run, idle)
        wants, avoid = resource_request_of(cluster, run), avoided(cluster, run, policy)
        entitlements.refund_run(run)
        most, shut = entitlements.most(run, wants, run.spec.slots.max)
        count = useful(run, min(most, placer.most(trial, run, wants, avoid | shut))) if most > run.slot_count else 0
        found = placer.find(trial, run, count, wants, avoid, shut) if count > run.slot_count else None
        entitlements.charge(run, found or held(run))
        if found is None:
            continue
        reason = f"grows from {run.slot_count} to {count} slots"
        chosen.append(PreemptRun(run.run_id, run.generation, reason, "resized", run.spec.grace_s))
        trial.allocate(wants.demand, found)
        idle = ClusterSnapshot(
            {node_id: capacity for node_id, capacity in trial.nodes.items() if node_id in idle.nodes}
        )
    return chosen, wake_s


def _resumable(run: Run) -> bool:
    # A command has no checkpoints and would begin again; an evaluation is over before growing pays.
    trains = run.spec.task is not None and run.spec.kind == "train"
    return trains and run.phase is Phase.RUNNING and all(part.ended is None for part in run.parts.values())


def _at_rest(
    cluster: Cluster, snapshot: ClusterSnapshot, now: datetime, policy: Policy
) -> tuple[ClusterSnapshot, float]:
    """The rooms that are worth a restart: nobody has come for them while things were at rest; and when more are."""
    elastic = policy.elastic
    rest_at = cluster.moved_at + timedelta(seconds=elastic.resize_interval_s)
    capacities: dict[str, NodeCapacity] = {}
    wake_s = math.inf if rest_at <= now else rest_at.timestamp()
    for node_id, capacity in snapshot.nodes.items():
        since = capacity.node.free_since
        anyway_at = since + timedelta(seconds=elastic.grow_anyway_s)
        if rest_at <= now or (since != EPOCH and anyway_at <= now):
            capacities[node_id] = capacity
        elif since != EPOCH:
            wake_s = min(wake_s, anyway_at.timestamp())
    return ClusterSnapshot(capacities), wake_s


def _with_own(cluster: Cluster, run: Run, idle: ClusterSnapshot) -> ClusterSnapshot:
    """What is idle, and what the run has already."""
    trial = idle.copy()
    for part in run.live:
        node = cluster.nodes[part.node_id]
        if part.node_id not in trial.nodes and node.is_schedulable:
            # All of it is taken, but what the run itself has.
            trial.put(
                part.node_id, NodeCapacity(node, [0] * node.slots, node.free_cpu_milli, node.free_memory_bytes, 0, 0)
            )
    trial.release_run(run)
    return trial
