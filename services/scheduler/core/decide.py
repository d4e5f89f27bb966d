"""``decide``: what to queue, place, shrink, preempt and end. Same input, same output.

A scheduling cycle goes through its steps (``steps/``, one module each): it settles what has happened to each run alone,
orders the queue, nominates and places whole gangs, reserves for those that do not fit, preempts for those that may,
and grows when no run waits. The cost of a cycle depends on what has changed since the one before (``state/index.py``),
and on what there is to be placed.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from contracts.scheduling import Policy
from contracts.state.node import NodeStatement
from services.scheduler.core.cycle_state import BeginPhase, CycleResult, CycleState, ignore_phase
from services.scheduler.core.decisions import NOTHING_LEFT, Decision, LeftOver, LoseNode
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import EPOCH
from services.scheduler.core.steps.explain import MAX_EXPLAINED_RUNS, add_numbers, explain_waits
from services.scheduler.core.steps.grow import grow_runs
from services.scheduler.core.steps.lend import IdleLoans
from services.scheduler.core.steps.order import update_queue
from services.scheduler.core.steps.place import PlacementStep
from services.scheduler.core.steps.preempt import preempt_for_blocked
from services.scheduler.core.steps.settle import settle_runs, stop_overspent_runs


def decide(cluster: Cluster, now: datetime, policy: Policy, reachable_since: datetime = EPOCH) -> list[Decision]:
    """Return what to do. The decisions about a run are in the order in which they must become facts.

    ``reachable_since``: since when agents could reach the scheduler. Silence before it does not count against a node.
    """
    return run_steps(cluster, now, policy, reachable_since).decisions


def run_steps(
    cluster: Cluster,
    now: datetime,
    policy: Policy,
    reachable_since: datetime = EPOCH,
    about: str | None = None,
    max_explained: int = MAX_EXPLAINED_RUNS,
    left_over: LeftOver = NOTHING_LEFT,
    begin_phase: BeginPhase = ignore_phase,
) -> CycleResult:
    """Run ``decide``, and return its outcome with the reasons for which runs wait; ``about`` is examined in any case.

    ``max_explained``: for how many runs the cycle publishes why they wait; ``left_over``: what the cycle before left;
    ``begin_phase``: called when a phase begins, so that a caller that has a clock can measure it.
    """
    begin_phase("settle")
    state = CycleState(cluster, now, policy, reachable_since, about, left_over)
    return SchedulingCycle(state, max_explained, begin_phase).run()


class SchedulingCycle:
    """One cycle over a cluster."""

    def __init__(self, state: CycleState, max_explained: int, begin_phase: BeginPhase) -> None:
        self.state, self.max_explained, self.begin_phase = state, max_explained, begin_phase

    def run(self) -> CycleResult:
        """Go through the steps."""
        state, result = self.state, self.state.result
        settle_runs(state)
        stop_overspent_runs(state)
        self.begin_phase("order")
        update_queue(state)
        self.begin_phase("place")
        loans = IdleLoans(state)
        placing = PlacementStep(state, loans)
        placing.place_queue()
        loans.hold_back()
        placing.widen()
        loans.release()
        if state.blocked:
            self.begin_phase("preempt")
            preempt_for_blocked(state, placing.reservations)
        elif self._is_at_rest():
            self.begin_phase("grow")
            grow_runs(state)
        self.begin_phase("explain")
        explain_waits(state, self.max_explained)
        if state.about in result.waits:
            run = state.cluster.runs[state.about]
            result.waits[state.about] = add_numbers(state, run, result.waits[state.about])
        for window in state.placer.windows:
            state.wake_at(window.end.timestamp())
        state.wake_at(state.entitlements.wake_s)
        return state.finish()

    def _is_at_rest(self) -> bool:
        """Whether no run waits for slots, nor will in a moment."""
        state = self.state
        is_paused = any(why.code == "paused" for why in state.result.waits.values())
        return not (state.leaving or state.placements or is_paused)


def lost_nodes(cluster: Cluster, expired: set[str]) -> list[LoseNode]:
    """Return the nodes that are lost, out of those whose lease has run out."""
    return [
        LoseNode(node.node_id, node.incarnation, f"its lease was not renewed for {node.lease_ttl_s:g} s")
        for node_id in sorted(expired)
        if (node := cluster.nodes.get(node_id)) is not None and node.alive
    ]


def unresponsive_nodes(cluster: Cluster, now: datetime, policy: Policy, reachable_since: datetime) -> list[LoseNode]:
    """Return the nodes to be lost although they renew their leases: they do not release runs that are stopped."""
    found: dict[str, LoseNode] = {}
    for run_id in cluster.active:
        run = cluster.runs[run_id]
        if run.stopping is None:
            continue
        limit_s = run.stopping.grace_s + policy.faults.release_deadline_s
        if now - max(run.stopping_at, reachable_since) < timedelta(seconds=limit_s):
            continue
        for part in run.live:
            node = cluster.nodes[part.node_id]
            reason = f"it has not released run {run_id} within {limit_s:g} s of the request"
            found.setdefault(node.node_id, LoseNode(node.node_id, node.incarnation, reason))
    return list(found.values())


def disputed_parts(cluster: Cluster, node_id: str, incarnation: str, said: NodeStatement) -> list[tuple[str, int]]:
    """Return (run, generation) of what only the node's agent, or only the cluster, takes to run on the node.

    The cluster must be folded up to when the statement was read. A placement that the agent has not come to yet is in
    no dispute.
    """
    home = cluster.nodes.get(node_id)
    if home is None or not home.alive or home.incarnation != incarnation:
        return []
    running = set(said.running)
    forgotten = [
        (run_id, generation)
        for run_id, generation in home.allocations
        if (run_id, generation) not in running and cluster.runs[run_id].placed_sequence <= said.position
    ]
    unknown = [each for each in said.running if each not in home.allocations]
    return forgotten + [each for each in unknown if not _was_placed(cluster, node_id, *each)]


def _was_placed(cluster: Cluster, node_id: str, run_id: str, generation: int) -> bool:
    """Whether the node has had this part, or may have had. Its agent reads in the log what became of it."""
    run = cluster.runs.get(run_id)
    if run is None or generation > run.generation:
        return False
    return generation < run.generation or run.terminal or node_id in run.parts
