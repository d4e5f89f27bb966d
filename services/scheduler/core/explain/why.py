"""The answer to "why does this run wait": now, or as things stood in the past."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from contracts.formats import format_duration
from contracts.scheduling import Policy
from services.scheduler.core import reasons
from services.scheduler.core.decide import run_steps
from services.scheduler.core.explain.estimate import ReleaseTimes
from services.scheduler.core.explain.request_changes import fork_cluster, smallest_changes
from services.scheduler.core.order import queue
from services.scheduler.core.place.placer import Placer
from services.scheduler.core.place.resource_request import resource_request_of
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.remaining_time import expected_end_s
from services.scheduler.core.state.run import EPOCH, Run

#: How many of those that hold what a run needs are listed.
MAX_LISTED_HOLDERS = 10


def answer(
    cluster: Cluster, run_id: str, now: datetime, policy: Policy, reachable_since: datetime = EPOCH
) -> dict[str, Any]:
    """Return the state of a run, the constraint that binds it, and a sentence; and of a run that waits who has the
    slots that it needs, until when, and the smallest changes that would start it (``request_changes.py``).

    A pure function: the cycles that it runs change copies alone.
    """
    run = cluster.runs.get(run_id)
    # Only a run that waits needs a look at all the others.
    is_waiting = run is not None and not run.parts and not run.terminal
    why, is_left_over = None, False
    if is_waiting:
        result = run_steps(_pending(cluster), now, policy, reachable_since, about=run_id)
        why, is_left_over = result.waits.get(run_id), result.is_left_over
    said = reasons.state(cluster, run_id, why)
    if run is None or why is None or run_id not in cluster.queued:
        return said
    if is_left_over:
        said["message"] += (
            "; it is far down the queue: one cycle does not examine all runs, the next ones go on with it"
        )
    limit_s = queue.wait_limit_s(cluster, run, policy)
    if limit_s < math.inf:
        waited, limit = map(format_duration, (run.waited_s(now), limit_s))
        said["message"] += f"; it has waited {waited}, and after {limit} only short runs go before it"
    changes = smallest_changes(cluster, run, now, policy, why) if why.code != "paused" and not why.victims else []
    if changes:
        said["message"] += "; " + ", or ".join(change.text for change in changes)
    said["changes"] = [
        {"fields": change.fields, "starts": change.starts, "victims": list(change.victims)} for change in changes
    ]
    said["holders"], room_at = holders(cluster, run, now, policy)
    if room_at is not None:
        said["room_at"] = room_at.isoformat(timespec="seconds")
    return said


def _pending(cluster: Cluster) -> Cluster:
    """Return a copy in which what was not settled yet will be."""
    clone = fork_cluster(cluster)
    index = cluster.index
    clone.index.unsettled, clone.index.nodes_changed = index.unsettled.copy(), index.nodes_changed
    clone.index.alarms, clone.index.alarmed = index.alarms.copy(), index.alarmed.copy()
    return clone


def holders(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> tuple[list[dict[str, Any]], datetime | None]:
    """Return the runs that have slots of the nodes that suit the run, the one expected to release them first first; and
    when enough slots are expected to be released, None if all of them are not enough.
    """
    wanted = Placer(cluster, policy, now).waits_for(run, resource_request_of(cluster, run))
    release_times = ReleaseTimes(cluster, policy, now)
    found: list[dict[str, Any]] = []
    ends: list[tuple[datetime, int]] = []
    for run_id in cluster.active:
        holder = cluster.runs[run_id]
        slots = sum(len(part.slots) for part in holder.live if part.node_id in wanted)
        if slots:
            latest_s, limit = expected_end_s(cluster, holder, now, policy)
            ends_at = now + timedelta(seconds=release_times.middle_s(holder, run))
            ends.append((ends_at, slots * holder.slot_spec.milli))
            found.append(
                {
                    "run_id": run_id,
                    "name": holder.spec.name,
                    "slots": slots,
                    "priority": holder.spec.priority,
                    "until": (datetime.fromtimestamp(latest_s, UTC) if limit else ends_at).isoformat(
                        timespec="seconds"
                    ),
                    "until_is": "limit" if limit else "expected",
                }
            )
    found.sort(key=lambda each: (each["until"], each["run_id"]))
    return found[:MAX_LISTED_HOLDERS], _room_at(cluster, run, wanted, ends)


def _room_at(
    cluster: Cluster, run: Run, wanted: Iterable[str], ends: Iterable[tuple[datetime, int]]
) -> datetime | None:
    """Return when enough will be released for the run, if no other run waited."""
    missing = run.spec.slots.min * run.slot_spec.milli - sum(
        sum(cluster.nodes[node_id].free_milli) for node_id in wanted
    )
    for ends_at, milli in sorted(ends):
        if missing <= 0:
            break
        missing -= milli
        if missing <= 0:
            return ends_at
    return None
