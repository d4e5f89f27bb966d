"""How long ranks that lost a peer may go on, to save their state for the next generation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from contracts.events.run import RunPlaced
from services.worker.checkpoints.survivor_memory import SurvivorMemory
from services.worker.core.journal import RankState
from services.worker.generation.rank_group import FAILURE_PATIENCE_S

#: Steps that ranks which lost a peer are given to notice it.
NOTICE_STEPS = 2


class SurvivorGrace:
    """The survivors of one generation: whether they can save state, and how long they may take."""

    def __init__(self, placed: RunPlaced, memory: SurvivorMemory, limit_s: float, now: Callable[[], float]) -> None:
        """``limit_s``: the longest that survivors may take."""
        self._placed, self._memory, self._limit_s, self._now = placed, memory, limit_s, now
        self._ranks: Mapping[int, RankState] = {}

    def follow(self, ranks: Mapping[int, RankState]) -> None:
        """Read the ranks' progress from ``ranks``, which changes as they go on."""
        self._ranks = ranks

    @property
    def is_resumable(self) -> bool:
        """Whether a next generation can resume what the ranks write: no command or evaluation can."""
        spec = self._placed.spec
        return spec.command is None and spec.training is not None and spec.kind == "train"

    @property
    def can_use_memory(self) -> bool:
        """Whether the ranks can leave state in memory."""
        return self._memory.is_available and self.is_resumable

    @property
    def extra_s(self) -> float:
        """Seconds beyond a stop's grace for ranks whose peers have failed."""
        return self._limit_s if self.can_use_memory else 0.0

    def may_wait(self, waited_s: float, running: Collection[int]) -> bool:
        """Whether the ranks that still run get more time, ``waited_s`` after the first failure."""
        # They notice the failure at the end of the step that they are in.
        notice_s = NOTICE_STEPS * self._mean_step_s if self.can_use_memory else 0.0
        if waited_s < FAILURE_PATIENCE_S + notice_s:
            return waited_s < max(self._limit_s, FAILURE_PATIENCE_S)
        if not self.can_use_memory or waited_s > self._limit_s:
            return False
        return self._memory.is_being_written(self._placed.run_id, self._placed.generation, running)

    def has_newer_state(self) -> bool:
        """Whether memory holds newer state than any checkpoint, so that the next generation needs no upload."""
        newest = self._memory.newest_step(self._placed.run_id, self._placed.generation)
        staged = (checkpoint.step for state in self._ranks.values() for checkpoint in state.checkpoints)
        return newest is not None and newest >= max(staged, default=0)

    @property
    def _mean_step_s(self) -> float:
        """Mean seconds a step of this generation, of its fastest rank; 0 while unknown."""
        per_rank = [
            (self._now() - state.started.time) / max(state.step - state.started.step, 1)
            for state in self._ranks.values()
            if state.started is not None and state.step is not None
        ]
        return min(per_rank, default=0.0)
