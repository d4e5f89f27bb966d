"""The nodes that are wanted of each pool: those with something on them, and those that waiting runs could use.

A rule of its own, beside ``decide``: it allocates nothing, so that it may look at the queue now and then only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from contracts.events.capacity import CapacityWanted
from contracts.events.run import DecisionRecord
from contracts.scheduling import Policy, Pool
from services.scheduler.core.capacity.hypothetical_nodes import HypotheticalCapacity
from services.scheduler.core.order import queue
from services.scheduler.core.state.cluster import Cluster, Node
from services.scheduler.core.state.run import EPOCH, Run

#: Why a run may wait that more nodes would help. A run that is not explained yet may be placed by the next cycle.
HELPED = frozenset({"slots", "infeasible", "priority", "no nodes", "fragmented", "draining", "reserved"})
#: Waiting runs that are served; nodes are wanted for those behind them once these have theirs.
MAX_SERVED_RUNS = 2000
#: How many of the runs that nodes are wanted for are named.
MAX_LISTED_RUNS = 20


@dataclass(frozen=True, slots=True)
class CapacityDemand:
    """So many nodes of the pool are wanted from now on."""

    pool: str
    nodes: int
    run_ids: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    timed_out: bool = False
    reason: str = ""


def compute_demand(cluster: Cluster, now: datetime, policy: Policy) -> list[CapacityDemand]:
    """Return what has changed of the nodes that are wanted of each pool.

    Wanted is every node that has something on it or that a waiting run could use, with the cheapest of what suits that
    run, and what is idle but not for long. A run that cannot be placed whole wants nothing. The same facts and the same
    time give the same.
    """
    if not policy.pools.pools:
        return []
    present = _present(cluster)
    timed_out = {pool.name for pool in policy.pools.pools if _has_timed_out(cluster, policy, pool, present, now)}
    capacity = HypotheticalCapacity.of(cluster, policy, timed_out, now)
    for run in _runs_to_serve(cluster, now, policy):
        capacity.serve(run, _work_s(run, now))
    found = (_demand_of_pool(pool, capacity, present, pool.name in timed_out, now) for pool in policy.pools.pools)
    return [
        each for each in found if each.timed_out or _published_demand(cluster, each.pool) != (each.nodes, each.spare)
    ]


def wake_at(cluster: Cluster, now: datetime, policy: Policy) -> datetime | None:
    """Return when the clock alone may change what is wanted; None: not before something happens."""
    pools, known = policy.pools, cluster.capacity
    names = {pool.name for pool in pools.pools}
    times = [
        node.idle_since + timedelta(seconds=pools.idle_s)
        for node in _present(cluster)
        if node.idle_since != EPOCH and node.labels.get("pool") in names
    ]
    for name in names & known.keys():
        times.append(known[name].since + timedelta(seconds=pools.patience_s))
        if (gave_up_at := known[name].gave_up_at) is not None:
            times.append(gave_up_at + timedelta(seconds=pools.retry_s))
    return min((time for time in times if time > now), default=None)


def capacity_fact(want: CapacityDemand, now: datetime, made: DecisionRecord) -> CapacityWanted:
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


def _present(cluster: Cluster) -> list[Node]:
    return [node for node in cluster.nodes.values() if node.is_schedulable]


def _published_demand(cluster: Cluster, pool: str) -> tuple[int, tuple[str, ...]]:
    known = cluster.capacity.get(pool)
    return (known.nodes, known.spare) if known is not None else (0, ())


def _has_timed_out(cluster: Cluster, policy: Policy, pool: Pool, present: Sequence[Node], now: datetime) -> bool:
    """Whether wanted nodes of the pool have not come although there was time."""
    known = cluster.capacity.get(pool.name)
    if known is None or now - known.since < timedelta(seconds=policy.pools.patience_s):
        return False
    return sum(node.labels.get("pool") == pool.name for node in present) < known.nodes


def _demand_of_pool(
    pool: Pool, capacity: HypotheticalCapacity, present: Sequence[Node], timed_out: bool, now: datetime
) -> CapacityDemand:
    own = [node for node in present if node.labels.get("pool") == pool.name]
    idle_before = now - timedelta(seconds=capacity.policy.pools.idle_s)
    spare = tuple(
        sorted(
            node.node_id
            for node in own
            if node.idle_since != EPOCH and node.idle_since <= idle_before and node.node_id not in capacity.used_nodes
        )
    )
    run_ids = tuple(capacity.run_ids.get(pool.name, ()))
    new = len(capacity.added.get(pool.name, ()))
    nodes = min(len(own) - len(spare) + new, pool.max_nodes)
    return CapacityDemand(
        pool.name, nodes, run_ids[:MAX_LISTED_RUNS], spare, timed_out, _reason(pool, len(own), new, run_ids, timed_out)
    )


def _reason(pool: Pool, there: int, new: int, run_ids: Sequence[str], timed_out: bool) -> str:
    if timed_out:
        return f"nodes of pool {pool.name} that were wanted did not come in time: it is left alone for a while"
    if new:
        runs = f"{len(run_ids)} run{'s' if len(run_ids) > 1 else ''}"
        return f"{runs} could use {new} more of pool {pool.name}, which has {there}"
    return f"what is left of pool {pool.name} is in use, or has not been idle for long"


def _runs_to_serve(cluster: Cluster, now: datetime, policy: Policy) -> list[Run]:
    """Return the runs that more nodes would help, in order."""
    # Slots are on their way to these: nodes beside them would come for nothing.
    served = {run.stopping.preemptor for run_id in cluster.active if (run := cluster.runs[run_id]).stopping is not None}
    helped = [run for run_id in cluster.queued if run_id not in served and _is_helped(run := cluster.runs[run_id])]
    return heapq.nsmallest(MAX_SERVED_RUNS, helped, key=lambda run: queue.key_of(cluster, run, now, policy))


def _is_helped(run: Run) -> bool:
    is_explained = run.waiting_generation == run.next_generation and run.waiting_code in HELPED
    return is_explained and run.cancel_reason is None


def _work_s(run: Run, now: datetime) -> float | None:
    limit_s = run.spec.scheduling.limit_s
    return max(limit_s - run.ran_s(now), 0.0) if limit_s is not None else None
