"""Order: the queued runs, the first in order first."""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.core.cycle_state import CycleState
from services.scheduler.core.order import queue
from services.scheduler.core.state.index import Key
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.suspects import note_suspect


def update_queue(cycle: CycleState) -> None:
    """Bring the queue up to date with what has happened since the last cycle."""
    queue.update(cycle.cluster, cycle.now, cycle.policy)


def queued_runs(cycle: CycleState) -> Iterator[Run]:
    """Iterate over all queued runs: those with a promised start, then those within their quota, then all others."""
    runs = cycle.cluster.runs
    # A promise that a newcomer can break is worth nothing.
    for _, run_id in sorted((start_by, run_id) for run_id, start_by in cycle.cluster.promised.items()):
        if (run := runs[run_id]).cancel_reason is None:
            yield run
    for _, run in cycle.entitlements.in_order(lambda: _by_policy(cycle)):
        yield run


def _by_policy(cycle: CycleState) -> Iterator[tuple[Key, Run]]:
    """Iterate in the order of the policy, over the runs that this cycle queues too."""
    cluster, policy = cycle.cluster, cycle.policy
    groups = cluster.index.queue.groups
    if cycle.queued:
        new: dict[str, list[tuple[Key, str]]] = {}
        run_id = ""
        try:
            for run_id, run in cycle.queued.items():
                entry = (queue.key_of(cluster, run, cycle.now, policy), run_id)
                new.setdefault(queue.group_of(run, policy), []).append(entry)
        except Exception as error:
            note_suspect(error, run_id=run_id)
            raise
        groups = groups | {group: sorted([*groups.get(group, ()), *entries]) for group, entries in new.items()}
    for key, run_id in queue.iterate(groups, cycle.entitlements.share, policy):
        run = cluster.runs[run_id]
        if run.cancel_reason is None and run_id not in cluster.promised:
            yield key, run
