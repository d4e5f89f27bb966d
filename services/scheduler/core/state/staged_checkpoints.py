"""The checkpoints that a generation's ranks have staged: what of them is still to be committed or refused."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.events.checkpoint import CheckpointRefused, CheckpointStaged


@dataclass(slots=True)
class StagedCheckpoints:
    """The checkpoints of one generation, by their steps.

    An agent stages a checkpoint before it reports that its ranks have ended. So when every part has ended the log
    holds all that there is to wait for, and "the commit is late" differs from "there is nothing to commit". Each of
    them counts, since an older one may be the best.
    """

    #: Step -> the ranks whose parts are staged, for steps of which some are missing.
    partial: dict[int, set[int]] = field(default_factory=dict)
    #: Steps of which every rank's part is staged, and that are neither committed nor refused; since when, in seconds.
    open: dict[int, float] = field(default_factory=dict)
    #: Steps that are committed or refused: a part that comes once more opens none of them again.
    settled: set[int] = field(default_factory=set)
    #: The newest committed step; None: none is.
    committed: int | None = None
    #: Step -> the refusal of its checkpoint, where no later one is committed.
    broken: dict[int, CheckpointRefused] = field(default_factory=dict)

    @property
    def behind_steps(self) -> int:
        """How many steps the newest commit is behind what is staged."""
        return max(max(self.open) - (self.committed or 0), 0) if self.open else 0

    def stage(self, fact: CheckpointStaged, at_s: float) -> None:
        """Note a node's part; one that comes once more changes nothing."""
        if fact.step in self.settled or fact.step in self.open:
            return
        ranks = self.partial.setdefault(fact.step, set())
        ranks.update(fact.ranks)
        if fact.is_whole or ranks.issuperset(range(fact.world_size)):
            del self.partial[fact.step]
            self.open[fact.step] = at_s

    def commit(self, step: int) -> None:
        """Note a commit."""
        self._settle(step)
        self.committed = max(step, self.committed or 0)
        self.broken = {other: refused for other, refused in self.broken.items() if other > step}

    def refuse(self, fact: CheckpointRefused) -> None:
        """Note that a checkpoint will never be committed."""
        self._settle(fact.step)
        if not fact.superseded and (self.committed is None or fact.step > self.committed):
            self.broken[fact.step] = fact

    def _settle(self, step: int) -> None:
        self.open.pop(step, None)
        self.partial.pop(step, None)
        self.settled.add(step)
