"""Why a run waits: the true reason, in numbers, and what would change it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from contracts.formats import format_time
from contracts.texts import staging_text
from services.scheduler.core.decisions import Code
from services.scheduler.core.place.resource_request import useful
from services.scheduler.core.state.cluster import Cluster, Node, schedulable_nodes
from services.scheduler.core.state.run import Phase, Run
from services.scheduler.core.state.suspects import note_suspect

#: How many runs or nodes a message names.
MAX_NAMES = 5
#: Why a run is not complete whose ranks have ended well.
UNCOMMITTED: Code = "uncommitted"


@dataclass(frozen=True, slots=True)
class Why:
    """The reason as data. The text is made only when it is read."""

    code: Code
    idle: int = 0
    #: Slots of all nodes on which something may be placed.
    capacity: int = 0
    #: The first blocked run ahead of this one.
    ahead: str | None = None
    retry_at: datetime | None = None
    #: Runs that were asked to release slots for it.
    victims: tuple[str, ...] = ()
    #: When the slots reserved for it, or for the run ahead, are free; and whether that relies on limits alone.
    start_by: datetime | None = None
    firm: bool = False
    #: The text of the policy's rule that refused it.
    detail: str = ""


def too_large(cluster: Cluster, run: Run, capacity: int) -> Why:
    """Return the reason of a run that requests more slots than the present nodes have for it: ``capacity``."""
    whole, node_id = 0, ""
    try:
        for node in schedulable_nodes(cluster).values():
            node_id = node.node_id
            whole += node.slots
    except Exception as error:
        note_suspect(error, node_id=node_id)
        raise
    if not any(node.alive for node in cluster.nodes.values()):
        return Why("no nodes")
    if run.exact and whole >= run.spec.slots.min:
        return Why("fragmented", capacity=capacity)
    is_draining = any(node.alive and not node.is_schedulable for node in cluster.nodes.values())
    return Why("draining" if is_draining else "infeasible", capacity=capacity)


def message(cluster: Cluster, run: Run, why: Why) -> str:
    """Return why ``run`` waits, and what would start it, as text."""
    need = run.spec.slots.min
    match why.code:
        case "no nodes":
            return "no node has joined, so there are no slots at all; start a worker (`trainbus service worker`)"
        case "infeasible":
            return (
                f"needs at least {_slots(need)}, more than the {why.capacity} of the whole cluster; it runs as soon "
                f"as nodes with {need - why.capacity} more join, or submit it again with slots.min of at most "
                f"{why.capacity}"
            )
        case "draining":
            names = ", ".join(
                sorted(n.node_id for n in cluster.nodes.values() if n.alive and not n.is_schedulable)[:MAX_NAMES]
            )
            return (
                f"needs at least {_slots(need)}, but only {why.capacity} are left while these nodes are being "
                f"drained, are about to be taken away or are unfit: {names}; it runs when they, or others, join again"
            )
        case "fragmented":
            return _unlike(cluster, run, why)
        case "paused":
            when = format_time(why.retry_at) if why.retry_at else "soon"
            return f"broke {run.setbacks} times in a row without a new checkpoint; the next try is at {when}"
        case "reserved":
            when = format_time(why.start_by) if why.start_by else "soon"
            return (
                f"needs at least {_slots(need)}, {why.idle} of {why.capacity} are free but kept for run {why.ahead}, "
                f"which starts at {when} at the latest; with a scheduling.limit_s that ends before, it could go first"
            )
        case "quota" | "ceiling" | "maintenance":
            return why.detail
        case "priority":
            return (
                f"run {why.ahead} is ahead of it in the queue and waits for slots; {_place_in_queue(cluster, run, why)}"
            )
        case _:
            return _for_slots(cluster, run, why)


def _unlike(cluster: Cluster, run: Run, why: Why) -> str:
    """Why an exact run does not take slots that would do for any other."""
    homes: dict[str, list[str]] = {}
    for node_id, machine in sorted(_machines(cluster).items()):
        homes.setdefault(machine, []).append(node_id)
    there = "; ".join(list_names(names, "node") for names in homes.values())
    of_one_kind = (
        f"on machines like the ones it has run on (kind {run.machine[:12]}), and there are {why.capacity}"
        if run.bound
        else f"on machines of one kind, and there are at most {why.capacity}"
    )
    return (
        f"it is exact to the bit and needs at least {_slots(run.spec.slots.min)} {of_one_kind} (these are alike: "
        f"{there}); it runs as soon as more of the kind join, or submit it again with "
        "training.heterogeneous_nodes 'allow' (and resume_from its last checkpoint): that run is exact in its samples "
        "alone"
    )


def _for_slots(cluster: Cluster, run: Run, why: Why) -> str:
    need = run.spec.slots.min
    alike = " on machines of one kind" if run.exact and len(set(_machines(cluster).values())) > 1 else ""
    text = f"needs at least {_slots(need)}{alike}, {why.idle} of {why.capacity} are free"
    if why.idle >= need:
        text += ", but not as they would have to lie together"
    if why.start_by is not None:
        by = "by the limits of those that hold them" if why.firm else "if others take as long as is expected of them"
        text += f"; they are kept for it from {why.start_by.isoformat(timespec='seconds')} on, {by}"
    if why.victims:
        return f"{text}; {list_names(why.victims)} asked to release their slots, it starts as soon as they have"
    holders = _holders(cluster)
    text += f"; {list_names(holders)} hold{'s' if len(holders) == 1 else ''} the rest" if holders else ""
    return f"{text}; it starts when {need - why.idle} more get free" if why.idle < need else text


def _machines(cluster: Cluster) -> dict[str, str]:
    """Return the kind of machine of each node on which something may be placed."""
    found, node_id = {}, ""
    try:
        for node in schedulable_nodes(cluster).values():
            node_id = node.node_id
            found[node_id] = node.machine
    except Exception as error:
        note_suspect(error, node_id=node_id)
        raise
    return found


def _holders(cluster: Cluster) -> list[str]:
    """Return the allocated runs, in order; cached, since many texts name them."""
    index = cluster.index
    if index.holders_at != cluster.sequence:
        holding = {run_id for node in cluster.nodes.values() for run_id, _ in node.allocations}
        index.holders, index.holders_at = sorted(holding), cluster.sequence
    return index.holders


def _place_in_queue(cluster: Cluster, run: Run, why: Why) -> str:
    ahead = cluster.runs.get(why.ahead or "")
    if ahead is not None:
        try:
            priority = ahead.spec.priority
        except Exception as error:
            note_suspect(error, run_id=ahead.run_id)
            raise
        if priority > run.spec.priority:
            return f"a priority above {priority} would put this one first"
    return "within a priority the order is that of submission"


def state(cluster: Cluster, run_id: str, why: Why | None) -> dict[str, Any]:
    """What can be said about a run: its state, a code, and a sentence."""
    run = cluster.runs.get(run_id)
    if run is None:
        return {"run_id": run_id, "state": "unknown", "code": "unknown", "message": f"no run has the id {run_id}"}
    code, text = (why.code, message(cluster, run, why)) if why else _not_waiting(run)
    return {
        "run_id": run_id,
        "name": run.spec.name,
        "state": str(run.phase),
        "code": code,
        "message": text,
        "priority": run.spec.priority,
        "generation": run.generation,
        "failures": run.failures,
        "slots": run.slot_count,
        "slots_min": run.spec.slots.min,
        "slots_max": run.spec.slots.max,
        "nodes": sorted(part.node_id for part in run.live),
    }


def _not_waiting(run: Run) -> tuple[str, str]:
    where = list_names(sorted(part.node_id for part in run.live), "node")
    wanted = useful(run, run.spec.slots.max)
    wish = "" if run.slot_count >= wanted else f" (it would use up to {wanted})"
    match run.phase:
        case Phase.PREPARING if run.staging is not None:
            nodes = [node_id for node_id in run.staging.node_ids if node_id in run.awaited_nodes]
            text = staging_text(run.staging.dataset, nodes or run.staging.node_ids)
            since = format_time(run.staging_at)
            return "preparing", f"{text} (since {since}; for {run.staging.limit_s:g} s at most), then it is queued"
        case Phase.PREPARING:
            return "preparing", "its data is being prepared; it is queued as soon as that is done"
        case Phase.PLACED | Phase.RUNNING if not run.live:
            return UNCOMMITTED, uncommitted_text(run)
        case Phase.PLACED:
            begun = f"it {run.held_up}" if run.held_up else "its ranks are starting"
            return "starting", f"placed on {_slots(run.slot_count)}{wish} of {where}, {begun}"
        case Phase.RUNNING:
            return "running", f"runs on {_slots(run.slot_count)}{wish} of {where}"
        case Phase.STOPPING:
            return "stopping", _stop_text(run)
        case Phase.COMPLETED | Phase.FAILED | Phase.CANCELLED | Phase.REJECTED:
            return str(run.phase), run.outcome
        case _:
            return "deciding", "will be decided on at once"


def uncommitted_text(run: Run) -> str:
    """Return what a run waits for whose ranks have all ended."""
    if not (steps := run.awaited_steps):
        return "its ranks have ended well; its final checkpoint is being committed"
    newest = f"the newest committed one is of step {run.newest.ref.step}" if run.newest else "none is committed yet"
    older = f" and {len(steps) - 1} older" if len(steps) > 1 else ""
    return (
        f"its ranks have ended well; it is complete once their checkpoint of step {steps[-1]} is committed"
        f"{older} ({newest}): "
        "if that takes long, see whether the checkpoint service and the object store are up (`trainbus doctor`)"
    )


def _stop_text(run: Run) -> str:
    """Return why the run is stopped, and what that costs and gains."""
    stop = run.stopping
    if stop is None:
        return "is being stopped"
    if stop.cost_slot_s is None or stop.gain_slot_s is None:
        return stop.message
    return f"{stop.message}; that costs {stop.cost_slot_s:.6g} slot-seconds and gains {stop.gain_slot_s:.6g}"


def summary(cluster: Cluster, limit: int = 100) -> dict[str, Any]:
    """The queue, the nodes and the counts."""
    line = [run_id for entries in cluster.index.queue.groups.values() for _, run_id in entries]
    queue = [cluster.runs[run_id] for run_id in dict.fromkeys([*line, *cluster.queued]) if run_id in cluster.queued]
    return {
        "sequence": cluster.sequence,
        "runs": {str(phase): count for phase, count in sorted(cluster.phases.items()) if count},
        "queue_length": len(queue),
        "queue": [
            {
                "run_id": run.run_id,
                "name": run.spec.name,
                "priority": run.spec.priority,
                "slots_min": run.spec.slots.min,
                "slots_max": run.spec.slots.max,
                "waiting": run.waiting_code,
            }
            for run in queue[:limit]
        ],
        "active": [
            {
                "run_id": run.run_id,
                "name": run.spec.name,
                "state": str(run.phase),
                "generation": run.generation,
                "slots": run.slot_count,
            }
            for run in (cluster.runs[run_id] for run_id in list(cluster.active)[:limit])
        ],
        "nodes": [
            {
                "node_id": node.node_id,
                "state": node.display_state,
                "reason": _node_reason(node),
                "slots": node.slots,
                "used": node.used_slots,
                "free": node.slots - node.used_slots if node.is_schedulable else 0,
                "accelerator": node.accelerator,
            }
            for _, node in sorted(cluster.nodes.items())
        ],
    }


def _node_reason(node: Node) -> str:
    if node.unfit is not None:
        return node.unfit.reason
    if node.notice is not None:
        return f"{node.notice.source}: {node.notice.kind}"
    return node.last_drain.reason if node.last_drain is not None and node.draining else ""


def _slots(count: int) -> str:
    return f"{count} slot{'s' if count != 1 else ''}"


def list_names(names: Iterable[str], what: str = "run") -> str:
    """Return the first names with what they name: ``runs a, b and 3 more``."""
    listed = list(names)
    shown = ", ".join(listed[:MAX_NAMES]) + (f" and {len(listed) - MAX_NAMES} more" if len(listed) > MAX_NAMES else "")
    return f"{what}{'s' if len(listed) != 1 else ''} {shown}"
