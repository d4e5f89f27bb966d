"""Grow: idle slots go to runs that can use more than they have."""

from __future__ import annotations

from datetime import timedelta

from services.scheduler.core.cycle_state import CycleState
from services.scheduler.core.decisions import StopRun
from services.scheduler.core.order import queue
from services.scheduler.core.place.resource_request import avoided, resource_request_of, useful
from services.scheduler.core.place.snapshot import ClusterSnapshot, NodeCapacity
from services.scheduler.core.price import growth_price
from services.scheduler.core.quota.transaction import Transaction
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import EPOCH, Phase, Run
from services.scheduler.core.state.suspects import note_suspect


def grow_runs(cycle: CycleState) -> None:
    """Restart runs that can use idle slots, where that gains more than the restart costs; while no run waits."""
    cluster, policy = cycle.cluster, cycle.policy
    candidates = []
    run_id = ""
    try:
        for run_id in cluster.active:
            run = cluster.runs[run_id]
            if run.stopping is not None:
                return
            if run.least < run.most and run.slot_count < run.most and _can_restart(run):
                candidates.append(run)
    except Exception as error:
        note_suspect(error, run_id=run_id)
        raise
    if not candidates or not cycle.snapshot.whole():
        return
    idle = _idle_snapshot(cycle)
    for run in sorted(candidates, key=lambda run: queue.key_of(cluster, run, cycle.now, policy)):
        try:
            idle = _grow(cycle, run, idle)
        except Exception as error:
            note_suspect(error, run_id=run.run_id)
            raise


def _grow(cycle: CycleState, run: Run, idle: ClusterSnapshot) -> ClusterSnapshot:
    """Restart the run with more slots if that pays; return what is idle then."""
    cluster, policy, placer = cycle.cluster, cycle.policy, cycle.placer
    settled_s = run.placed_at.timestamp() + policy.elastic.resize_interval_s
    if settled_s > cycle.now_s:
        cycle.wake_at(settled_s)
        return idle
    trial = _with_own_nodes(cluster, run, idle)
    request, avoid = resource_request_of(cluster, run), avoided(cluster, run, policy)
    with Transaction(trial, cycle.entitlements) as change:
        change.release_run(run)
        most, shut = cycle.entitlements.most(run, request, run.spec.slots.max)
        if most <= run.slot_count:
            return idle
        count = useful(run, min(most, placer.most(trial, run, request, avoid | shut)))
        price = growth_price(cluster, run, count, cycle.now, policy)
        if count <= run.slot_count or not price.is_worth_it:
            return idle
        slots = placer.find(trial, run, count, request, avoid, shut)
        if slots is None:
            return idle
        change.allocate(run, slots)
        change.commit()
    message = f"grows from {run.slot_count} to {count} slots"
    cycle.result.decisions.append(
        StopRun(run.run_id, run.generation, "resized", message, run.spec.grace_s, price=price)
    )
    return ClusterSnapshot({node_id: each for node_id, each in trial.nodes.items() if node_id in idle.nodes})


def _can_restart(run: Run) -> bool:
    # A command has no checkpoints and would begin again; an evaluation is over before growing pays.
    return run.is_resumable and run.phase is Phase.RUNNING and all(part.ended is None for part in run.parts.values())


def _idle_snapshot(cycle: CycleState) -> ClusterSnapshot:
    """Return the nodes whose free slots no run has come for while allocations were at rest."""
    elastic, now = cycle.policy.elastic, cycle.now
    rest_at = cycle.cluster.moved_at + timedelta(seconds=elastic.resize_interval_s)
    idle: dict[str, NodeCapacity] = {}
    cycle.wake_at(rest_at.timestamp())
    node_id = ""
    try:
        for node_id, capacity in cycle.snapshot.nodes.items():
            since = capacity.node.free_since
            anyway_at = since + timedelta(seconds=elastic.grow_anyway_s)
            if rest_at <= now or (since != EPOCH and anyway_at <= now):
                idle[node_id] = capacity
            elif since != EPOCH:
                cycle.wake_at(anyway_at.timestamp())
    except Exception as error:
        note_suspect(error, node_id=node_id)
        raise
    return ClusterSnapshot(idle)


def _with_own_nodes(cluster: Cluster, run: Run, idle: ClusterSnapshot) -> ClusterSnapshot:
    """Return what is idle, with the nodes of the run; on those others all slots are taken."""
    trial = idle.copy()
    node_id = ""
    try:
        for part in run.live:
            node_id = part.node_id
            node = cluster.nodes[node_id]
            if node_id not in trial.nodes and node.is_schedulable:
                full = NodeCapacity(node, [0] * node.slots, node.free_cpu_milli, node.free_memory_bytes, 0, 0)
                trial.put(node_id, full)
    except Exception as error:
        note_suspect(error, node_id=node_id)
        raise
    return trial
