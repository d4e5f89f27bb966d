"""Explain: publish why runs wait whose reason has changed."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.core.cycle_state import CycleState
from services.scheduler.core.decisions import ExplainRun
from services.scheduler.core.place.resource_request import resource_request_of
from services.scheduler.core.reasons import Why, message, too_large
from services.scheduler.core.state.cluster import Node
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.suspects import note_suspect

#: How many runs are explained in one cycle, besides those that can never run; the others follow in the next one.
MAX_EXPLAINED_RUNS = 200


def explain_waits(cycle: CycleState, max_explained: int = MAX_EXPLAINED_RUNS) -> None:
    """Decide to publish the reasons of runs that wait; those that can never run come first."""
    cluster, index, result = cycle.cluster, cycle.cluster.index, cycle.result
    if index.nodes_changed:
        index.unexplained.update(cluster.queued)
        index.nodes_changed = False
    left = max_explained
    for run_id, why in result.waits.items():
        if not _is_known(cycle, run_id, why) and _explain(cycle, run_id, why):
            left -= 1
            # The fact may not be published, and the next cycle may not examine the run.
            index.unexplained[run_id] = None
        else:
            index.unexplained.pop(run_id, None)
    decided = {decision.run_id for decision in result.decisions}
    later, run_id = [], ""
    try:
        for run_id in list(index.unexplained):
            run = cluster.runs[run_id]
            if run_id in decided:
                continue
            if run_id not in cluster.queued or run_id in result.waits:
                del index.unexplained[run_id]
            elif (largest := cycle.placer.largest(resource_request_of(cluster, run))) < run.spec.slots.min:
                if not _explain(cycle, run_id, too_large(cluster, run, largest)):
                    del index.unexplained[run_id]
            else:
                later.append(run_id)
    except Exception as error:
        note_suspect(error, run_id=run_id)
        raise
    for run_id in later:
        if left <= 0:
            break
        if _explain(cycle, run_id, _unexamined(cycle)):
            left -= 1
        else:
            del index.unexplained[run_id]


def add_numbers(cycle: CycleState, run: Run, why: Why) -> Why:
    """Return the reason with how many slots are free for the run after this cycle, and how many there are."""
    if why.code not in ("slots", "priority", "reserved"):
        return why
    nodes = cycle.placer.waits_for(run, resource_request_of(cycle.cluster, run))
    if (counts := cycle.slot_counts.get(nodes)) is None:
        free = sum(each.whole_slots for node_id in nodes if (each := cycle.snapshot.nodes.get(node_id)) is not None)
        counts = cycle.slot_counts[nodes] = free, sum(_slots_of(cycle.cluster.nodes[node_id]) for node_id in nodes)
    return replace(why, idle=counts[0], capacity=counts[1])


def _slots_of(node: Node) -> int:
    try:
        return node.slots
    except Exception as error:
        note_suspect(error, node_id=node.node_id)
        raise


def _unexamined(cycle: CycleState) -> Why:
    """Return the reason of runs far down the queue, which were not examined."""
    if cycle.blocked and not cycle.policy.order.skip:
        return Why("priority", ahead=cycle.blocked[0].run_id)
    return Why("slots")


def _is_known(cycle: CycleState, run_id: str, why: Why) -> bool:
    """Whether this reason is published already."""
    try:
        run = cycle.cluster.runs[run_id]
        return (run.waiting_code, run.waiting_generation) == (why.code, run.next_generation)
    except Exception as error:
        note_suspect(error, run_id=run_id)
        raise


def _explain(cycle: CycleState, run_id: str, why: Why) -> bool:
    """Decide to publish the reason, unless it is known."""
    # A run that is queued in this cycle is explained in the next: it may be placed by then.
    if run_id not in cycle.cluster.queued or _is_known(cycle, run_id, why):
        return False
    try:
        run = cycle.cluster.runs[run_id]
        text = message(cycle.cluster, run, add_numbers(cycle, run, why))
        explained = ExplainRun(run_id, run.next_generation, why.code, text)
    except Exception as error:
        note_suspect(error, run_id=run_id)
        raise
    cycle.result.decisions.append(explained)
    return True
