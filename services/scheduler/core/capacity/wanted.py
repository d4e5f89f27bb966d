"""The nodes that are wanted of each pool, from what the cluster has and who waits in it.

A rule of its own, beside ``decide``: it gives nobody slots, so that it may look at the queue now and then only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from datetime import datetime

from contracts.events.capacity import CapacityWanted
from contracts.events.run import DecisionRecord
from contracts.scheduling import Policy
from services.scheduler.core.capacity import stock
from services.scheduler.core.capacity.stock import Present, Waiting, WantCapacity
from services.scheduler.core.order import queue
from services.scheduler.core.state.cluster import EPOCH, Cluster, Run

#: Why a run may wait that more nodes would help. What was not told yet may be placed by the next pass.
HELPED = frozenset({"slots", "infeasible", "priority", "no nodes", "fragmented", "draining", "reserved"})


def want(cluster: Cluster, now: datetime, policy: Policy) -> list[WantCapacity]:
    """What is to be said anew of the pools; the same facts and the same time give the same."""
    if not policy.pools.pools:
        return []
    return stock.wanted(policy, list(_present(cluster)), _waiting(cluster, now, policy), cluster.capacity, now)


def wake_at(cluster: Cluster, now: datetime, policy: Policy) -> datetime | None:
    """When the clock alone may change what is wanted; None: not before something happens."""
    return stock.wake_at(policy, _present(cluster), cluster.capacity, now) if policy.pools.pools else None


def wanted_fact(want: WantCapacity, now: datetime, made: DecisionRecord) -> CapacityWanted:
    """The fact that it is published as."""
    return CapacityWanted(
        pool=want.pool,
        nodes=want.nodes,
        run_ids=want.run_ids,
        spare=want.spare,
        timed_out=want.timed_out,
        reason=want.reason,
        decided_at=now,
        decided_at_sequence=made.at_sequence,
        decision=made,
    )


def _present(cluster: Cluster) -> Iterator[Present]:
    for node in cluster.nodes.values():
        if node.is_schedulable:
            idle_since = node.idle_since if node.idle_since != EPOCH else None
            yield Present(node.node_id, node.labels, node.accelerator, tuple(node.free_milli), idle_since)


def _waiting(cluster: Cluster, now: datetime, policy: Policy) -> list[Waiting]:
    """The runs that more nodes would help, in order."""
    # Slots are on their way to these: nodes beside them would come for nothing.
    served = {
        run.preempting.preemptor for run_id in cluster.active if (run := cluster.runs[run_id]).preempting is not None
    }
    helped = [run for run_id in cluster.queued if run_id not in served and _helped(run := cluster.runs[run_id])]
    ordered = heapq.nsmallest(stock.DEPTH, helped, key=lambda run: queue.key_of(cluster, run, now, policy))
    return [Waiting(run.run_id, run.spec, _work_s(run, now)) for run in ordered]


def _helped(run: Run) -> bool:
    told = run.waiting_generation == run.next_generation and run.waiting_code in HELPED
    return told and run.cancel_reason is None


def _work_s(run: Run, now: datetime) -> float | None:
    limit_s = run.spec.scheduling.limit_s
    return max(limit_s - run.ran_s(now), 0.0) if limit_s is not None else None
