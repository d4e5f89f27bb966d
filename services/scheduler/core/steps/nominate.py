"""Nominate: which queued runs are tried now, and why the others are not."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from itertools import chain

from services.scheduler.core.cycle_state import UNLIMITED, CycleState
from services.scheduler.core.place.resource_request import ResourceRequest, resource_request_of
from services.scheduler.core.quota.entitlements import refusal_text
from services.scheduler.core.quota.quotas import Refusal
from services.scheduler.core.reasons import Why, too_large
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.suspects import note_suspect


def rule_out(cycle: CycleState, run: Run, request: ResourceRequest) -> tuple[Why | None, frozenset[str]]:
    """Return why the run may have no slots now, however many are free; and the nodes on which it may have none."""
    if run.setbacks and (retry_at := _retry_at(cycle, run)) > cycle.now:
        cycle.wake_at(retry_at.timestamp())
        return Why("paused", retry_at=retry_at), frozenset()
    if (largest := cycle.placer.largest(request)) < run.least:
        # It can wait for nodes, but must not keep any other run waiting.
        return too_large(cycle.cluster, run, largest), frozenset()
    shut, refusal = cycle.entitlements.shut(run, request, run.least)
    return (_refused(cycle, run, refusal) if refusal is not None else None), shut


def maintenance_reason(cycle: CycleState, run: Run, request: ResourceRequest) -> Why | None:
    """Return the reason of a run that would fit, were it not for maintenance that begins before it is done."""
    shut, placer = cycle.placer.shut(run), cycle.placer
    if not shut:
        return None
    if placer.find(cycle.snapshot, run, run.spec.slots.min, request, respect_maintenance=False) is None:
        return None
    ends = min(window.end for window in placer.windows)
    names = ", ".join(sorted(shut)[:5])
    return Why(
        "maintenance",
        detail=f"nodes that have room for it ({names}) are in maintenance, or will be before it is expected to be "
        f"done: the next one ends at {ends.isoformat(timespec='seconds')}; with a shorter scheduling.limit_s it "
        "could go before",
    )


def is_known_misfit(cycle: CycleState, run: Run) -> bool:
    """Whether as many slots of the same request have not fitted in this cycle, so that it need not be tried."""
    request = run.request
    # What can never fit has another reason to wait.
    if not isinstance(request, ResourceRequest):
        return False
    return cycle.misfits.get(request, UNLIMITED) <= run.least <= cycle.placer.largest(request)


def is_hopeless(cycle: CycleState, closed: Collection[str], *, only_slots_count: bool) -> bool:
    """Whether no run further down the queue can be placed, and the run that is asked about was examined."""
    cluster = cycle.cluster
    if cycle.about is not None and cycle.about not in cycle.result.waits:
        return False
    # Runs that need no accelerator always have a chance.
    is_full = cycle.snapshot.milli <= 0 and not cluster.index.without_accelerator
    if is_full or len(closed) >= len(cycle.snapshot.nodes):
        return True
    if not only_slots_count:
        return False
    new = (_size_of(cluster, run) for run in cycle.queued.values())
    return all(cycle.misfits.get(request, UNLIMITED) <= least for request, least in chain(cluster.index.sizes, new))


def _size_of(cluster: Cluster, run: Run) -> tuple[ResourceRequest, int]:
    """Return the request of the run and its least number of slots."""
    try:
        return resource_request_of(cluster, run), run.least
    except Exception as error:
        note_suspect(error, run_id=run.run_id)
        raise


def _retry_at(cycle: CycleState, run: Run) -> datetime:
    if run.run_id not in cycle.cluster.queued:
        return run.placed_at  # it is queued in this cycle, and only if it need not wait
    return run.queued_at + timedelta(seconds=cycle.policy.faults.retry_delay_s(run.setbacks))


def _refused(cycle: CycleState, run: Run, refusal: Refusal) -> Why:
    """Return the reason of a run that may have no more slots; the text is made only where it is published."""
    is_known = (run.waiting_code, run.waiting_generation) == (refusal.code, run.next_generation)
    text = "" if is_known and run.run_id != cycle.about else refusal_text(cycle.cluster, run, refusal)
    return Why(refusal.code, detail=text)
