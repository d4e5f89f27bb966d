"""How many nodes of each pool are wanted: every node that has something on it or that a waiting run could use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from contracts.scheduling import Policy, Pool, Pools
from contracts.spec.run import RunSpec
from services.scheduler.core.place.pools import Preferences, capacity_of, checkpoint_interval_s, in_order
from services.scheduler.core.state.pool_demand import PoolDemand
from services.scheduler.core.state.slot_request import SLOT_MILLI, SlotRequest, slot_request_of

#: Waiting runs that are looked at; those behind them want nodes once these have theirs.
DEPTH = 2000
#: Of those that want a pool's nodes, so many are named.
LISTED = 20


@dataclass(frozen=True, slots=True)
class Present:
    """A node on which something may be placed."""

    node_id: str
    labels: Mapping[str, str]
    accelerator: str
    #: What is left of each slot, in thousandths.
    left: tuple[int, ...]
    #: Since when nothing has been on it; None: something is.
    idle_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A run that waits for nothing but slots."""

    run_id: str
    spec: RunSpec
    work_s: float | None = None


@dataclass(frozen=True, slots=True)
class WantCapacity:
    """So many nodes of the pool are wanted from now on."""

    pool: str
    nodes: int
    run_ids: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    timed_out: bool = False
    reason: str = ""


def wanted(
    policy: Policy,
    present: Sequence[Present],
    waiting: Iterable[Waiting],
    said: Mapping[str, PoolDemand],
    now: datetime,
) -> list[WantCapacity]:
    """What is to be said of each pool of which something else was said before.

    Wanted is every node that has something on it or that a waiting run could use, with the cheapest of what suits that
    run, and what is idle but not for long. Runs go in the order given; one that cannot be placed whole wants nothing.

    Args:
        present: the nodes on which something may be placed; those of no pool too.
        waiting: the runs that wait for slots, and for nothing else, the first in order first.
    """
    if not policy.pools.pools:
        return []
    given_up = {pool.name for pool in policy.pools.pools if _late(policy.pools, pool, present, said, now)}
    stock = _Stock.of(policy, present, said, given_up, now)
    for number, run in enumerate(waiting):
        if number == DEPTH:
            break
        stock.serve(run)
    found = (_want(pool, stock, present, pool.name in given_up, now) for pool in policy.pools.pools)
    return [want for want in found if want.timed_out or _what(said.get(want.pool)) != (want.nodes, want.spare)]


def wake_at(
    policy: Policy, present: Iterable[Present], said: Mapping[str, PoolDemand], now: datetime
) -> datetime | None:
    """When the clock alone may change what is wanted; None: not before something happens."""
    pools = policy.pools
    names = {pool.name for pool in pools.pools}
    times = [
        each.idle_since + timedelta(seconds=pools.idle_s)
        for each in present
        if each.idle_since is not None and each.labels.get("pool") in names
    ]
    for name in names & said.keys():
        times.append(said[name].since + timedelta(seconds=pools.patience_s))
        if (gave_up_at := said[name].gave_up_at) is not None:
            times.append(gave_up_at + timedelta(seconds=pools.retry_s))
    return min((time for time in times if time > now), default=None)


def _what(said: PoolDemand | None) -> tuple[int, tuple[str, ...]]:
    return (said.nodes, said.spare) if said is not None else (0, ())


def _late(pools: Pools, pool: Pool, present: Sequence[Present], said: Mapping[str, PoolDemand], now: datetime) -> bool:
    """Whether wanted nodes of the pool have not come although there was time."""
    known = said.get(pool.name)
    if known is None or now - known.since < timedelta(seconds=pools.patience_s):
        return False
    return sum(each.labels.get("pool") == pool.name for each in present) < known.nodes


def _want(pool: Pool, stock: _Stock, present: Sequence[Present], timed_out: bool, now: datetime) -> WantCapacity:
    own = [each for each in present if each.labels.get("pool") == pool.name]
    idle_before = now - timedelta(seconds=stock.policy.pools.idle_s)
    spare = tuple(
        sorted(
            each.node_id
            for each in own
            if each.idle_since is not None and each.idle_since <= idle_before and each.node_id not in stock.claimed
        )
    )
    run_ids = tuple(stock.wanting.get(pool.name, ()))
    new = stock.count.get(pool.name, 0)
    nodes = min(len(own) - len(spare) + new, pool.max_nodes)
    return WantCapacity(
        pool.name, nodes, run_ids[:LISTED], spare, timed_out, _reason(pool, len(own), new, run_ids, timed_out)
    )


def _reason(pool: Pool, there: int, new: int, run_ids: Sequence[str], timed_out: bool) -> str:
    if timed_out:
        return f"nodes of pool {pool.name} that were wanted did not come in time: it is left alone for a while"
    if new:
        runs = f"{len(run_ids)} run{'s' if len(run_ids) > 1 else ''}"
        return f"{runs} could use {new} more of pool {pool.name}, which has {there}"
    return f"what is left of pool {pool.name} is in use, or has not been idle for long"


@dataclass(slots=True)
class _Room:
    """What is left of one node, there or wanted."""

    left: list[int]
    node_id: str = ""

    def take(self, demand: SlotRequest, bundles: int) -> list[int] | None:
        """Take slots for up to so many bundles; the slots taken, or None where there is no room for one."""
        need, size = demand.milli, demand.bundle
        if need == 0:  # no accelerator: any node will do
            return []
        fitting = [slot for slot, left in enumerate(self.left) if left >= need]
        given = min(len(fitting) // size, 1 if demand.apart else bundles)
        if given == 0:
            return None
        # The fullest slots that have room, so that whole ones stay whole.
        taken = sorted(fitting, key=lambda slot: (self.left[slot], slot))[: given * size]
        for slot in taken:
            self.left[slot] -= need
        return taken


#: Pool, kind of capacity, cluster and accelerator: nodes that are alike in these are alike to any run.
_Kind = tuple[str, str, str, str]


@dataclass(slots=True)
class _Stock:
    """The room that there is, and that there could be."""

    policy: Policy
    there: dict[_Kind, list[_Room]] = field(default_factory=dict)
    #: Pool -> how many nodes of it may be wanted besides; the room that is left on those that are; how many those
    #: are; the runs that want them.
    more: dict[str, int] = field(default_factory=dict)
    new: dict[str, list[_Room]] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    wanting: dict[str, list[str]] = field(default_factory=dict)
    #: Nodes whose room has been given to somebody.
    claimed: set[str] = field(default_factory=set)
    #: What found no room. There is never more of it later on, so that its like need not look again.
    refused: set[tuple[object, ...]] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        policy: Policy,
        present: Iterable[Present],
        said: Mapping[str, PoolDemand],
        given_up: set[str],
        now: datetime,
    ) -> _Stock:
        stock = cls(policy)
        counts: dict[str, int] = {}
        for each in present:
            labels = each.labels
            name = labels.get("pool", "")
            counts[name] = counts.get(name, 0) + 1
            kind = (name, capacity_of(labels), labels.get("cluster", ""), each.accelerator)
            stock.there.setdefault(kind, []).append(_Room(list(each.left), each.node_id))
        retried_before = now - timedelta(seconds=policy.pools.retry_s)
        for pool in policy.pools.pools:
            known = said.get(pool.name)
            resting = known is not None and known.gave_up_at is not None and known.gave_up_at > retried_before
            free = 0 if resting or pool.name in given_up else pool.max_nodes - counts.get(pool.name, 0)
            stock.more[pool.name] = max(free, 0)
        return stock

    def serve(self, run: Waiting) -> None:
        """Find room for all of the run: on nodes that are there, else with new ones of one pool, else of several."""
        spec = run.spec
        like = (spec.slots.min, spec.resources, spec.gang, spec.scheduling, checkpoint_interval_s(spec), _exact(spec))
        if like in self.refused:
            return
        ordered = in_order(spec, self.policy, run.work_s)
        there = self._suitable(run)
        if self._fill(run, [room for _, rooms in there for room in rooms], ()):
            return
        # One that must stay on machines of one kind stays in one pool; nobody lies across clusters.
        together: list[tuple[Pool, ...]] = [(pool,) for pool in ordered]
        if not _exact(spec):
            clusters = dict.fromkeys(pool.cluster for pool in ordered)
            together += [tuple(pool for pool in ordered if pool.cluster == cluster) for cluster in clusters]
        for pools in together:
            near = [
                room
                for kind, rooms in there
                for room in rooms
                if (kind[0] == pools[0].name if _exact(spec) else kind[2] == (pools[0].cluster or ""))
            ]
            if self._fill(run, near, pools):
                return
        self.refused.add(like)

    def _suitable(self, run: Waiting) -> list[tuple[_Kind, list[_Room]]]:
        """What is there and suits the run, its first choice first."""
        spec, resources = run.spec, run.spec.resources
        preferences = Preferences.of(spec, self.policy, run.work_s)
        found = []
        for kind, rooms in self.there.items():
            name, capacity, cluster, accelerator = kind
            number = preferences.number({"pool": name, "capacity": capacity})
            right = resources.share == 0 or not resources.accelerators or accelerator in resources.accelerators
            if number is not None and right and (not spec.scheduling.clusters or cluster in spec.scheduling.clusters):
                found.append((number, kind, rooms))
        return [(kind, rooms) for _, kind, rooms in sorted(found, key=lambda each: each[:2])]

    def _fill(self, run: Waiting, there: Sequence[_Room], pools: Sequence[Pool]) -> bool:
        """Put all of the run into this room and into nodes of these pools, or nothing of it."""
        demand = slot_request_of(run.spec)
        need, missing = demand.milli, run.spec.slots.min // demand.bundle
        given: list[tuple[str, bool, _Room, list[int]]] = []
        for name, fresh, room in self._rooms(there, pools):
            taken = room.take(demand, missing)
            if taken is None:
                continue
            given.append((name, fresh, room, taken))
            missing -= len(taken) // demand.bundle if need else 1 if demand.apart else missing
            if missing <= 0:
                self._give(run, given)
                return True
        for _, _, room, taken in given:
            for slot in taken:
                room.left[slot] += need
        return False

    def _rooms(self, there: Sequence[_Room], pools: Sequence[Pool]) -> Iterator[tuple[str, bool, _Room]]:
        """(pool, whether it would be wanted anew, room); the pool is '' for what is there."""
        yield from (("", False, room) for room in there)
        for pool in pools:
            yield from ((pool.name, False, room) for room in self.new.get(pool.name, ()))
        for pool in pools:
            yield from (
                (pool.name, True, _Room([SLOT_MILLI] * pool.slots_per_node)) for _ in range(self.more[pool.name])
            )

    def _give(self, run: Waiting, given: Sequence[tuple[str, bool, _Room, list[int]]]) -> None:
        self.claimed.update(room.node_id for _, _, room, _ in given if room.node_id)
        for name, fresh, room, _ in given:
            if fresh:
                self.more[name] -= 1
                self.count[name] = self.count.get(name, 0) + 1
                self.new.setdefault(name, []).append(room)
        for name in sorted({name for name, *_ in given if name}):
            self.wanting.setdefault(name, []).append(run.run_id)
        full = {id(room) for _, _, room, _ in given if not any(room.left)}
        if full:  # nobody need look there again
            for rooms in (*self.there.values(), *self.new.values()):
                rooms[:] = [room for room in rooms if id(room) not in full]


def _exact(spec: RunSpec) -> bool:
    """Whether it matters to the run that its nodes are alike."""
    training = spec.training
    return training is not None and training.logical_ranks is not None and training.heterogeneous_nodes == "avoid"
