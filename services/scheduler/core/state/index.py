"""What cycles cache, so that a cycle costs what has changed rather than what there is.

Everything in it follows from the cluster, the policy and the clock: without it the decisions are the same, but slower.
"""

from __future__ import annotations

import copy
import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

#: The key by which runs are ordered; smaller goes first.
Key = tuple[float, ...]


Cache = TypeVar("Cache")
Value = TypeVar("Value")


class RunCache(dict[str, Value]):
    """What is known of runs that have slots. The entry of a run goes when its allocation changes."""


@dataclass(slots=True)
class RunQueue:
    """Queued runs in order, for each group that has its own order (a team, under fair share)."""

    groups: dict[str, list[tuple[Key, str]]] = field(default_factory=dict)
    places: dict[str, tuple[str, Key]] = field(default_factory=dict)

    def put(self, run_id: str, group: str, key: Key) -> None:
        self.remove(run_id)
        self.places[run_id] = (group, key)
        insort(self.groups.setdefault(group, []), (key, run_id))

    def remove(self, run_id: str) -> None:
        place = self.places.pop(run_id, None)
        if place is None:
            return
        group, key = place
        entries = self.groups[group]
        del entries[bisect_left(entries, (key, run_id))]
        if not entries:
            del self.groups[group]


@dataclass(slots=True)
class Index:
    """Caches and queues, maintained by the fold (``touch``) and by ``decide`` (all others)."""

    #: The policy that ``queue`` was ordered by.
    digest: str = ""
    queue: RunQueue = field(default_factory=RunQueue)
    #: The longest waits that it was ordered by; and those of the runs that have slots, at a sequence.
    wait_limits: Hashable = None
    longest_waits: tuple[int, dict[Any, float]] | None = None
    #: Caches of the steps, each by its class (``find_cache``).
    caches: dict[type[object], object] = field(default_factory=dict)
    #: Runs with facts since the last cycle.
    touched: dict[str, None] = field(default_factory=dict)
    #: Runs that the next cycle must settle.
    unsettled: dict[str, None] = field(default_factory=dict)
    #: (seconds, run): when the clock alone may change what is decided about a run; and the last alarm of each run.
    alarms: list[tuple[float, str]] = field(default_factory=list)
    alarmed: dict[str, float] = field(default_factory=dict)
    #: Runs that are over and may still have an alarm.
    forgotten: int = 0
    #: Queued runs without a current explanation of their wait.
    unexplained: dict[str, None] = field(default_factory=dict)
    #: Queued runs that have reached their wait limit.
    overdue: set[str] = field(default_factory=set)
    #: Queued runs that need no accelerator.
    without_accelerator: set[str] = field(default_factory=set)
    #: How many queued runs have the same request and least number of slots; and what each run is counted as.
    sizes: Counter[tuple[Any, int]] = field(default_factory=Counter)
    sized: dict[str, tuple[Any, int]] = field(default_factory=dict)
    #: Runs that have slots -> their priority; how many there are of each; and the runs asked to release theirs.
    priority: dict[str, int] = field(default_factory=dict)
    priorities: Counter[int] = field(default_factory=Counter)
    stopping: set[str] = field(default_factory=set)
    #: Those of them that would go on from a checkpoint; and a count of the changes of on what terms runs have slots.
    resumable: set[str] = field(default_factory=set)
    allocations_version: int = 0
    #: One object for all runs with the same request.
    request: dict[Any, Any] = field(default_factory=dict)
    #: Counts up with every change of the nodes; what is remembered about them holds for one value.
    nodes_version: int = 0
    remembered_version: int = -1
    remembered: dict[Any, Any] = field(default_factory=dict)
    #: The allocated runs, in order, as of this sequence.
    holders: list[str] = field(default_factory=list)
    holders_at: int = -1
    #: A node changed, so that every explanation may be outdated.
    nodes_changed: bool = True

    def fork(self) -> Index:
        """Return an index that a trial may change, with nothing to settle and nothing to explain."""
        forked = copy.copy(self)
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, dict | list | set):
                setattr(forked, each.name, value.copy())
        forked.caches = {kind: copy.copy(cache) for kind, cache in self.caches.items()}
        forked.queue = RunQueue(
            {group: entries.copy() for group, entries in self.queue.groups.items()}, self.queue.places.copy()
        )
        for nothing in (forked.unsettled, forked.unexplained, forked.alarms, forked.alarmed):
            nothing.clear()
        forked.nodes_changed = False
        return forked

    def find_cache(self, kind: type[Cache]) -> Cache:
        """Return the cache of this class, which is empty at first."""
        cache = self.caches.get(kind)
        if not isinstance(cache, kind):
            cache = self.caches[kind] = kind()
        return cache

    def touch(self, run_id: str) -> None:
        """Note a fact about the run."""
        self.touched[run_id] = None
        self.unsettled[run_id] = None

    def touch_nodes(self, run_ids: Iterable[str]) -> None:
        """Note a fact about a node that has these runs."""
        self.nodes_version += 1
        self.nodes_changed = True
        for run_id in run_ids:
            self.touch(run_id)

    def count(self, run_id: str, size: tuple[Any, int]) -> None:
        """Count a queued run's request."""
        self.sized[run_id] = size
        self.sizes[size] += 1

    def update_allocation(self, run_id: str, priority: int | None, *, stopping: bool, resumable: bool) -> None:
        """Note that the run has slots, on these terms; priority None: it has no slots."""
        for cache in self.caches.values():
            if isinstance(cache, RunCache):
                cache.pop(run_id, None)
        known = self.priority.pop(run_id, None)
        before = known, run_id in self.stopping, run_id in self.resumable
        # (Who leaves has released its slots before, which its nodes count.)
        if priority is not None and before != (priority, stopping, resumable):
            self.allocations_version += 1
        if known is not None:
            self.priorities[known] -= 1
            if not self.priorities[known]:
                del self.priorities[known]
        if priority is not None:
            self.priority[run_id] = priority
            self.priorities[priority] += 1
        for members, belongs in ((self.stopping, stopping), (self.resumable, resumable)):
            if belongs:
                members.add(run_id)
            else:
                members.discard(run_id)

    def uncount(self, run_id: str) -> None:
        size = self.sized.pop(run_id, None)
        if size is not None:
            self.sizes[size] -= 1
            if not self.sizes[size]:
                del self.sizes[size]

    def alarm(self, at_s: float, run_id: str) -> None:
        """Look at the run again at this time."""
        if self.alarmed.get(run_id) != at_s:
            self.alarmed[run_id] = at_s
            heapq.heappush(self.alarms, (at_s, run_id))

    def forget(self, run_id: str) -> None:
        """Forget a run that is over. A new fact about it brings it back."""
        self.unsettled.pop(run_id, None)
        self.unexplained.pop(run_id, None)
        self.alarmed.pop(run_id, None)
        self.forgotten += 1

    def drop_alarms(self, keep: Collection[str]) -> None:
        """Remove the alarms of all other runs."""
        self.alarms = [alarm for alarm in self.alarms if alarm[1] in keep]
        heapq.heapify(self.alarms)
        self.forgotten = 0

    def due(self, now_s: float) -> list[str]:
        """Return the runs whose alarm time has passed, and remove the alarms."""
        found = []
        while self.alarms and self.alarms[0][0] <= now_s:
            run_id = heapq.heappop(self.alarms)[1]
            self.alarmed.pop(run_id, None)
            found.append(run_id)
        return found

    def memory(self) -> dict[Any, Any]:
        """Return the cache of what follows from the nodes; it is empty after each change of them."""
        if self.remembered_version != self.nodes_version:
            self.remembered, self.remembered_version = {}, self.nodes_version
        return self.remembered
