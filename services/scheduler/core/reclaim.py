"""Whose slots are taken for a run that waits: shrink what can shrink, preempt whole only if that is too little."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from services.scheduler.core.cluster import Cluster, Phase, Run
from services.scheduler.core.decisions import PreemptRun
from services.scheduler.core.place import Counts, avoided, useful
from services.scheduler.core.policy import Policy


@dataclass(frozen=True, slots=True)
class Holding:
    """A run that holds slots which could be placed anew (those on draining nodes could not)."""

    run: Run
    slots: int
    #: How long ago its work was last safe, times its slots: what a kill would lose.
    at_stake: float
    #: The slots by the kind of machine.
    machines: Counts

    def on(self, machines: Collection[str]) -> Holding:
        """The same, as far as it is on machines of these kinds."""
        return replace(self, slots=sum(self.machines.get(kind, 0) for kind in machines))


def holdings(cluster: Cluster, now: datetime) -> list[Holding]:
    """Every run that holds slots on open nodes."""
    found = []
    for run_id in cluster.active:
        run = cluster.runs[run_id]
        machines: Counts = {}
        for part in run.parts.values():
            if part.ended is None and (node := cluster.nodes[part.node_id]).open:
                machines[node.machine] = machines.get(node.machine, 0) + len(part.slots)
        if machines:
            slots = sum(machines.values())
            safe_at = max(run.committed_at, run.placed_at)
            found.append(Holding(run, slots, slots * (now - safe_at) / timedelta(seconds=1), machines))
    return found


def victims(candidates: list[Holding], need: int, waiter: Run) -> list[PreemptRun]:
    """The stops that free ``need`` slots for ``waiter``, or none at all if they cannot be freed.

    Least priority first, then whoever loses least.
    """
    ordered = sorted(candidates, key=lambda h: (h.run.spec.priority, h.at_stake, h.run.run_id))
    for whole in range(len(ordered) + 1):
        missing = need - sum(holding.slots for holding in ordered[:whole])
        shrunk = _shrinks(ordered[whole:], missing)
        if shrunk is not None:
            return [_preempt(h.run, waiter) for h in ordered[:whole]] + [
                _resize(h.run, f"shrinks by {by} for run {waiter.run_id} of higher priority") for h, by in shrunk
            ]
    return []


def _shrinks(candidates: list[Holding], missing: int) -> list[tuple[Holding, int]] | None:
    """Who shrinks by how much to free ``missing`` slots; None if shrinking does not suffice."""
    chosen: list[tuple[Holding, int]] = []
    for holding in candidates:
        if missing <= 0:
            break
        by = min(holding.slots - holding.run.spec.slots.min, missing)
        if by > 0:
            chosen.append((holding, by))
            missing -= by
    return chosen if missing <= 0 else None


def idle_slots(cluster: Cluster, now: datetime, policy: Policy) -> dict[str, int]:
    """Node -> its slots that are worth a restart: nobody has come for them while things were at rest."""
    at_rest = now - cluster.moved_at >= timedelta(seconds=policy.resize_interval_s)
    anyway_before = now - timedelta(seconds=policy.grow_anyway_s)
    return {
        node.node_id: len(free)
        for node in cluster.nodes.values()
        if node.open and (at_rest or node.free_since <= anyway_before) and (free := node.free)
    }


def growing(
    cluster: Cluster, candidates: list[Holding], idle: dict[str, int], now: datetime, policy: Policy
) -> list[PreemptRun]:
    """The restarts that put ``idle`` slots to use. Only called when nobody waits for them."""
    chosen: list[PreemptRun] = []
    idle = dict(idle)
    for holding in sorted(candidates, key=lambda h: policy.order(h.run)):
        run = holding.run
        if run.slot_count >= run.spec.slots.max or not _can_grow(run, now, policy):
            continue
        avoid = avoided(cluster, run, policy)
        usable = [
            node_id
            for node_id in idle
            if node_id not in avoid and (not run.exact or cluster.nodes[node_id].machine in holding.machines)
        ]
        most = min(run.spec.slots.max, run.slot_count + sum(idle[node_id] for node_id in usable))
        by = useful(run, most) - run.slot_count
        if by > 0:
            chosen.append(_resize(run, f"grows from {run.slot_count} to {run.slot_count + by} slots"))
            for node_id in usable:
                given = min(idle[node_id], by)
                idle[node_id] -= given
                by -= given
    return chosen


def _can_grow(run: Run, now: datetime, policy: Policy) -> bool:
    # A command has no checkpoints and would begin again; an evaluation is over before growing pays.
    resumable = run.spec.task is not None and run.spec.kind == "train"
    settled = now - run.placed_at >= timedelta(seconds=policy.resize_interval_s)
    whole = all(part.ended is None for part in run.parts.values())
    return resumable and settled and whole and run.phase is Phase.RUNNING


def _preempt(run: Run, waiter: Run) -> PreemptRun:
    reason = f"gives way to run {waiter.run_id} of priority {waiter.spec.priority}"
    return PreemptRun(run.run_id, run.generation, reason, "preempted", run.spec.grace_s)


def _resize(run: Run, reason: str) -> PreemptRun:
    return PreemptRun(run.run_id, run.generation, reason, "resized", run.spec.grace_s)
