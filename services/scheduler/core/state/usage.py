"""Who uses how many slots now, and has used them: what shares and quotas are measured by.

Everything is kept along the path of a team: what ``research/vision`` uses counts for ``research`` too, and for ''
(everybody). Use between two changes is constant, so decayed use has a closed form. An account is brought up to date
only when it changes; asking changes nothing. Times are seconds since the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

#: Everybody together: the parent of all teams.
EVERYBODY = ""
#: Periods that are counted whether or not a quota has them, so that a new quota begins with what was spent.
USUAL_PERIODS_H = (24.0, 24.0 * 7)
#: Shares of accelerators add up to whole ones only so exactly.
DIGITS = 6


@lru_cache(maxsize=10_000)
def lineage(team: str | None) -> tuple[str, ...]:
    """Everybody, the team's ancestors, and the team itself: ``research/vision`` -> '', research, research/vision."""
    names = [name for name in (team or "").split("/") if name]
    return (EVERYBODY, *("/".join(names[: depth + 1]) for depth in range(len(names))))


def own(team: str) -> str:
    """What the team's own runs count under, which share with the teams that are part of it: ``research/``."""
    return f"{team}/"


@dataclass(slots=True)
class Account:
    """The use of one team, of one kind of accelerator or of all."""

    #: Up to when the sums below are right.
    at: float
    slots: float = 0.0
    #: Slot-seconds since ever, and those of them that have not decayed.
    slot_s: float = 0.0
    decayed_slot_s: float = 0.0
    #: Length of a period in hours -> its number, and ``slot_s`` when it and the one before it began.
    periods: dict[float, tuple[int, float, float]] = field(default_factory=dict)
    #: When the first of the periods ends.
    turns_at: float = math.inf

    def slot_s_at(self, now: float) -> float:
        return self.slot_s + self.slots * max(now - self.at, 0.0)

    def decayed_at(self, now: float, half_life_s: float) -> float:
        """Slot-seconds, each counted half for every half-life since."""
        left = math.exp2(-max(now - self.at, 0.0) / half_life_s)
        return self.decayed_slot_s * left + self.slots * half_life_s / math.log(2) * (1.0 - left)

    def spent_s(self, period_h: float, now: float, ago: int = 0) -> float:
        """Slot-seconds in the period that ``now`` lies in, or in the one before it (``ago`` 1)."""
        if period_h not in self.periods:
            return 0.0
        now = max(now, self.at)
        _, begun, before = self._period_at(period_h, now)
        return self.slot_s_at(now) - begun if ago == 0 else begun - before

    def advance(self, now: float, half_life_s: float) -> None:
        """Bring the sums up to date. A clock that goes backwards stands still."""
        if now <= self.at:
            return
        if now >= self.turns_at:
            self.periods = {period_h: self._period_at(period_h, now) for period_h in self.periods}
            self.turns_at = self._first_turn()
        self.decayed_slot_s = self.decayed_at(now, half_life_s)
        self.slot_s = self.slot_s_at(now)
        self.at = now

    def count(self, periods_h: Iterable[float]) -> None:
        """Count these periods, from now on where they are new, and no others."""
        new = {
            period_h: (math.floor(self.at / (period_h * 3600.0)), self.slot_s, self.slot_s) for period_h in periods_h
        }
        self.periods = {period_h: self.periods.get(period_h, period) for period_h, period in new.items()}
        self.turns_at = self._first_turn()

    def _period_at(self, period_h: float, now: float) -> tuple[int, float, float]:
        """Return the period that ``now`` lies in, as in ``periods``; use has been constant since the last change."""
        number, begun, before = self.periods[period_h]
        length_s = period_h * 3600.0
        current = math.floor(now / length_s)
        if current <= number:
            return number, begun, before
        before = begun if current == number + 1 else self.slot_s_at((current - 1) * length_s)
        return current, self.slot_s_at(current * length_s), before

    def _first_turn(self) -> float:
        return min(((number + 1) * hours * 3600.0 for hours, (number, *_) in self.periods.items()), default=math.inf)


class TeamUsage:
    """Slots in use and slot-seconds used, by team and kind of accelerator; slots in use by user."""

    def __init__(self, half_life_s: float = 7 * 86_400.0, periods_h: Iterable[float] = ()) -> None:
        self.half_life_s = half_life_s
        self.periods_h: tuple[float, ...] = tuple(sorted({*USUAL_PERIODS_H, *periods_h}))
        #: (team, kind of accelerator; None: all together) -> its account.
        self._accounts: dict[tuple[str, str | None], Account] = {}
        self._users: dict[tuple[str, str | None], float] = {}

    def adopt(self, half_life_s: float, periods_h: Iterable[float], at: float) -> None:
        """Decay and count by another policy from ``at`` on. What has decayed so far stays as it is."""
        periods = tuple(sorted({*USUAL_PERIODS_H, *periods_h}))
        if (half_life_s, periods) == (self.half_life_s, self.periods_h):
            return
        for account in self._accounts.values():
            account.advance(at, self.half_life_s)
            account.count(periods)
        self.half_life_s, self.periods_h = half_life_s, periods

    def change(self, team: str | None, user: str | None, accelerator: str, delta_slots: float, at: float) -> None:
        """Slots of this kind have come to (or, below 0, gone from) this user of this team."""
        names = lineage(team)
        keys = [(name, kind) for name in names for kind in (accelerator, None)]
        for key in (*keys, (own(names[-1]), None)):
            account = self._account(*key, at)
            account.advance(at, self.half_life_s)
            account.slots = round(account.slots + delta_slots, DIGITS)
        for by_user in ((user or "", accelerator), (user or "", None)):
            left = round(self._users.get(by_user, 0.0) + delta_slots, DIGITS)
            if left:
                self._users[by_user] = left
            else:
                self._users.pop(by_user, None)

    def using(self, team: str | None, accelerator: str | None = None) -> float:
        """Slots that the team, and what is part of it, has now; '' or None: everybody."""
        account = self._accounts.get((lineage(team)[-1], accelerator))
        return account.slots if account else 0.0

    def user_using(self, user: str | None, accelerator: str | None = None) -> float:
        """Slots that the user has now. All who gave no name are one user, so that no ceiling is got round by it."""
        return self._users.get((user or "", accelerator), 0.0)

    def spent_slot_h(
        self, team: str | None, accelerator: str | None, period_h: float, now: float, ago: int = 0
    ) -> float:
        """Slot-hours in the current period, or the last one (``ago`` 1). Periods begin at whole multiples since 1970.

        Counted are the usual periods and those of the policy, from when it was adopted.
        """
        account = self._accounts.get((lineage(team)[-1], accelerator))
        return account.spent_s(period_h, now, ago) / 3600.0 if account else 0.0

    def account(self, name: str) -> Account | None:
        """The account of a team by its full name, or of its own runs alone (``own``); None: it never used anything."""
        return self._accounts.get((name, None))

    def to_state(self) -> dict[str, Any]:
        """Everything, as JSON; ``restored`` makes the same ledger of it."""
        return {
            "half_life_s": self.half_life_s,
            "periods_h": list(self.periods_h),
            "accounts": [
                [team, kind, a.at, a.slots, a.slot_s, a.decayed_slot_s, [[h, *marks] for h, marks in a.periods.items()]]
                for (team, kind), a in self._accounts.items()
            ],
            "users": [[user, kind, slots] for (user, kind), slots in self._users.items()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TeamUsage:
        """The ledger that ``state`` was taken from."""
        ledger = cls(state["half_life_s"], state["periods_h"])
        for team, kind, at, slots, slot_s, decayed_slot_s, periods in state["accounts"]:
            account = ledger._account(team, kind, at)
            account.slots, account.slot_s, account.decayed_slot_s = slots, slot_s, decayed_slot_s
            account.periods = {period_h: (number, begun, before) for period_h, number, begun, before in periods}
            account.count(account.periods)
        ledger._users = {(user, kind): slots for user, kind, slots in state["users"]}
        return ledger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TeamUsage) and self.to_state() == other.to_state()

    def _account(self, team: str, kind: str | None, at: float) -> Account:
        found = self._accounts.get((team, kind))
        if found is None:
            found = self._accounts[team, kind] = Account(at)
            found.count(self.periods_h)
        return found
