"""Which pool a run should have its slots of, and what that costs.

A pool has nodes of one kind, on demand or spot. Spot nodes cost less an hour and are taken away now and then: what
counts is what a run costs there to its end, with the work that is lost and done again. A policy without pools
prefers the nodes of the run's own kind of capacity alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from contracts.scheduling import Policy, Pool, Pools
from contracts.spec.run import RunSpec

Capacity = Literal["on-demand", "spot"]

#: Seconds between checkpoints that are assumed of a run that finds its interval out by itself.
AUTO_INTERVAL_S = 600.0
#: The rank of a pool whose nodes the run must not have.
NEVER = -1
#: Expected interruptions between two checkpoints beyond which a run makes no progress.
HOPELESS = 50.0


# -- what a run costs -----------------------------------------------------------------------------


def expected_time_s(pool: Pool, slots: int, work_s: float, checkpoint_interval_s: float, restart_s: float) -> float:
    """How long a run of ``work_s`` has slots of the pool until it is done, on average.

    Interruptions come at random, each node's at the pool's rate, and one ends the whole gang. All work since
    the last checkpoint is done again, after ``restart_s``, and either may be interrupted in turn (the complete model
    of J. T. Daly, 2006). Infinite where the run would hardly ever get from one checkpoint to the next.
    """
    per_s = pool.interruptions_per_hour * -(-slots // pool.slots_per_node) / 3600
    if per_s == 0 or work_s == 0:
        return work_s
    segment_s = min(checkpoint_interval_s, work_s)
    if per_s * (segment_s + restart_s) > HOPELESS:
        return math.inf
    return work_s / segment_s * math.exp(per_s * restart_s) * math.expm1(per_s * segment_s) / per_s


def expected_cost(pool: Pool, slots: int, work_s: float, checkpoint_interval_s: float, restart_s: float) -> float:
    """Return the cost of a run of ``work_s`` on these slots of the pool to its end, in the currency of the prices."""
    if pool.price_per_slot_hour == 0:
        return 0.0
    time_s = expected_time_s(pool, slots, work_s, checkpoint_interval_s, restart_s)
    return pool.price_per_slot_hour * slots * time_s / 3600


def checkpoint_interval_s(spec: RunSpec) -> float:
    """Seconds of work that a run loses at most when its nodes are taken away; infinite if it has no checkpoints."""
    if spec.training is None or spec.kind != "train":
        return math.inf
    every_s = spec.training.checkpoint_every_s
    return AUTO_INTERVAL_S if every_s == "auto" else every_s


# -- which pool a run should have -----------------------------------------------------------------


def kinds(spec: RunSpec, pools: Pools) -> tuple[Capacity, ...]:
    """The kinds of capacity that will do for a run; in the order of its tier, if it has one."""
    return kinds_of(spec.scheduling.capacity, spec.scheduling.tier or "", pools)


def kinds_of(capacity: str, tier: str, pools: Pools) -> tuple[Capacity, ...]:
    """The same, of a run that asks for this capacity and has this tier."""
    if capacity != "any":
        return ("spot",) if capacity == "spot" else ("on-demand",)
    return pools.tiers.get(tier, ("on-demand", "spot"))


def capacity_of(labels: Mapping[str, str]) -> Capacity:
    """Whether a node with these labels may be taken away at any time."""
    return "spot" if labels.get("capacity") == "spot" else "on-demand"


def in_order(spec: RunSpec, policy: Policy, work_s: float | None = None) -> list[Pool]:
    """The pools whose nodes suit a run, its first choice first.

    That is the order of its tier, and within one kind the least expected cost. Spot whose expected cost
    is not below that of on-demand comes after it for every tier. A run without a tier goes by the cost alone, unless
    it must not be preempted.
    """
    return [pool for pool in _permitted(spec, policy, work_s) if _suits(spec, pool)]


def _suits(spec: RunSpec, pool: Pool) -> bool:
    """Whether a run can use nodes as the pool has them."""
    resources = spec.resources
    accelerator = resources.share == 0 or not resources.accelerators or pool.accelerator in resources.accelerators
    profile = resources.mig_profile is None or resources.mig_profile in pool.slot_profiles
    return accelerator and profile and spec.gang.bundle <= pool.slots_per_node


def _permitted(spec: RunSpec, policy: Policy, work_s: float | None) -> list[Pool]:
    pools, clusters = policy.pools, spec.scheduling.clusters
    positions = _positions(spec, pools)
    found = [pool for pool in pools.pools if pool.capacity in positions and (not clusters or pool.cluster in clusters)]
    if len(found) < 2:
        return found
    work_s = policy.predict.prior_s if work_s is None else work_s
    given = (spec.slots.min, work_s, checkpoint_interval_s(spec), pools.restart_s)
    cost = {pool.name: expected_cost(pool, *given) for pool in found}
    time_s = {pool.name: expected_time_s(pool, *given) for pool in found}
    safe = min((cost[pool.name] for pool in found if pool.capacity == "on-demand"), default=math.inf)

    def key(pool: Pool) -> tuple[int, float, float, str]:
        # Where nothing has a price, what takes longer to its end is the worse choice.
        worth_it = pool.capacity == "on-demand" or (cost[pool.name] < safe if safe else time_s[pool.name] == work_s)
        return positions[pool.capacity] if worth_it else len(positions), cost[pool.name], time_s[pool.name], pool.name

    return sorted(found, key=key)


def _positions(spec: RunSpec, pools: Pools) -> dict[Capacity, int]:
    """Kind of capacity -> its place in the run's order; the same for all where the cost decides."""
    scheduling = spec.scheduling
    by_cost = scheduling.tier not in pools.tiers and scheduling.preemptible
    return {kind: 0 if by_cost else number for number, kind in enumerate(kinds(spec, pools))}


@dataclass(frozen=True, slots=True)
class Preferences:
    """One run's order of the nodes that there are: made once for a run, then asked of every node."""

    by_pool: Mapping[str, int]
    by_capacity: Mapping[Capacity, int]

    @classmethod
    def of(cls, spec: RunSpec, policy: Policy, work_s: float | None = None) -> Preferences:
        """The preferences of a run that is expected to have ``work_s`` of work before it."""
        by_capacity: dict[Capacity, int] = {}
        by_pool = {pool.name: NEVER for pool in policy.pools.pools}
        number = 0
        for pool in _permitted(spec, policy, work_s):
            # Nodes of no pool are paid for already: those of a kind come before the pools of that kind.
            if pool.capacity not in by_capacity:
                by_capacity[pool.capacity], number = number, number + 1
            by_pool[pool.name], number = number, number + 1
        for kind in kinds(spec, policy.pools):
            if kind not in by_capacity:
                by_capacity[kind], number = number, number + 1
        return cls(by_pool, by_capacity)

    def number(self, labels: Mapping[str, str]) -> int | None:
        """Smaller is better; None: the run must not have a node with these labels."""
        known = self.by_pool.get(labels.get("pool", ""))
        if known is None:
            return self.by_capacity.get(capacity_of(labels))
        return None if known == NEVER else known


def allowed(labels: Mapping[str, str], spec: RunSpec, policy: Policy) -> bool:
    """Whether a run may have a node with these labels, by cluster and kind of capacity."""
    clusters = spec.scheduling.clusters
    if clusters and labels.get("cluster") not in clusters:
        return False
    return Preferences.of(spec, policy).number(labels) is not None
