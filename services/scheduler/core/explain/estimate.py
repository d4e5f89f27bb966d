"""When a run that waits will start: the wait estimate that is shown to users.

Two views are combined. The **plan** plays the line forward many times, each time with other durations drawn from what
is known of the runs that hold slots and of those ahead. The **pace** is how many runs have started lately: it knows
nothing of durations, and so is not misled when they are not what they were. Where runs overtake each other no line
tells who is next, and the waits of others are looked at instead: how long those waited, and wait now, that had come so
far (``waits``).

No view knows how wrong it is. So every estimate is held against what came of it, and the range that is shown is as wide
as the errors were (conformal prediction). Runs that wait at the same time are wrong together, and count as few.

Estimates are shown and never decided on: ``Estimator`` is a memory of its own, outside of the cluster.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from contracts.scheduling import Policy, Predict
from services.scheduler.core.order import queue
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.durations import Distribution, RunKind, RunningTimes, WaitKind, wait_kind_of
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.slot_spec import SLOT_MILLI

#: Quantiles of a distribution that a draw is taken from: for runs in line (shared by all of a kind), and for each that
#: has slots.
LEVELS, LEVELS_HELD = 32, 12
#: How often the plan is played.
MAX_PLAYS = 24
#: Steps of all plays of one estimate together: with a longer line it is played less often, but never less than this.
STEPS, MIN_PLAYS = 50_000, 8
#: How many of one user's queued runs turn out as long as the others of the same play: sweeps end alike.
ALIKE = 0.5
#: The pace is measured over this time, and over this number of starts at least.
PACE_S, PACE_OF = 6 * 3600.0, 20
#: Errors are relative to the wait and this, since some seconds do not matter.
FLOOR_S = 30.0
#: An estimate is compared with those whose expected wait was at most this many times as long, or as short,
ALIKE_WAITS = 5.0
#: if there are at least this many.
ENOUGH = 20
#: Errors that overlap by this share count as one. (This and the factor above were
#: chosen on one trace, and tried on others: docs/scheduler.md.)
ALIKE_OVERLAP = 0.7
#: A run that still waits yields an error once it has waited this many times what is left: before, its first and its
#: present estimate are the same.
EARLY_ERROR_FROM = 0.5
#: How many errors, and estimates yet to be held against their start, are remembered; and how many are noted at a time.
MAX_ERRORS, MAX_OPEN_ESTIMATES, ESTIMATES_PER_ROUND = 1_000, 1_000, 3
#: The range shown leaves out so much at either end.
LEFT_OUT = 0.1
#: How the waits of others are predicted from.
WAITS = Predict(enough=5, window=300, prior_s=600.0)


class Estimate(NamedTuple):
    """The start is before ``p10`` in a tenth of the cases, and after ``p90`` in another."""

    p10: datetime
    p50: datetime
    p90: datetime

    def not_before(self, at: datetime | None) -> Estimate:
        """Return the estimate with no start expected before ``at``: the pace of other runs can promise too much."""
        return self if at is None else Estimate(self.p10, max(self.p50, at), max(self.p90, at))


class Spread(NamedTuple):
    """The same in seconds from now."""

    low_s: float
    middle_s: float
    high_s: float


# -- the plan -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolAllocation:
    """Thousandths of slots of one pool that a run has."""

    pool: int
    milli: int
    #: Samples of how long it keeps them, ascending.
    left_s: Sequence[float]
    priority: int = 0
    #: When it has released its slots if it is preempted for a higher priority; inf: it is not.
    yields_s: float = math.inf


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """The request of a queued run."""

    run_id: str
    #: The pools that will do.
    pools: tuple[int, ...]
    milli: int
    #: Samples of how long it will have them, ascending.
    takes_s: Sequence[float]
    #: Those of a group end alike.
    group: str = ""
    priority: int = 0


def play(
    free: Sequence[int], holders: Sequence[PoolAllocation], requests: Sequence[PoolRequest], rng: random.Random
) -> list[float]:
    """Return one way in which the queue may go: when each run starts, in seconds. No run overtakes."""
    draw = rng.random
    left, clock = list(free), [0.0] * len(free)
    ends: list[list[tuple[float, int]]] = [[] for _ in free]
    for holder in holders:
        ends[holder.pool].append((holder.left_s[int(draw() * len(holder.left_s))], holder.milli))
    for heap in ends:
        heapify(heap)
    alike: dict[str, float] = {}
    starts: list[float] = []
    for claim in requests:
        pool = (
            claim.pools[0] if len(claim.pools) == 1 else min(claim.pools, key=lambda each: (clock[each], -left[each]))
        )
        heap, now, room = ends[pool], clock[pool], left[pool]
        while room < claim.milli and heap:
            end, milli = heappop(heap)
            room += milli
            now = max(now, end)
        if room < claim.milli:
            now = math.inf
        level = draw()
        if draw() < ALIKE:
            level = min(alike.setdefault(claim.group, draw()) * 0.8 + level * 0.2, 0.999)
        left[pool], clock[pool] = room - claim.milli, now
        heappush(heap, (now + claim.takes_s[int(level * len(claim.takes_s))], claim.milli))
        starts.append(now)
    return starts


def played(
    free: Sequence[int], holders: Sequence[PoolAllocation], requests: Sequence[PoolRequest], rng: random.Random
) -> list[list[float]]:
    """For each claim, when it starts in each of many plays, ascending."""
    times = max(MIN_PLAYS, min(MAX_PLAYS, STEPS // (len(holders) + len(requests) + 1)))
    found: list[list[float]] = [[] for _ in requests]
    for _ in range(times):
        for start, starts in zip(play(free, holders, requests, rng), found, strict=True):
            insort(starts, start)
    return found


def taken_from(
    free: Sequence[int], holders: Sequence[PoolAllocation], requests: Sequence[PoolRequest]
) -> list[PoolAllocation]:
    """The holders, those ending sooner whose slots are taken for claims of a higher priority."""
    left, after = list(free), list(holders)
    lowest_first = sorted(range(len(after)), key=lambda each: after[each].priority)
    for claim in requests:
        pool = claim.pools[0]
        victims, room = [], left[pool]
        for each in lowest_first:
            holder = after[each]
            if room >= claim.milli or holder.priority >= claim.priority:
                break
            if holder.pool == pool and holder.yields_s < math.inf:
                victims.append(each)
                room += holder.milli
        if room < claim.milli:
            # No run behind gets what this one waits for, unless it may preempt for it.
            continue
        for each in victims:
            # It has ended for all others.
            after[each] = replace(after[each], left_s=(after[each].yields_s,), yields_s=math.inf)
        left[pool] = room - claim.milli
    return after


def quantile(ascending: Sequence[float], q: float) -> float:
    """Return the quantile of ascending values, linear between neighbours; 0 if there are none."""
    if not ascending:
        return 0.0
    at = min(max(q, 0.0), 1.0) * (len(ascending) - 1)
    low = int(at)
    if low + 1 >= len(ascending) or ascending[low + 1] == ascending[low]:
        return ascending[low]
    return ascending[low] + (ascending[low + 1] - ascending[low]) * (at - low)


# -- the cluster, as the plan sees it -------------------------------------------------------------------


def levels(found: Distribution, attained_s: float, count: int) -> list[float]:
    """What may still come, at even steps of probability."""
    return [found.quantile((step + 0.5) / count, attained_s) - attained_s for step in range(count)]


class ReleaseTimes:
    """When allocated runs release their slots: for estimates of starts, and for what ``why`` says of holders."""

    def __init__(self, cluster: Cluster, policy: Policy, now: datetime) -> None:
        self._cluster, self._policy, self._now = cluster, policy, now
        self._found: dict[RunKind, Distribution] = {}
        self._running = RunningTimes(now)
        for run_id in cluster.active:
            run = cluster.runs[run_id]
            self._running.add(run.kind, run.ran_s(now))

    def left_s(self, run: Run) -> list[float]:
        """For how long a run that has slots may still have them, ascending."""
        if (stop := run.stopping) is not None:
            return [max((run.stopping_at - self._now).total_seconds() + stop.grace_s, 0.0)]
        attained_s = run.ran_s(self._now)
        return limited(run, levels(self.predicted(run.kind), attained_s, LEVELS_HELD), attained_s)

    def yields_s(self, run: Run) -> float:
        """Return in what time it has released its slots if preempted for a higher priority; inf: it is not."""
        if not run.spec.scheduling.preemptible or run.stopping is not None:
            return math.inf
        since_s = (self._now - run.placed_at).total_seconds()
        return max(self._policy.preemption.min_run_s - since_s, 0.0) + run.spec.grace_s

    def middle_s(self, run: Run, waiting: Run) -> float:
        """Return in what time it is expected to release its slots, if ``waiting`` needs them."""
        left_s = quantile(self.left_s(run), 0.5)
        if "priority" in self._policy.preemption.by and waiting.spec.priority > run.spec.priority:
            return min(left_s, self.yields_s(run))
        return left_s

    def predicted(self, kind: RunKind) -> Distribution:
        if kind not in self._found:
            history, config = self._cluster.history, self._policy.predict
            self._found[kind] = history.predict_beside(kind, config, self._running)
        return self._found[kind]


def limited(run: Run, possible_s: list[float], attained_s: float) -> list[float]:
    """No longer than the run's limit."""
    limit_s = run.spec.scheduling.limit_s
    if limit_s is None:
        return possible_s
    return [min(each, max(limit_s - attained_s, 0.0)) for each in possible_s]


class Situation:
    """Pools, holders and claims of a cluster. A pool is what nodes of one kind of accelerator have."""

    def __init__(self, cluster: Cluster, policy: Policy, now: datetime) -> None:
        self._cluster = cluster
        self._lets = ReleaseTimes(cluster, policy, now)
        self._levels: dict[RunKind, list[float]] = {}
        self._pools: dict[str, int] = {}
        self.free: list[int] = []
        self._whole: list[int] = []
        for node in cluster.nodes.values():
            if node.is_schedulable:
                pool = self._pools.setdefault(node.accelerator, len(self._pools))
                if pool == len(self.free):
                    self.free.append(0)
                    self._whole.append(0)
                self.free[pool] += sum(node.free_milli)
                self._whole[pool] += node.slots * SLOT_MILLI
        active = [cluster.runs[run_id] for run_id in cluster.active]
        self.holders = [holder for run in active for holder in self._held(run)]
        self.requests = [claim for run in _in_line(cluster, policy, now) if (claim := self._claim(run)) is not None]
        if "priority" in policy.preemption.by:
            self.holders = taken_from(self.free, self.holders, self.requests)

    def _held(self, run: Run) -> Iterable[PoolAllocation]:
        by_pool: dict[int, int] = {}
        for part in run.live:
            node = self._cluster.nodes.get(part.node_id)
            if node is not None and node.is_schedulable:
                pool = self._pools[node.accelerator]
                by_pool[pool] = by_pool.get(pool, 0) + len(part.slots) * run.slot_spec.milli
        if not by_pool:
            return
        left_s, yields_s = self._lets.left_s(run), self._lets.yields_s(run)
        for pool, milli in by_pool.items():
            yield PoolAllocation(pool, milli, left_s, run.spec.priority, yields_s)

    def _claim(self, run: Run) -> PoolRequest | None:
        kinds = run.slot_spec.accelerators
        milli = run.spec.slots.min * run.slot_spec.milli
        pools = tuple(pool for kind, pool in self._pools.items() if not kinds or kind in kinds)
        pools = tuple(pool for pool in pools if self._whole[pool] >= milli)
        if not pools or run.cancel_reason is not None:
            return None
        return PoolRequest(run.run_id, pools, milli, self._takes_s(run), run.spec.user or "", run.spec.priority)

    def _takes_s(self, run: Run) -> list[float]:
        """How long a run in line may have slots once it gets them; those of a kind that had none yet share it."""
        if run.run_s > 0:
            return limited(run, levels(self._lets.predicted(run.kind), run.run_s, LEVELS_HELD), run.run_s)
        if run.kind not in self._levels:
            self._levels[run.kind] = levels(self._lets.predicted(run.kind), 0.0, LEVELS)
        return limited(run, self._levels[run.kind], 0.0)


# -- errors -------------------------------------------------------------------------------------------


class Error(NamedTuple):
    """What came of an estimate: the logarithm of how many times as long the wait was."""

    score: float
    expected_s: float
    made_s: float
    known_s: float


@dataclass(slots=True)
class Errors:
    """Estimates, and what came of them."""

    known: deque[Error] = field(default_factory=lambda: deque(maxlen=MAX_ERRORS))
    #: (run, generation) -> when its start was estimated, in seconds since the epoch, and the wait expected then.
    made: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note(self, key: str, now_s: float, expected_s: float) -> None:
        if key not in self.made and len(self.made) < MAX_OPEN_ESTIMATES:
            self.made[key] = (now_s, expected_s)

    def started(self, key: str, at_s: float) -> None:
        """The wait is over."""
        if (made := self.made.pop(key, None)) is not None:
            self.known.append(self._error(made, at_s - made[0], at_s))

    def forget(self, key: str) -> None:
        """It will not start."""
        self.made.pop(key, None)

    def widened(self, expected: dict[str, float], now_s: float) -> Callable[[float], Spread]:
        """A function from an expected wait to the range around it, by the errors known by now.

        Those that still wait tell already how wrong their first estimates were, going by what is ``expected`` now.
        """
        errors = list(self.known)
        for key, made in self.made.items():
            if key in expected and now_s - made[0] >= expected[key] * EARLY_ERROR_FROM:
                errors.append(self._error(made, now_s - made[0] + expected[key], now_s))
        ranges: dict[int, tuple[float, float]] = {}

        def spread(expected_s: float) -> Spread:
            # Close ones share theirs: a step is a tenth.
            step = round(math.log(expected_s + FLOOR_S) * 10)
            if step not in ranges:
                ranges[step] = self._range(errors, expected_s)
            low, high = ranges[step]
            base = expected_s + FLOOR_S
            return Spread(max(base * math.exp(low) - FLOOR_S, 0.0), expected_s, base * math.exp(high) - FLOOR_S)

        return spread

    @staticmethod
    def _error(made: tuple[float, float], wait_s: float, known_s: float) -> Error:
        score = math.log((max(wait_s, 0.0) + FLOOR_S) / (made[1] + FLOOR_S))
        return Error(score, made[1], made[0], known_s)

    @staticmethod
    def _range(errors: Sequence[Error], expected_s: float) -> tuple[float, float]:
        near = [each for each in errors if _times(each.expected_s, expected_s) < ALIKE_WAITS]
        errors = near if len(near) >= ENOUGH else errors
        scores = sorted(each.score for each in errors)
        if len(errors) < ENOUGH:
            # Before enough is known: three times as long, or as short.
            scores = sorted([*scores, *(math.log(3) * step / 5 for step in range(-5, 6))])
        level = min((1 - LEFT_OUT) * (1 + 1 / _independent(errors)), 1.0)
        return min(quantile(scores, 1 - level), 0.0), max(quantile(scores, level), 0.0)


def _times(one_s: float, other_s: float) -> float:
    """How many times as long the longer one is."""
    return math.exp(abs(math.log((one_s + FLOOR_S) / (other_s + FLOOR_S))))


def _independent(errors: Sequence[Error]) -> float:
    """How many errors these amount to: those of the same time have the same causes."""
    covered, until, total = 0.0, -math.inf, 0.0
    for made_s, known_s in sorted((each.made_s, each.known_s) for each in errors):
        covered += max(known_s - max(made_s, until), 0.0)
        until = max(until, known_s)
        total += known_s - made_s
    return max(covered * len(errors) / total / ALIKE_OVERLAP, 1.0) if total > 0 else 1.0


# -- the estimates ------------------------------------------------------------------------------------


class Estimator:
    """Estimates for all runs that wait, and the memory of how wrong they were."""

    def __init__(self, errors: Errors | None = None, seed: int = 0) -> None:
        self.errors = errors or Errors()
        self._seed = seed

    def estimates(self, cluster: Cluster, policy: Policy, now: datetime) -> dict[str, Estimate]:
        """When each queued run will start, those left out that cannot run on these nodes."""
        self._settle(cluster)
        expected = expected_waits_s(cluster, policy, now, random.Random(f"{self._seed}/{cluster.sequence}"))
        keys = {run_id: _key(cluster.runs[run_id]) for run_id in expected}
        now_s = now.timestamp()
        spread = self.errors.widened({keys[run_id]: wait_s for run_id, wait_s in expected.items()}, now_s)
        self._note(expected, keys, now_s)
        return {run_id: _as_times(spread(wait_s), now) for run_id, wait_s in expected.items()}

    def _settle(self, cluster: Cluster) -> None:
        """Find those that have started since, or never will."""
        for key in list(self.errors.made):
            run_id, _, generation = key.rpartition("/")
            run = cluster.runs.get(run_id)
            if run is None or (run.terminal and run.generation < int(generation)):
                self.errors.forget(key)
            elif run.generation == int(generation):
                self.errors.started(key, run.placed_at.timestamp())
            elif run.generation > int(generation):
                self.errors.forget(key)

    def _note(self, expected: dict[str, float], keys: dict[str, str], now_s: float) -> None:
        """Remember a few of the new ones, the first to the last."""
        fresh = [run_id for run_id in expected if keys[run_id] not in self.errors.made]
        fresh.sort(key=lambda run_id: expected[run_id])
        for place in (
            sorted(
                {len(fresh) - 1 - (len(fresh) - 1) * part // ESTIMATES_PER_ROUND for part in range(ESTIMATES_PER_ROUND)}
            )
            if fresh
            else ()
        ):
            self.errors.note(keys[fresh[place]], now_s, expected[fresh[place]])


def expected_waits_s(cluster: Cluster, policy: Policy, now: datetime, rng: random.Random) -> dict[str, float]:
    """How long each queued run is expected to wait yet: the middle of what is possible."""
    if policy.order.skip or policy.reserve.backfill != "none" or _reorders(policy):
        return _by_others(cluster, policy, now)
    situation = Situation(cluster, policy, now)
    rate = cluster.waits.rate_per_s(now, PACE_S, PACE_OF)
    found: dict[str, float] = {}
    starts = played(situation.free, situation.holders, situation.requests, rng)
    for place, (claim, planned) in enumerate(zip(situation.requests, starts, strict=True), 1):
        found[claim.run_id] = _both(quantile(planned, 0.5), place, rate)
    return found


def _both(view_s: float, place: int, rate: float) -> float:
    """The geometric mean of a view and of the pace; the view alone where the pace is not known."""
    return math.sqrt((view_s + 1) * (place / rate + 1)) - 1 if rate > 0 else view_s


def _reorders(policy: Policy) -> bool:
    """Whether the order of those that wait changes as time goes by."""
    return any(name not in ("priority", "submitted") for name in policy.order.by)


def _in_line(cluster: Cluster, policy: Policy, now: datetime) -> list[Run]:
    """Those that wait, in order; as if all teams had had their share."""
    waiting = [cluster.runs[run_id] for run_id in cluster.queued]
    return sorted(waiting, key=lambda run: queue.key_of(cluster, run, now, policy))


def _by_others(cluster: Cluster, policy: Policy, now: datetime) -> dict[str, float]:
    """By the waits, and the pace, of those of the same size that have had about as much."""
    largest = _largest(cluster)
    waiting = [run for run in _in_line(cluster, policy, now) if _fits(run, largest) and run.cancel_reason is None]
    so_far_s = [max((now - run.queued_at).total_seconds(), 0.0) for run in waiting]
    stays = [wait_kind_of(run.spec.slots.min, run.served_slot_s) for run in waiting]
    beside = RunningTimes(now)
    for stay, waited_s in zip(stays, so_far_s, strict=True):
        beside.add(stay, waited_s)
    known: dict[WaitKind, tuple[Distribution, float]] = {}
    places: Counter[WaitKind] = Counter()
    found: dict[str, float] = {}
    for run, stay, waited_s in zip(waiting, stays, so_far_s, strict=True):
        if stay not in known:
            rate = cluster.waits.rate_per_s(now, PACE_S, PACE_OF, stay.keys[0])
            known[stay] = (cluster.waits.predict_beside(stay, WAITS, beside), rate)
        places[stay] += 1
        waits, rate = known[stay]
        found[run.run_id] = _both(waits.quantile(0.5, waited_s) - waited_s, places[stay], rate)
    return found


def _largest(cluster: Cluster) -> dict[str, int]:
    """Thousandths of slots of each kind of accelerator that there are."""
    found: dict[str, int] = {}
    for node in cluster.nodes.values():
        if node.is_schedulable:
            found[node.accelerator] = found.get(node.accelerator, 0) + node.slots * SLOT_MILLI
    return found


def _fits(run: Run, largest: dict[str, int]) -> bool:
    """Whether it could ever run on these nodes."""
    kinds = run.slot_spec.accelerators
    milli = run.spec.slots.min * run.slot_spec.milli
    return any(milli <= most for kind, most in largest.items() if not kinds or kind in kinds)


def _key(run: Run) -> str:
    return f"{run.run_id}/{run.next_generation}"


def _as_times(spread: Spread, now: datetime) -> Estimate:
    return Estimate(*(now + timedelta(seconds=min(each, 1e9)) for each in spread))
