"""The scheduler's policy as configuration: one file that a team composes, and every decision names by its digest.

A field that is left out has its default. ``services/scheduler/core`` implements each part; docs/scheduler.md shows it.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AliasChoices, AwareDatetime, Field, model_validator

from contracts.base import check_time
from contracts.grace import NOTICE_MARGIN_S
from contracts.spec.base import SpecPart

#: What a queue can be ordered by. Runs that are equal in all of them go in the order of submission.
OrderKey = Literal[
    "priority",
    "fair-share",
    "deadline",
    "least-attained",
    "shortest-predicted",
    "even-wait",
    "submitted",
]
#: What ``preemption`` was called once: files, settings and requests may still name it so.
EARLIER_PREEMPTION = "reclaim"


def rename_setting(setting: str) -> str:
    """Return a setting, as ``order.skip=true``, with the present name of its section."""
    return re.sub(rf"^\s*{EARLIER_PREEMPTION}(?=[.\s=])", "preemption", setting)


class LeastAttained(SpecPart):
    """Least attained service in discrete levels over slot-seconds (two-dimensional LAS, Tiresias, NSDI'19)."""

    #: Slot-seconds at which a run goes down one level.
    levels_slot_s: tuple[float, ...] = (3_600.0, 36_000.0, 360_000.0)
    #: The wait limit: the longest wait that strict order of submission would give of late in the run's pool and
    #: priority, and at least this. From ``even_wait.from_part`` of it on, what a run has attained counts less; at the
    #: limit the run goes above all levels but the first ``above_lifted``. None: no limit.
    lift_after_s: float | None = Field(None, gt=0)
    above_lifted: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _check_levels_ascend(self) -> Self:
        if list(self.levels_slot_s) != sorted(set(self.levels_slot_s)):
            raise ValueError("order.attained.levels_slot_s must ascend")
        return self


class EvenWait(SpecPart):
    """Short runs first, but the more of the longest wait a run has had, the less its length counts."""

    #: Slot-seconds below which lengths make no difference.
    short_slot_s: float = Field(3_600.0, gt=0)
    #: Slots are only taken from a run that counts for more than this many times the one that waits.
    advantage: float = Field(4.0, ge=1)
    #: What any run may wait beyond the longest that those that have slots had to.
    margin_s: float = Field(2_700.0, gt=0)
    #: From this part of the longest wait on, a run's length counts less.
    from_part: float = Field(0.5, ge=0, lt=1)
    #: Whether a run counts with what it is expected to take, and not only with what it has had.
    foresee: bool = True


class Order(SpecPart):
    """Who goes first."""

    by: tuple[OrderKey, ...] = ("priority",)
    #: Whether a run that fits may overtake one that does not.
    skip: bool = False
    attained: LeastAttained = LeastAttained.defaults()
    even_wait: EvenWait = EvenWait.defaults()


class Quota(SpecPart):
    """What a team is owed, and at most has."""

    #: A path; what parts of a team use counts for the whole.
    team: str
    #: Kind of accelerator; None: all of them together.
    accelerator: str | None = None
    #: Slots that the team reclaims from borrowers.
    slots: int | None = Field(None, ge=0)
    #: Slots that it may have at most, borrowed ones included; None: all idle slots.
    ceiling: int | None = Field(None, ge=0)
    #: Slot-hours in each period.
    slot_hours: float | None = Field(None, gt=0)
    period_h: float = Field(24 * 7, gt=0)


class Admit(SpecPart):
    """What each user and team may have at once."""

    quotas: tuple[Quota, ...] = ()
    max_slots_per_user: int | None = Field(None, ge=1)
    max_slots_per_run: int | None = Field(None, ge=1)


class FairShare(SpecPart):
    """Shares of teams by weight, over their use in the past."""

    #: Team (a path) -> weight among its siblings; 1 by default.
    weights: dict[str, float] = Field(default_factory=dict)
    #: Use counts half after so long.
    half_life_s: float = Field(7 * 86_400.0, gt=0)

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if bad := [team for team, weight in self.weights.items() if weight <= 0]:
            raise ValueError(f"fair_share.weights must be above 0: {', '.join(bad)}")
        return self


class Place(SpecPart):
    """Which nodes a gang gets."""

    #: ``pack`` fills the fullest node that fits, ``spread`` the emptiest, ``balanced`` fills nodes to half and then
    #: goes on; ``fgd`` takes those whose fragmentation grows least (ATC'23).
    by: Literal["pack", "spread", "balanced", "fgd"] = "pack"
    #: Kinds of accelerators that runs which did not ask for them only get when all others are full.
    scarce: tuple[str, ...] = ()
    #: How long a new script waits, without slots, until the files of its data are on the nodes that it will probably
    #: get; 0: they are copied once it has its slots.
    staging_limit_s: float = Field(600.0, ge=0)


class Reserve(SpecPart):
    """Whether runs that fit may go ahead of one that waits for many slots, without holding it up."""

    backfill: Literal["none", "easy", "conservative"] = "none"
    #: Only runs of at least this many slots get a reservation; others that do not fit are skipped.
    from_slots: int = Field(1, ge=1)
    #: How far down the queue backfill looks.
    depth: int = Field(1000, ge=1)
    #: How many runs get a reservation in conservative backfill.
    reservations: int = Field(32, ge=1)
    #: What a run without ``limit_s`` is expected to take at most: this quantile of its prediction.
    quantile: float = Field(0.9, gt=0, lt=1)
    #: Runs of at least this many slots are promised a start, once it follows from the limits of the allocated runs.
    promise_slots: int | None = Field(None, ge=1)


class Maintenance(SpecPart):
    """Nodes that must be empty for a while: nothing starts there that might not be done by then.

    It is bound to ids or labels, and to the policy: no restart of an agent ends it.
    """

    start: Annotated[AwareDatetime, AfterValidator(check_time)]
    end: Annotated[AwareDatetime, AfterValidator(check_time)]
    node_ids: tuple[str, ...] = ()
    #: Or nodes with all of these labels.
    labels: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_end_after_start(self) -> Self:
        if self.end <= self.start:
            raise ValueError("maintenance.end must be after maintenance.start")
        return self


class Preemption(SpecPart):
    """For whom slots are taken from runs that have them."""

    #: A run may take slots of another if the first key of ``order.by`` in which they differ is one of these.
    by: tuple[OrderKey, ...] = ("priority",)
    #: Whether runs that overtook one that did not fit release their slots again, as soon as it fits with them. So
    #: slots are never idle for the sake of a large gang, and it waits no longer than without overtakers.
    overtakers: bool = False
    #: No slots are taken from a run that has had them for less time than this.
    min_run_s: float = Field(0.0, ge=0)
    #: The same for slots that are taken by least-attained service: longer, since it happens all the time.
    quantum_s: float = Field(300.0, ge=0)
    #: Runs that allow it take turns of this length.
    time_slice_s: float | None = Field(None, gt=0)
    #: What starting again is taken to cost, when victims are chosen.
    resume_cost_s: float = Field(60.0, ge=0)


class Elastic(SpecPart):
    """Runs between their min and max slots."""

    #: A run is not grown before it has had its slots for so long, nor before the cluster's slots have
    #: been at rest for so long: growing costs a restart, and one that ends is often followed by another
    #: (its evaluation) that takes some of the slots for a moment.
    resize_interval_s: float = Field(3.0, ge=0)
    #: A node that has had free slots for so long is grown into however busy the others are.
    grow_anyway_s: float = Field(60.0, ge=0)


class Predict(SpecPart):
    """How long runs take, from those that are over."""

    #: From how many ended runs of a kind its distribution counts; below, the next wider kind's.
    enough: int = Field(5, ge=1)
    #: How many of the newest count.
    window: int = Field(1_000, ge=1)
    #: What is assumed of a run of which nothing is known.
    prior_s: float = Field(3_600.0, gt=0)


class Pool(SpecPart):
    """Nodes of one kind that can be had, and what they cost."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    accelerator: str = "cpu"
    capacity: Literal["on-demand", "spot"] = "on-demand"
    cluster: str | None = None
    slots_per_node: int = Field(1, ge=1)
    #: Processors and memory of a node; 0: as the nodes of the pool that have joined have them.
    cpus_per_node: float = Field(0.0, ge=0)
    memory_bytes_per_node: int = Field(0, ge=0)
    #: MIG profiles of a node's slots; empty: as the nodes of the pool that have joined have them.
    slot_profiles: tuple[str, ...] = ()
    #: The most nodes that there can be; no fact wants more.
    max_nodes: int = Field(0, ge=0)
    price_per_slot_hour: float = Field(0.0, ge=0)
    #: How often a node of it is taken away.
    interruptions_per_hour: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _check_profiles(self) -> Self:
        if self.slot_profiles and len(self.slot_profiles) != self.slots_per_node:
            raise ValueError(f"slot_profiles has {len(self.slot_profiles)} entries for {self.slots_per_node} slots")
        return self


class Pools(SpecPart):
    """Where nodes come from."""

    pools: tuple[Pool, ...] = ()
    #: Tier -> capacity, the first choice first.
    tiers: dict[str, tuple[Literal["on-demand", "spot"], ...]] = Field(default_factory=dict)
    #: What an interruption costs a run besides its lost slots.
    restart_s: float = Field(60.0, ge=0)
    #: Wanted nodes that have not come after so long are looked for in the next pool.
    patience_s: float = Field(300.0, gt=0)
    #: And the pool is tried again after so long.
    retry_s: float = Field(1_800.0, gt=0)
    #: A node that has been idle for so long is not wanted any more.
    idle_s: float = Field(600.0, ge=0)


class Faults(SpecPart):
    """What is done about parts that fail, and how long they are waited for."""

    #: How long a placement may take until its ranks run: downloads of data and code are part of it.
    start_deadline_s: float = Field(1800.0, gt=0)
    #: How long after its grace a node may take to release a run; one that takes longer counts as lost.
    release_deadline_s: float = Field(300.0, gt=0)
    #: A node on which a run failed this often in a row, by no fault of its own, is avoided by that run.
    avoid_node_after: int = Field(2, ge=1)
    #: How long before a machine is taken away its ranks must have ended: the rest of the time is for uploads.
    notice_margin_s: float = Field(NOTICE_MARGIN_S, ge=0)
    #: Generations in a row that may break, by no fault of the run, without a new checkpoint.
    max_infrastructure_failures: int = Field(50, ge=1)
    #: How long a run whose ranks all ended well waits for a final checkpoint, if none of its nodes has staged one. What
    #: was staged is waited for without a limit.
    final_checkpoint_wait_s: float = Field(60.0, ge=0)
    #: Delay before a run is placed again, by how many generations in a row broke without a new
    #: checkpoint. The first two tries are immediate; a run that breaks at once must not spin.
    retry_delays_s: tuple[float, ...] = Field((0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 30.0), min_length=1)

    def retry_delay_s(self, setbacks: int) -> float:
        """Seconds to wait after the ``setbacks``-th failure in a row."""
        return self.retry_delays_s[min(setbacks, len(self.retry_delays_s) - 1)]


class Policy(SpecPart):
    """Everything that configures ``decide``; two schedulers with the same policy decide the same."""

    name: str = Field("priority-first-come", min_length=1, max_length=100)
    order: Order = Order.defaults()
    admit: Admit = Admit.defaults()
    fair_share: FairShare = FairShare.defaults()
    place: Place = Place.defaults()
    reserve: Reserve = Reserve.defaults()
    maintenance: tuple[Maintenance, ...] = ()
    preemption: Preemption = Field(
        Preemption.defaults(), validation_alias=AliasChoices("preemption", EARLIER_PREEMPTION)
    )
    elastic: Elastic = Elastic.defaults()
    predict: Predict = Predict.defaults()
    pools: Pools = Pools.defaults()
    faults: Faults = Faults.defaults()

    @model_validator(mode="before")
    @classmethod
    def _check_one_preemption(cls, data: Any) -> Any:
        if isinstance(data, dict) and {"preemption", EARLIER_PREEMPTION} <= data.keys():
            raise ValueError(f"{EARLIER_PREEMPTION} is the earlier name of preemption: give only preemption")
        return data

    @cached_property
    def digest(self) -> str:
        """What decisions name it by: a hash of its canonical JSON."""
        content = self.model_dump(mode="json")
        # The digest outlives names: logs hold the digests of policies whose section was called so.
        content[EARLIER_PREEMPTION] = content.pop("preemption")
        if self.place.staging_limit_s == Place.model_fields["staging_limit_s"].default:
            # And of those that came before the field.
            del content["place"]["staging_limit_s"]
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def covers(self, at: datetime) -> tuple[Maintenance, ...]:
        """The maintenance that is not over at this time."""
        return tuple(window for window in self.maintenance if window.end > at)
