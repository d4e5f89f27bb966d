"""Quotas and ceilings: what a team is owed, what it borrows, and the ceiling that it never exceeds.

``slots`` of a quota are guaranteed: idle ones are lent to any run that can use them, and reclaimed when their owner
waits for them. ``ceiling`` and ``slot_hours`` are never exceeded. What holds for a team holds for all that is part of
it together. A team without a quota is owed nothing where others have one: all that it has is borrowed.

Where a team has quotas for a kind of accelerator and for all kinds together, it is owed what the former says of that
kind; ceilings and slot-hours bind both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from contracts.scheduling import Policy, Quota
from contracts.spec.run import RunSpec
from services.scheduler.core.state.usage import TeamUsage, lineage

#: What a refusal is about.
Bound = Literal["run", "user", "team", "hours", "borrowed"]
#: Shares of accelerators add up only so exactly.
TINY = 1e-6


class QuotaRequest(Protocol):
    """The parts of a run that quotas read."""

    @property
    def run_id(self) -> str: ...

    @property
    def spec(self) -> RunSpec: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a run may not have slots although they are free."""

    code: Literal["quota", "ceiling"]
    bound: Bound
    #: The team or user whose limit it is; '' of ``user``: all who gave no name.
    name: str
    #: None: all kinds together.
    accelerator: str | None
    #: Slots (slot-hours, if ``bound`` is hours) that are the limit, and those that are in use (used up).
    limit: float
    used: float
    #: Slots that the run needs, and that it may have.
    needs: float = 0.0
    room: float = 0.0
    #: When the period ends.
    until: float | None = None

    @property
    def never(self) -> bool:
        """Whether it would be refused even in an empty cluster."""
        return self.bound != "hours" and self.needs > self.limit


@dataclass(frozen=True, slots=True)
class SpentOut:
    """A team whose slot-hours are used up at ``at``: these runs must be stopping by then."""

    quota: Quota
    run_ids: tuple[str, ...]
    at: float
    period_ends_at: float


class Quotas:
    """What each run may have in one cycle, as slots are charged and refunded in it."""

    def __init__(self, policy: Policy, ledger: TeamUsage, now: float) -> None:
        self._admit, self._preemption = policy.admit, policy.preemption
        self._ledger, self._now = ledger, now
        self._of: dict[str, list[Quota]] = defaultdict(list)
        for quota in policy.admit.quotas:
            self._of[lineage(quota.team)[-1]].append(quota)
        self._owing = {quota.accelerator for quota in policy.admit.quotas if quota.slots is not None}
        self._spent: dict[Quota, float] = {}
        #: Who uses a quota of slot-hours: run -> slots; and what all of them may still use in their grace time.
        self._pace: dict[Quota, dict[str, float]] = {}
        self._grace_slot_s: dict[Quota, float] = defaultdict(float)
        self._given: dict[tuple[str, str | None], float] = defaultdict(float)
        self._given_users: dict[str, float] = defaultdict(float)
        #: When what was refused so far may be allowed by the clock alone.
        self.wake_at = math.inf

    # -- what a run may have ---------------------------------------------------

    def allows(self, run: QuotaRequest, slots: float, kind: str, held: float = 0.0) -> Refusal | None:
        """Return None if the run may have ``slots`` slots of this kind besides the ``held`` ones, else the refusal."""
        for room, refusal in self._limits(run, kind, held):
            if slots > room + TINY:
                if refusal.until is not None:
                    self.wake_at = min(self.wake_at, refusal.until)
                return replace(refusal, needs=slots, room=max(room, 0.0))
        return None

    def room(self, run: QuotaRequest, kind: str, held: float = 0.0) -> float:
        """How many slots of this kind the run may have, besides the ``held`` ones that it keeps."""
        return max(min((room for room, _ in self._limits(run, kind, held)), default=math.inf), 0.0)

    def charge(self, run: QuotaRequest, slots: float, kind: str) -> None:
        """Charge the run for these slots in this cycle; below 0: refund them."""
        for name in lineage(run.spec.team):
            self._given[name, kind] += slots
            self._given[name, None] += slots
        self._given_users[run.spec.user or ""] += slots
        for quota in self._limited(run, kind):
            self._grace_slot_s[quota] += slots * run.spec.grace_s

    def _limits(self, run: QuotaRequest, kind: str, held: float) -> Iterator[tuple[float, Refusal]]:
        """Everything that binds the run: how many slots it leaves, and the refusal of more."""
        spec = run.spec
        if (most := self._admit.max_slots_per_run) is not None:
            yield most - held, Refusal("ceiling", "run", run.run_id, None, most, held)
        if (most := self._admit.max_slots_per_user) is not None:
            user = spec.user or ""
            using = self._ledger.user_using(user) + self._given_users.get(user, 0.0)
            yield most - using, Refusal("ceiling", "user", user, None, most, using)
        if not self._of:
            return
        names = lineage(spec.team)
        for name in names:
            for quota in self._of.get(name, ()):
                if quota.accelerator in (None, kind):
                    yield from self._of_quota(quota, name, spec)
        if not spec.scheduling.preemptible and self._quoted(kind):
            # What cannot be taken back is not lent.
            for name, limit, of in self._chain(spec.team, kind) or [(names[-1], 0.0, kind)]:
                using = self._using(name, of)
                yield limit - using, Refusal("quota", "borrowed", name, of, limit, using)

    def _of_quota(self, quota: Quota, name: str, spec: RunSpec) -> Iterator[tuple[float, Refusal]]:
        using = self._using(name, quota.accelerator)
        if quota.ceiling is not None:
            yield quota.ceiling - using, Refusal("ceiling", "team", name, quota.accelerator, quota.ceiling, using)
        if quota.slot_hours is not None:
            # A start is worth something only if there is time to resume, and to stop again.
            least_s = self._preemption.resume_cost_s + self._preemption.min_run_s + spec.grace_s
            spent, until = self._spent_slot_h(quota), period_end(quota, self._now)
            room = self._left_slot_s(quota) / least_s if least_s else math.inf * (spent < quota.slot_hours)
            yield room, Refusal("quota", "hours", name, quota.accelerator, quota.slot_hours, spent, until=until)

    # -- lending and giving back ------------------------------------------------

    def within(self, run: QuotaRequest, slots: float, kind: str) -> bool:
        """Whether the run would borrow nothing: it goes before those that would, since it could take theirs."""
        return not self._quoted(kind) or self._entitled(lineage(run.spec.team)[1:], slots, kind)

    def owed(self, team: str | None, kind: str) -> float:
        """Return the slots that the team has a right to and does not have; 0 without a quota."""
        chain = self._chain(team, kind)
        return max(min((limit - self._using(name, of) for name, limit, of in chain), default=0.0), 0.0)

    def borrowed(self, team: str | None, kind: str) -> float:
        """Slots that the team has beyond its quota: its own, or else the next one above it."""
        if not self._quoted(kind):
            return 0.0
        chain = self._chain(team, kind)
        if not chain:
            return self._using(lineage(team)[-1], kind)
        name, limit, of = chain[-1]
        return max(self._using(name, of) - limit, 0.0)

    def verdict(self, waiter: QuotaRequest, slots: float, holder: QuotaRequest, kind: str) -> bool | None:
        """Whether quotas let the waiter have slots of the holder, forbid it, or say nothing about it (None).

        Who is owed them takes them back from who borrowed them; who would borrow them cannot take them from who has
        a right to them. Both teams are compared below the team that both are part of, whose parts lend to each other.
        """
        ours, theirs = lineage(waiter.spec.team), lineage(holder.spec.team)
        if not self._quoted(kind) or ours == theirs:
            return None
        common = sum(1 for our, their in zip(ours, theirs, strict=False) if our == their)
        entitled, over = self._entitled(ours[common:], slots, kind), self._over(theirs[common:], kind)
        return entitled if entitled == over else None

    def _entitled(self, names: Sequence[str], slots: float, kind: str) -> bool:
        owed = [(name, found) for name in names if (found := self._owed(name, kind)) is not None]
        return bool(owed) and all(self._using(name, of) + slots <= limit + TINY for name, (limit, of) in owed)

    def _over(self, names: Sequence[str], kind: str) -> bool:
        """Whether all of these teams have more than they are owed, or are owed nothing."""
        owed = [(name, found) for name in names if (found := self._owed(name, kind)) is not None]
        return all(self._using(name, of) > limit + TINY for name, (limit, of) in owed)

    def _owed(self, name: str, kind: str) -> tuple[float, str | None] | None:
        """What the team itself is owed of this kind: slots, and of which accelerator (None: all) they are counted."""
        for of in (kind, None):
            slots = [
                quota.slots for quota in self._of.get(name, ()) if quota.accelerator == of and quota.slots is not None
            ]
            if slots:
                return max(slots), of
        return None

    def _chain(self, team: str | None, kind: str) -> list[tuple[str, float, str | None]]:
        """What the team and those that it is part of are owed, the widest first."""
        found = ((name, self._owed(name, kind)) for name in lineage(team)[1:])
        return [(name, *owed) for name, owed in found if owed is not None]

    def _quoted(self, kind: str) -> bool:
        """Whether any team is owed slots of this kind."""
        return bool(self._owing) and (None in self._owing or kind in self._owing)

    # -- slot-hours ---------------------------------------------------------------

    def count(self, holders: Iterable[tuple[QuotaRequest, float, str]]) -> None:
        """Count what allocated runs (run, slots, kind) may still use in their grace time."""
        for run, slots, kind in holders:
            for quota in self._limited(run, kind):
                self._pace.setdefault(quota, {}).setdefault(run.run_id, 0.0)
                self._pace[quota][run.run_id] += slots
                self._grace_slot_s[quota] += slots * run.spec.grace_s

    def spent_out(self) -> list[SpentOut]:
        """When each quota of slot-hours is used up by those who were counted.

        Early enough that they can stop within their grace time: a quota is never exceeded. Quotas that
        last until the end of their period at this pace are left out.
        """
        found = []
        for quota, runs in self._pace.items():
            pace = sum(runs.values())
            ends_at = period_end(quota, self._now)
            if pace > 0 and (at := self._now + max(self._left_slot_s(quota), 0.0) / pace) < ends_at:
                found.append(SpentOut(quota, tuple(runs), at, ends_at))
        return found

    def _limited(self, run: QuotaRequest, kind: str) -> Iterator[Quota]:
        """The quotas of slot-hours that bind the run."""
        for name in lineage(run.spec.team):
            for quota in self._of.get(name, ()):
                if quota.slot_hours is not None and quota.accelerator in (None, kind):
                    yield quota

    def _left_slot_s(self, quota: Quota) -> float:
        """Return what is left of the quota after the grace time of all runs that use it."""
        return ((quota.slot_hours or 0.0) - self._spent_slot_h(quota)) * 3600.0 - self._grace_slot_s[quota]

    def _spent_slot_h(self, quota: Quota) -> float:
        spent = self._spent.get(quota)
        if spent is None:
            spent = self._ledger.spent_slot_h(quota.team, quota.accelerator, quota.period_h, self._now)
            self._spent[quota] = spent
        return spent

    def _using(self, name: str, kind: str | None) -> float:
        return self._ledger.using(name, kind) + self._given.get((name, kind), 0.0)


def period_end(quota: Quota, now: float) -> float:
    """When the quota's period is over that ``now`` lies in."""
    length_s = quota.period_h * 3600.0
    return (math.floor(now / length_s) + 1) * length_s


def periods_h(policy: Policy) -> tuple[float, ...]:
    """The periods that the ledger must count for this policy."""
    return tuple(sorted({quota.period_h for quota in policy.admit.quotas if quota.slot_hours is not None}))
