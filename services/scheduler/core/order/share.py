"""Fair share between teams: the team furthest below its share goes first, level by level along the path.

A team's standing is its use over its weight, compared with its siblings'; below it, its parts share what it gets in
the same way (Slurm's fair tree). A team's own runs share with its parts as one more sibling, of the weight that is
given to the path with a slash behind it (``research/``).

What counts as use is the decayed use as it will be a little later if everybody keeps what they have: a team that has
just been given slots has had its turn, although its use only grows with time. Without that, all slots that become
free go to one team until its use has caught up, and shares swing by as much as a run takes.
"""

from __future__ import annotations

import math

from contracts.scheduling import FairShare
from services.scheduler.core.state.usage import EVERYBODY, TeamUsage, lineage, own

#: How far ahead use is seen, in half-lives. Not much shorter than runs take, else shares swing; not much longer
#: either, else what was missed in the past is made up for too late (loadtest/scheduler/fairness.py compares them).
AHEAD_HALF_LIVES = 1 / 16


class Shares:
    """The standing of every team in one pass, as slots are given and taken in it."""

    def __init__(self, ledger: TeamUsage, config: FairShare, now: float) -> None:
        self._ledger, self._now = ledger, now
        self._weights = {
            lineage(team)[-1] + "/" * team.endswith("/"): weight for team, weight in config.weights.items()
        }
        half_life_s = ledger.half_life_s
        #: What is left of past use by then, and what a slot held until then adds.
        self._left = math.exp2(-AHEAD_HALF_LIVES)
        self._slot_s = half_life_s / math.log(2) * (1.0 - self._left)
        self._levels: dict[str, tuple[str, ...]] = {}
        self._uses: dict[str, float] = {}
        self._keys: dict[str, tuple[float, ...]] = {}

    def key(self, team: str | None) -> tuple[float, ...]:
        """Use over weight, level by level; the smaller, the further below its share."""
        team = team or EVERYBODY
        known = self._keys.get(team)
        if known is None:
            key = [self._use(name) / self._weights.get(name, 1.0) for name in self._path(team)]
            while key and key[-1] == 0.0:
                # Who has used nothing stands equal, however deep it is.
                key.pop()
            known = self._keys[team] = tuple(key)
        return known

    def charge(self, team: str | None, slots: float) -> None:
        """These slots go to the team (below 0: are taken from it): it stands behind by as much from now on."""
        self._keys.clear()
        for name in self._path(team):
            self._uses[name] = self._use(name) + slots * self._slot_s

    def may_take(self, waiter: str | None, gets: float, holder: str | None, loses: float) -> bool:
        """Whether the waiter's team still stands no higher than the holder's when the slots have changed hands.

        Who takes more than that would have them taken back at once.
        """
        for our, their in zip(self._path(waiter), self._path(holder), strict=False):
            if our != their:
                after = (self._use(our) + gets * self._slot_s) / self._weights.get(our, 1.0)
                return after <= (self._use(their) - loses * self._slot_s) / self._weights.get(their, 1.0) * (1 + 1e-9)
        return False

    def _path(self, team: str | None) -> tuple[str, ...]:
        """The team's ancestors below everybody, the team, and its own runs."""
        team = team or EVERYBODY
        found = self._levels.get(team)
        if found is None:
            names = lineage(team)
            found = self._levels[team] = (*names[1:], own(names[-1]))
        return found

    def _use(self, name: str) -> float:
        use = self._uses.get(name)
        if use is None:
            account = self._ledger.account(name)
            use = 0.0
            if account is not None:
                use = account.decayed_at(self._now, self._ledger.half_life_s) * self._left
                use += account.slots * self._slot_s
            self._uses[name] = use
        return use


def standing(ledger: TeamUsage, config: FairShare, team: str | None, now: float) -> tuple[float, ...]:
    """How far a team is above its share; smaller goes first. In a pass that gives slots, use ``Shares``."""
    return Shares(ledger, config, now).key(team)
