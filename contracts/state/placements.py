"""Which placements of a run count. Everybody who can publish on the bus can publish one."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.base import Fact
from contracts.events.run import RunAccepted, RunPlaced, RunQueued
from contracts.state.run import placement_problem

#: What ``Placements`` folds.
PLACEMENT_FACTS: tuple[type[Fact], ...] = (RunAccepted, RunQueued, RunPlaced)


@dataclass(slots=True)
class Placements:
    """The placement of one run that counts, from what was accepted and queued before it.

    Folded in stream order. Of each generation the first placement that has no problem counts.
    """

    #: The newest placement that counts.
    standing: RunPlaced | None = None
    _accepted: RunAccepted | None = None
    _queued: set[int] = field(default_factory=set)

    def apply(self, fact: Fact) -> bool:
        """Fold a fact; return whether it is a placement that counts from now on."""
        match fact:
            case RunAccepted() if self._accepted is None:
                self._accepted = fact
            case RunQueued():
                self._queued.add(fact.next_generation)
            case RunPlaced() if self.standing is None or fact.generation > self.standing.generation:
                if not self.problem(fact):
                    self.standing = fact
                    return True
        return False

    def problem(self, placed: RunPlaced) -> str:
        """Return why nothing in the log supports a placement; '' if it is supported."""
        if self._accepted is None:
            return f"run {placed.run_id} was never accepted"
        # As text: NaN is no equal of itself.
        if self._accepted.spec.model_dump_json() != placed.spec.model_dump_json():
            return "its request is another one than was accepted"
        return self.queue_problem(placed)

    def queue_problem(self, placed: RunPlaced) -> str:
        """Return why the scheduler cannot have made the placement of what was queued; '' if it can have."""
        wanted = placed.generation
        return placement_problem(placed, wanted if wanted in self._queued else max(self._queued, default=None))

    def is_newest(self, placed: RunPlaced) -> bool:
        """Whether the run was queued for no later generation."""
        return placed.generation >= max(self._queued, default=0)
