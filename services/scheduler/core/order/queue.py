"""Who goes before whom: keys that compose, and for whom slots may be taken.

The line is ordered by the keys that ``policy.order.by`` names, then by submission. A run may take slots of another when
the first key in which the two differ is among ``policy.preemption.by``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator
from datetime import datetime
from heapq import heappop, heappush, heapreplace

from contracts.scheduling import LeastAttained, OrderKey, Policy
from services.scheduler.core.order import even_wait
from services.scheduler.core.place.resource_request import resource_request_of
from services.scheduler.core.policy_features import BY_POLICY, Feature, has_service_keys, has_wait_limit
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.index import Index, Key, RunQueue
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.suspects import note_suspect

#: Seconds after which a change has certainly taken effect, despite rounding.
AFTER_S = 1e-3
#: The wait limit of least attained service is rounded up to this part of its least value.
LIFT_STEP = 0.25
#: A run, the clock -> what it is ordered by.
KeyOf = Callable[[Cluster, Run, datetime, Policy], float]
#: A group (a team) -> its share. The share does not change the order of runs within the group.
ShareOf = Callable[[str], Key]


def _priority(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    return -run.spec.priority


def _deadline(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    deadline = run.spec.scheduling.deadline
    return deadline.timestamp() if deadline is not None else math.inf


def _submitted(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    return run.submitted


def _attained(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    """The level by slot-seconds attained; one that has waited for long goes right behind the first levels."""
    config, attained = policy.order.attained, _service_slot_s(cluster, run, now)
    level = bisect_right(config.levels_slot_s, attained)
    if level <= config.above_lifted or (left := _part_left(cluster, run, now, policy)) == 1.0:
        return level
    return max(bisect_right(config.levels_slot_s, attained * left), config.above_lifted) if left else _lifted(policy)


def _service_slot_s(cluster: Cluster, run: Run, now: datetime) -> float:
    """Return the slot-seconds that the run has had, or those of the runs that were submitted with it."""
    return max(run.attained_slot_s(now), cluster.arrays.served_slot_s(run.array_id))


def _waited_s(cluster: Cluster, run: Run, now: datetime) -> float:
    """Return how long the run has waited, without the time in which runs that were submitted with it had its slots."""
    others_slot_s = max(cluster.arrays.served_slot_s(run.array_id) - run.served_slot_s, 0.0)
    return run.waited_s(now) - others_slot_s / max(run.spec.slots.min, 1)


def _lifted(policy: Policy) -> float:
    """Return the key of a run that has reached its wait limit: before all levels but the first ones."""
    return policy.order.attained.above_lifted - 0.5


def _part_left(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    """Return which part of what the run has attained counts, after so long a wait."""
    limit_s = _lift_limit_s(cluster, run, policy)
    return (
        even_wait.part_left(_waited_s(cluster, run, now), limit_s, policy.order.even_wait)
        if limit_s < math.inf
        else 1.0
    )


def _lift_limit_s(cluster: Cluster, run: Run, policy: Policy) -> float:
    """Return the longest wait in strict order of submission, rounded up; at least the policy's; inf: no limit."""
    least_s = policy.order.attained.lift_after_s
    if least_s is None:
        return math.inf
    longest_s = cluster.fifo_waits.longest_s(run.slot_spec.accelerators, run.spec.priority)
    return max(_lift_steps(longest_s, least_s) * LIFT_STEP * least_s, least_s)


def _lift_steps(longest_s: float, least_s: float) -> int:
    return math.ceil(longest_s / (LIFT_STEP * least_s))


def _predicted(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    return run.predicted_s


def _attained_changes_at(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    """When a waiting run goes up a level by its wait, in seconds since the epoch."""
    config, attained = policy.order.attained, _service_slot_s(cluster, run, now)
    limit_s, waited_s = _lift_limit_s(cluster, run, policy), _waited_s(cluster, run, now)
    level = _attained(cluster, run, now, policy)
    if limit_s == math.inf or level == _lifted(policy) or attained < _top(config):
        return math.inf
    # The part of what it has attained at which it goes up; the last step is at the limit.
    part = config.levels_slot_s[int(level) - 1] / attained if level > config.above_lifted else 0.0
    from_part = policy.order.even_wait.from_part
    due_s = limit_s * (from_part + (1 - from_part) * (1 - part))
    return now.timestamp() + max(due_s - waited_s, 0.0) + AFTER_S


def _top(config: LeastAttained) -> float:
    """Return the slot-seconds below which the wait makes no difference."""
    levels = (0.0, *config.levels_slot_s)
    return levels[config.above_lifted + 1] if config.above_lifted + 1 < len(levels) else math.inf


def _attained_for_more(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    """Return the slot-seconds at which a run with slots goes down a level."""
    config, attained = policy.order.attained, _service_slot_s(cluster, run, now)
    left = _part_left(cluster, run, now, policy) if attained >= _top(config) else 1.0
    return (
        next((level / left for level in config.levels_slot_s if level > attained * left), math.inf)
        if left
        else math.inf
    )


#: The keys, by name. ``fair-share`` is none of them: it orders groups, see ``iterate``.
KEYS: dict[OrderKey, KeyOf] = {
    "priority": _priority,
    "deadline": _deadline,
    "submitted": _submitted,
    "least-attained": _attained,
    "shortest-predicted": _predicted,
    "even-wait": even_wait.key,
}


def key_of(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> Key:
    """What the run is ordered by, the submission last; ``fair-share`` stands as 0 in it."""
    try:
        found = [KEYS[name](cluster, run, now, policy) if name in KEYS else 0.0 for name in policy.order.by]
        return (*found, run.submitted if policy.preemption.time_slice_s is None else _turn(run))
    except Exception as error:
        note_suspect(error, run_id=run.run_id)
        raise


def holder_key(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> tuple[Key, float]:
    """The key of a run that has slots, and until when it stays if nothing happens, in seconds since the epoch."""
    key = key_of(cluster, run, now, policy)
    if not has_service_keys(policy) or BY_POLICY[Feature.UNSTABLE_KEYS](policy):
        return key, math.inf
    return key, demoted_at_s(cluster, run, now, policy)


def wait_limits(cluster: Cluster, policy: Policy) -> Hashable:
    """Return the longest waits that keys depend on."""
    least_s, waits = policy.order.attained.lift_after_s, cluster.fifo_waits.longest_waits()
    return (
        frozenset((*which, _lift_steps(longest_s, least_s)) for *which, longest_s in waits)
        if has_wait_limit(policy) and least_s is not None
        else None,
        even_wait.limits(cluster, policy.order.even_wait) if "even-wait" in policy.order.by else None,
    )


def wait_limit_s(cluster: Cluster, run: Run, policy: Policy) -> float:
    """Return after how long a wait the run goes before all but the short ones; inf: the policy has no such limit."""
    limit_s = _lift_limit_s(cluster, run, policy) if "least-attained" in policy.order.by else math.inf
    if "even-wait" in policy.order.by:
        limit_s = min(limit_s, even_wait.limit_s(cluster, run, policy.order.even_wait))
    return limit_s


def current_key(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> Key:
    """The key by which the run stands in the line, if it does."""
    place = cluster.index.queue.places.get(run.run_id)
    return place[1] if place is not None else key_of(cluster, run, now, policy)


def _turn(run: Run) -> float:
    """When it began to wait: a run that takes turns stands behind all that waited when it had had its own."""
    return max(run.submitted, run.yielded_at) if run.spec.scheduling.time_slice else run.submitted


def promoted_at_s(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    """When the key of a run that waits changes by the clock alone, in seconds since the epoch; inf: never."""
    found = math.inf
    if "least-attained" in policy.order.by:
        found = _attained_changes_at(cluster, run, now, policy)
    if "even-wait" in policy.order.by:
        found = min(found, even_wait.changes_at(cluster, run, now, policy))
    return found


def demoted_at_s(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    """When a run that has slots comes to stand worse by what it attains, in seconds since the epoch; inf: never."""
    attained, above = run.attained_slot_s(now), math.inf
    if "least-attained" in policy.order.by:
        above = _attained_for_more(cluster, run, now, policy)
    if "even-wait" in policy.order.by:
        above = min(above, even_wait.attained_for_more(cluster, run, now, policy))
    return now.timestamp() + max(above - attained, 0.0) / max(run.slot_count, 1) + AFTER_S


def may_preempt(waiter: Key, holder: Key, policy: Policy) -> bool:
    """Whether a run with the one key may be given slots of a run with the other."""
    for name, mine, theirs in zip(policy.order.by, waiter, holder, strict=False):
        if mine != theirs:
            least = even_wait.advantage(policy.order.even_wait) if name == "even-wait" else 0.0
            return mine + least < theirs and name in policy.preemption.by
    return False


def group_of(run: Run, policy: Policy) -> str:
    """Which group it is ordered in."""
    return run.spec.team or "" if "fair-share" in policy.order.by else ""


def update(cluster: Cluster, now: datetime, policy: Policy) -> RunQueue:
    """Bring the line of queued runs up to date; costs what has changed."""
    index = cluster.index
    limits = wait_limits(cluster, policy)
    for run_id in index.touched if index.digest else cluster.active:
        _update_allocation(cluster, run_id)
    if index.digest != policy.digest or index.wait_limits != limits:
        index.digest, index.wait_limits, index.queue = policy.digest, limits, RunQueue()
        index.sizes.clear()
        index.sized.clear()
        index.overdue.clear()
        changed = list(cluster.queued)
        index.touched.clear()
    else:
        changed = [run_id for run_id in index.touched if run_id in cluster.queued or run_id in index.queue.places]
        index.touched.clear()
    for run_id in changed:
        place_run(cluster, index, run_id, now, policy)
    return index.queue


def _update_allocation(cluster: Cluster, run_id: str) -> None:
    if run_id not in cluster.active:
        cluster.index.update_allocation(run_id, None, stopping=False, resumable=False)
        return
    try:
        run = cluster.runs[run_id]
        cluster.index.update_allocation(
            run_id, run.spec.priority, stopping=run.stopping is not None, resumable=run.is_resumable
        )
    except Exception as error:
        note_suspect(error, run_id=run_id)
        raise


def place_run(cluster: Cluster, index: Index, run_id: str, now: datetime, policy: Policy) -> None:
    """Insert the run into the queue, or remove it."""
    index.uncount(run_id)
    index.overdue.discard(run_id)
    if run_id not in cluster.queued:
        index.queue.remove(run_id)
        index.without_accelerator.discard(run_id)
        return
    run = cluster.runs[run_id]
    try:
        if not run.slot_spec.milli:
            index.without_accelerator.add(run_id)
        index.count(run_id, (resource_request_of(cluster, run), run.least))
        index.queue.put(run_id, group_of(run, policy), key_of(cluster, run, now, policy))
        if has_wait_limit(policy) and _attained(cluster, run, now, policy) == _lifted(policy):
            index.overdue.add(run_id)
        if (at_s := promoted_at_s(cluster, run, now, policy)) < math.inf:
            index.alarm(at_s, run_id)
    except Exception as error:
        note_suspect(error, run_id=run_id)
        raise


def iterate(groups: dict[str, list[tuple[Key, str]]], share: ShareOf, policy: Policy) -> Iterator[tuple[Key, str]]:
    """Yield all runs in order. With ``fair-share`` each step takes the group furthest below its share."""
    if "fair-share" not in policy.order.by:
        for entries in groups.values():
            yield from entries
        return
    at = policy.order.by.index("fair-share")
    heads: list[tuple[tuple[Key, Key, Key], str, int]] = []

    def push(group: str, place: int) -> None:
        if place < len(groups[group]):
            key = groups[group][place][0]
            # A group's share stands where 0 stood: after what comes first, before the rest.
            heappush(heads, ((key[:at], share(group), key[at + 1 :]), group, place))

    for group in groups:
        push(group, 0)
    while heads:
        known, group, place = heads[0]
        key = groups[group][place][0]
        # Slots of one part of a team count for its other parts too. Shares only grow, so an unchanged head is the
        # least.
        if (current := (key[:at], share(group), key[at + 1 :])) != known:
            heapreplace(heads, (current, group, place))
            continue
        heappop(heads)
        yield groups[group][place]
        push(group, place + 1)
