"""``decide``: what to queue, place, shrink, preempt and end. Same input, same output.

A pass settles what has happened, orders what waits, places whole gangs, reclaims for those that
wait in vain, and grows when nobody does. Each step is a function of its own, so that a policy can
replace one of them: order (policy.py), place (place.py), reclaim (reclaim.py), explain (explain.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from services.scheduler.core import explain
from services.scheduler.core.cluster import EPOCH, Cluster, Run
from services.scheduler.core.decisions import CancelRun, Decision, ExplainRun, LoseNode, PlaceRun, PreemptRun, QueueRun
from services.scheduler.core.explain import Why
from services.scheduler.core.place import (
    Counts,
    Free,
    avoided,
    capacities,
    counts,
    free_slots,
    kinds,
    reserve,
    take,
    useful,
)
from services.scheduler.core.policy import Policy
from services.scheduler.core.reclaim import Holding, growing, holdings, idle_slots, victims
from services.scheduler.core.settle import settle_active, settle_unqueued


@dataclass(slots=True)
class Plan:
    """The outcome of one pass: the decisions, and for each run that waits, why."""

    decisions: list[Decision] = field(default_factory=list)
    waits: dict[str, Why] = field(default_factory=dict)


def decide(cluster: Cluster, now: datetime, policy: Policy, hearing_since: datetime = EPOCH) -> list[Decision]:
    """Choose what to do. A run's decisions stand in the order in which they must become facts.

    ``hearing_since``: from when on agents could make themselves heard, and we hear them. Nobody is
    blamed for a silence before it.
    """
    return plan(cluster, now, policy, hearing_since).decisions


def plan(cluster: Cluster, now: datetime, policy: Policy, hearing_since: datetime = EPOCH) -> Plan:
    """``decide``, with the reason for which every other run waits."""
    result = Plan()
    # 1. What has happened to each run alone. A run that is queued by it competes in this very pass.
    waiting = _settle(cluster, now, policy, hearing_since, result)
    leaving = {d.run_id for d in result.decisions if isinstance(d, PreemptRun)}
    # 2. Order what waits.
    waiting.sort(key=policy.order)
    # 3. Whole gangs only, since half a gang deadlocks its peers. 4. Reclaim for those in vain.
    blocked, idle = _place(cluster, waiting, now, policy, result)
    holders = holdings(cluster, now)
    if blocked:
        _reclaim(cluster, blocked, idle, holders, leaving, policy, result)
    elif not leaving:
        _grow(cluster, holders, waiting, now, policy, result)
    _explain(cluster, result)
    return result


def lost_nodes(cluster: Cluster, expired: set[str]) -> list[LoseNode]:
    """The nodes to be taken for lost, out of those whose lease has run out."""
    return [
        LoseNode(node.node_id, node.incarnation, f"its lease was not renewed for {node.lease_ttl_s:g} s")
        for node_id in sorted(expired)
        if (node := cluster.nodes.get(node_id)) is not None and node.alive
    ]


def deaf_nodes(cluster: Cluster, now: datetime, policy: Policy, hearing_since: datetime) -> list[LoseNode]:
    """The nodes to be taken for lost although they renew their leases: they do not let go when told to.

    Taken for lost their slots are free, and whatever still trains there can commit nothing any more.
    """
    found: dict[str, LoseNode] = {}
    for run_id in cluster.active:
        run = cluster.runs[run_id]
        if run.preempting is None:
            continue
        limit_s = run.preempting.grace_s + policy.release_deadline_s
        if now - max(run.preempting_at, hearing_since) < timedelta(seconds=limit_s):
            continue
        for part in run.live:
            node = cluster.nodes[part.node_id]
            reason = f"it has not let go of run {run_id} for {limit_s:g} s, although it was told to"
            found.setdefault(node.node_id, LoseNode(node.node_id, node.incarnation, reason))
    return list(found.values())


def _settle(cluster: Cluster, now: datetime, policy: Policy, hearing_since: datetime, result: Plan) -> list[Run]:
    """Decide what follows for each run alone; return those that compete for slots."""
    waiting: list[Run] = []
    for run_id in cluster.unqueued:
        run = cluster.runs[run_id]
        settlement = settle_unqueued(run)
        if settlement is not None:
            result.decisions.append(settlement)
        if isinstance(settlement, QueueRun):
            waiting.append(run)
    for run_id in cluster.active:
        run = cluster.runs[run_id]
        settlement = settle_active(cluster, run, now, policy, hearing_since)
        if settlement is None:
            continue
        result.decisions.append(settlement)
        if isinstance(settlement, QueueRun) and not _breaks_again(run, settlement, policy):
            waiting.append(run)
    for run_id in cluster.queued:
        run = cluster.runs[run_id]
        if run.cancel_reason is not None:
            result.decisions.append(CancelRun(run_id, run.cancel_reason))
        else:
            waiting.append(run)
    return waiting


def _breaks_again(run: Run, settlement: QueueRun, policy: Policy) -> bool:
    """Whether a run that just broke must first wait; it is then looked at once it is queued."""
    return settlement.reason in ("crashed", "node lost") and policy.retry_delay_s(run.setbacks + 1) > 0


def _place(
    cluster: Cluster, waiting: list[Run], now: datetime, policy: Policy, result: Plan
) -> tuple[list[Run], Counts]:
    """Place in order until one does not fit; nothing overtakes that one. Return it and those behind, and what is idle.

    Everybody first gets what it needs; what is then left goes to the first in order, up to its
    maximum. So an elastic run does not shut out the one behind it, and fills the cluster alone.
    Where only machines of one kind will do for a run, it keeps others waiting for that kind alone.
    """
    pools = free_slots(cluster)
    idle, capacity = counts(pools), capacities(cluster)
    fitting: list[tuple[Run, Counts]] = []
    blocked: list[Run] = []
    #: Kind of machine -> the first run that waits for its slots.
    closed: dict[str, str] = {}
    for run in waiting:
        if run.setbacks and (retry_at := _retry_at(cluster, run, policy)) > now:
            result.waits[run.run_id] = Why("paused", retry_at=retry_at)
        elif not (machines := kinds(run, capacity)):
            # It can wait for nodes, but must not keep anybody else waiting.
            result.waits[run.run_id] = explain.too_large(cluster, run, capacity)
        elif got := reserve(run, run.spec.slots.min, [kind for kind in machines if kind not in closed], idle):
            fitting.append((run, got))
        else:
            blocked.append(run)
            ahead = next((closed[kind] for kind in machines if kind in closed), None)
            result.waits[run.run_id] = Why("priority" if ahead else "slots", ahead=ahead)
            for kind in machines:
                closed.setdefault(kind, run.run_id)
    for run, got in fitting:
        avoid = avoided(cluster, run, policy)
        _extend(run, got, pools, idle, avoid)
        result.decisions.append(PlaceRun(run.run_id, run.next_generation, take(pools, got, avoid), run.resume))
    for run in blocked:
        machines = kinds(run, capacity)
        free, whole = (sum(found.get(kind, 0) for kind in machines) for found in (idle, capacity))
        result.waits[run.run_id] = replace(result.waits[run.run_id], idle=free, capacity=whole)
    return blocked, idle


def _extend(run: Run, got: Counts, pools: dict[str, Free], idle: Counts, avoid: frozenset[str]) -> None:
    """Add to what the run has ``got`` what it can use of ``idle`` beyond its minimum."""
    machines = [*got, *(kind for kind in idle if kind not in got and not run.exact)]
    least = run.spec.slots.min
    extra = min(sum(idle[kind] for kind in machines), run.spec.slots.max - least)
    if avoid:
        # More slots are no gain where it fails.
        free = [(node_id, slots) for kind in machines for node_id, slots in pools[kind].items()]
        good = sum(len(slots) for node_id, slots in free if node_id not in avoid)
        extra = min(extra, max(good - least, 0))
    extra = useful(run, least + extra) - least
    for kind in machines:
        part = min(idle[kind], extra)
        if part > 0:
            got[kind] = got.get(kind, 0) + part
            idle[kind] -= part
            extra -= part


def _retry_at(cluster: Cluster, run: Run, policy: Policy) -> datetime:
    if run.run_id not in cluster.queued:
        return run.placed_at  # it is being queued in this pass, see _breaks_again
    return run.queued_at + timedelta(seconds=policy.retry_delay_s(run.setbacks))


def _reclaim(
    cluster: Cluster,
    blocked: list[Run],
    idle: Counts,
    holders: list[Holding],
    leaving: set[str],
    policy: Policy,
    result: Plan,
) -> None:
    """Preempt for the blocked runs, in order, as long as it makes them fit."""
    capacity = capacities(cluster)
    supply = dict(idle)
    in_vain: set[str] = set()
    for run in blocked:
        machines = [kind for kind in kinds(run, capacity) if kind not in in_vain]
        if run.exact:
            machines = machines[:1]
        if not machines:
            continue
        candidates: list[Holding] = []
        coming = 0
        for holding in (each.on(machines) for each in holders):
            stopping = holding.run.preempting is not None or holding.run.run_id in leaving
            if stopping and (_ends(holding.run) or policy.order(holding.run) > policy.order(run)):
                coming += holding.slots
            elif not stopping and holding.slots and holding.run.spec.priority < run.spec.priority:
                candidates.append(holding)
        least = run.spec.slots.min
        need = least - sum(supply.get(kind, 0) for kind in machines) - coming
        chosen = victims(candidates, need, run) if need > 0 else []
        if need > 0 and not chosen:
            in_vain.update(machines)
            continue
        result.decisions += chosen
        leaving |= {decision.run_id for decision in chosen}
        # What is not there yet is owed to it.
        for kind in machines:
            part = min(max(supply.get(kind, 0), 0), least)
            supply[kind] = supply.get(kind, 0) - part
            least -= part
        supply[machines[0]] -= least
        result.waits[run.run_id] = explain.freeing(result.waits[run.run_id], holders, leaving)


def _ends(run: Run) -> bool:
    """Whether a run that is being stopped will not come back for its slots."""
    return (
        run.terminal or run.cancel_reason is not None or (run.preempting is not None and run.preempting.then != "queue")
    )


def _grow(
    cluster: Cluster, holders: list[Holding], waiting: list[Run], now: datetime, policy: Policy, result: Plan
) -> None:
    """Give idle slots to elastic runs, if no run waits that could use them now or soon."""
    if any(why.code == "paused" for why in result.waits.values()):
        return
    if any(holding.run.preempting is not None for holding in holders):
        return
    if any(isinstance(decision, PlaceRun) for decision in result.decisions):
        return
    idle = idle_slots(cluster, now, policy)
    if idle:
        result.decisions += growing(cluster, holders, idle, now, policy)


def _explain(cluster: Cluster, result: Plan) -> None:
    for run_id, why in result.waits.items():
        run = cluster.runs[run_id]
        # One that is being queued in this pass is explained in the next: it may be placed by then.
        if run_id in cluster.queued and (run.waiting_code, run.waiting_generation) != (why.code, run.next_generation):
            message = explain.message(cluster, run, why)
            result.decisions.append(ExplainRun(run_id, run.next_generation, why.code, message))
