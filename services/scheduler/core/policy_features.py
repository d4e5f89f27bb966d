"""Which features of a policy interact: what a cycle may leave out, and the features with which it may not.

A cycle leaves out what cannot change its decisions: it looks at no allocated run where none can be preempted, and does
not try a request again that did not fit. Each such shortcut is right as long as certain features are off.
``SHORTCUTS`` is the one place that says which; all steps ask ``PolicyFeatures.allows``. What depends on the state of
the cluster alone (runs that are stopping, machines that differ) stands where the shortcut is taken.
``tests/scheduler/test_policy_features.py`` compares decisions with and without each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from contracts.scheduling import OrderKey, Policy

#: Keys that change while a run has its slots.
BY_SERVICE: frozenset[OrderKey] = frozenset({"least-attained", "even-wait"})


class Feature(StrEnum):
    """What a policy may ask for that changes what another part of the cycle may assume."""

    #: Limits on what teams, users and runs have; those that lend idle slots, and those in slot-hours.
    QUOTAS = "quotas"
    LENDING = "lending"
    SLOT_HOURS = "slot-hours"
    FAIR_SHARE = "fair-share"
    #: Runs that overtook one that did not fit release their slots again.
    OVERTAKERS = "overtakers"
    #: Runs that ask for it take turns; and a run that asks, whether the policy gives turns or not.
    TURNS = "turns"
    ASKS_TURNS = "asks-turns"
    PREEMPTION_BY_PRIORITY = "preemption-by-priority"
    PREEMPTION_BY_OTHER_KEYS = "preemption-by-other-keys"
    #: It is not known until when the key of a run that has slots stays.
    UNSTABLE_KEYS = "unstable-keys"
    #: Least attained service has a wait limit.
    WAIT_LIMIT = "wait-limit"
    #: No run overtakes one that does not fit.
    STRICT_ORDER = "strict-order"
    BACKFILL = "backfill"
    #: Backfill, in a cycle in which a run may get a reservation.
    RESERVATIONS = "reservations"
    #: Maintenance that is not over.
    MAINTENANCE = "maintenance"
    #: Nodes are chosen otherwise than by ``pack``.
    OTHER_STRATEGY = "other-strategy"
    SCARCE = "scarce"
    POOLS = "pools"


class Shortcut(StrEnum):
    """What a cycle leaves out where that changes no decision."""

    #: Look for no victims at all: no rule lets any run preempt another.
    NO_VICTIMS = "no-victims"
    #: Look for no victims where no priority that waits is above one that has slots.
    PRIORITY_ALONE = "priority-alone"
    #: Try no rule on an allocated run whose leading keys are not behind those of the run that waits.
    ORDER_ALONE = "order-alone"
    #: Whom a run may preempt follows from its leading keys; or from all its keys but the last.
    LEADING_KEYS = "leading-keys"
    ALL_KEYS = "all-keys"
    #: Which slots a run may have follows from its request, so that what fails for one fails for another.
    SAME_SLOTS = "same-slots"
    #: Ask neither quotas nor shares who may preempt whom.
    NO_RIGHTS = "no-rights"
    #: Go through the queue once, not first through the runs that borrow nothing.
    ONE_PASS = "one-pass"
    #: Remember the keys of allocated runs from cycle to cycle; and the searches for victims that failed.
    KEY_MEMORY = "key-memory"
    SEARCH_MEMORY = "search-memory"
    #: Do not try what did not fit in what is free; nor examine a run with such a request; nor try it in what will be.
    MISFITS = "misfits"
    PASSED_OVER = "passed-over"
    FUTURE_MISFITS = "future-misfits"
    #: Find slots by the number of whole ones, without a look at every node.
    WHOLE_SLOTS = "whole-slots"


#: A shortcut -> the features that rule it out, and why each does.
SHORTCUTS: dict[Shortcut, dict[Feature, str]] = {
    Shortcut.NO_VICTIMS: {
        Feature.PREEMPTION_BY_PRIORITY: "a run of lower priority may have to go",
        Feature.PREEMPTION_BY_OTHER_KEYS: "so may one that stands behind by another key",
        Feature.TURNS: "one whose turn is over may have to go",
        Feature.QUOTAS: "a team takes back what others have borrowed",
        Feature.FAIR_SHARE: "a team that is below its share takes from one that is above",
        Feature.OVERTAKERS: "those that went ahead may have to go",
    },
    Shortcut.PRIORITY_ALONE: {
        Feature.PREEMPTION_BY_OTHER_KEYS: "of runs of one priority the one may preempt the other",
        Feature.TURNS: "turns are taken within one priority",
        Feature.QUOTAS: "what is owed is taken from any priority",
        Feature.FAIR_SHARE: "shares are balanced within one priority",
        Feature.OVERTAKERS: "a run that went ahead goes, of any priority",
    },
    Shortcut.ORDER_ALONE: {
        Feature.TURNS: "turns are taken by runs that stand equal",
        Feature.QUOTAS: "what is owed is taken from any run",
        Feature.FAIR_SHARE: "the share stands as 0 in a key",
        Feature.OVERTAKERS: "who went ahead goes by when it got its slots",
    },
    Shortcut.LEADING_KEYS: {
        Feature.ASKS_TURNS: "it takes turns with runs that are equal in all keys",
        Feature.FAIR_SHARE: "keys before the share say whether shares decide",
        Feature.OVERTAKERS: "who went ahead of it depends on when it was queued",
    },
    Shortcut.ALL_KEYS: {
        Feature.OVERTAKERS: "who went ahead of it depends on when it was queued",
    },
    Shortcut.SAME_SLOTS: {
        Feature.RESERVATIONS: "what is kept for others depends on how long the run takes",
        Feature.MAINTENANCE: "so does which nodes it may have",
    },
    Shortcut.NO_RIGHTS: {
        Feature.QUOTAS: "they allow or forbid before any other rule",
        Feature.FAIR_SHARE: "between two teams shares decide, not the keys behind them",
    },
    Shortcut.ONE_PASS: {
        Feature.LENDING: "runs within their quota go before those that borrow",
    },
    Shortcut.KEY_MEMORY: {
        Feature.UNSTABLE_KEYS: "turns are taken by runs whose keys are equal now",
    },
    Shortcut.SEARCH_MEMORY: {
        Feature.QUOTAS: "what a team is owed changes with the use of others",
        Feature.FAIR_SHARE: "shares change with the clock",
        Feature.OVERTAKERS: "who went ahead is another question for each run",
        Feature.RESERVATIONS: "what is kept for others changes with the clock",
        Feature.MAINTENANCE: "which nodes a run may have changes with the clock",
        Feature.UNSTABLE_KEYS: "who stands equal changes with the clock",
    },
    Shortcut.MISFITS: {
        Feature.RESERVATIONS: "what is kept for others depends on how long the run takes",
        Feature.MAINTENANCE: "so does which nodes it may have",
    },
    Shortcut.PASSED_OVER: {
        Feature.STRICT_ORDER: "a run that does not fit closes the nodes that it waits for",
        Feature.QUOTAS: "a run may wait for its limit and not for slots",
        Feature.RESERVATIONS: "a run that does not fit may get a reservation",
        Feature.MAINTENANCE: "which nodes it may have depends on how long the run takes",
    },
    Shortcut.FUTURE_MISFITS: {
        Feature.STRICT_ORDER: "a run that does not fit closes the nodes that it waits for",
        Feature.QUOTAS: "which nodes it may have depends on its team",
        Feature.RESERVATIONS: "what is kept for others depends on how long the run takes",
        Feature.MAINTENANCE: "which nodes it may have depends on how long the run takes",
    },
    Shortcut.WHOLE_SLOTS: {
        Feature.OTHER_STRATEGY: "it needs a look at every node",
        Feature.SCARCE: "nodes of a scarce kind come last",
        Feature.POOLS: "a run has an order of pools",
        Feature.MAINTENANCE: "a run may not have every node",
    },
}
#: The features with which no run is left over for the next cycle: a limit on its work, and no shortcut.
NEVER_LEFT_OVER: dict[Feature, str] = {
    Feature.STRICT_ORDER: "nodes that are closed limit the work",
    Feature.RESERVATIONS: "the depth of backfill limits the work",
}


def _is_limited(policy: Policy) -> bool:
    admit = policy.admit
    return bool(admit.quotas) or admit.max_slots_per_user is not None or admit.max_slots_per_run is not None


def has_wait_limit(policy: Policy) -> bool:
    """Whether least attained service has a wait limit."""
    return "least-attained" in policy.order.by and policy.order.attained.lift_after_s is not None


#: A feature -> whether the policy has it. Others depend on a run, or on what has happened.
BY_POLICY: Mapping[Feature, Callable[[Policy], bool]] = {
    Feature.QUOTAS: _is_limited,
    Feature.LENDING: lambda policy: any(quota.slots is not None for quota in policy.admit.quotas),
    Feature.SLOT_HOURS: lambda policy: any(quota.slot_hours is not None for quota in policy.admit.quotas),
    Feature.FAIR_SHARE: lambda policy: "fair-share" in policy.order.by,
    Feature.OVERTAKERS: lambda policy: policy.preemption.overtakers,
    Feature.TURNS: lambda policy: policy.preemption.time_slice_s is not None,
    Feature.PREEMPTION_BY_PRIORITY: lambda policy: "priority" in preemption_keys(policy),
    Feature.PREEMPTION_BY_OTHER_KEYS: lambda policy: bool(preemption_keys(policy) - {"priority"}),
    Feature.UNSTABLE_KEYS: lambda policy: has_service_keys(policy) and policy.preemption.time_slice_s is not None,
    Feature.WAIT_LIMIT: has_wait_limit,
    Feature.STRICT_ORDER: lambda policy: not policy.order.skip,
    Feature.BACKFILL: lambda policy: policy.reserve.backfill != "none",
    Feature.OTHER_STRATEGY: lambda policy: policy.place.by != "pack",
    Feature.SCARCE: lambda policy: bool(policy.place.scarce),
    Feature.POOLS: lambda policy: bool(policy.pools.pools or policy.pools.tiers),
}


def has_service_keys(policy: Policy) -> bool:
    """Whether the order has keys that change while a run has its slots."""
    return not BY_SERVICE.isdisjoint(policy.order.by)


def preemption_keys(policy: Policy) -> set[OrderKey]:
    """Return the keys of the order by which runs preempt others."""
    return set(policy.preemption.by) & set(policy.order.by)


@dataclass(frozen=True, slots=True)
class PolicyFeatures:
    """The features that are on in one cycle, computed once."""

    on: frozenset[Feature]

    @classmethod
    def of(cls, policy: Policy, now: datetime) -> PolicyFeatures:
        """Return what is on at this time, before it is known whether there are reservations."""
        on = {feature for feature, is_on in BY_POLICY.items() if is_on(policy)}
        if policy.maintenance and policy.covers(now):
            on.add(Feature.MAINTENANCE)
        return cls(frozenset(on))

    def has(self, feature: Feature) -> bool:
        """Whether the feature is on."""
        return feature in self.on

    def allows(self, shortcut: Shortcut) -> bool:
        """Whether the shortcut changes no decision."""
        return self.on.isdisjoint(SHORTCUTS[shortcut])

    @property
    def may_leave_over(self) -> bool:
        """Whether a cycle that has done enough leaves the other runs to the next one."""
        return self.on.isdisjoint(NEVER_LEFT_OVER)

    def with_reservations(self) -> PolicyFeatures:
        """Return the features of a cycle in which a run may get a reservation."""
        return PolicyFeatures(self.on | {Feature.RESERVATIONS})

    def for_run(self, *, asks_turns: bool) -> PolicyFeatures:
        """Return the features as they are for a waiting run: one that asks for no turns has none."""
        return PolicyFeatures(self.on | {Feature.ASKS_TURNS} if asks_turns else self.on - {Feature.TURNS})
