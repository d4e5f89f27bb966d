"""The checkpoints that a generation's ranks have staged: what of them is still to be committed or refused."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.events.checkpoint import CheckpointStaged


@dataclass(slots=True)
class StagedCheckpoints:
    """The checkpoints of one generation, by their steps.

    An agent stages a checkpoint before it reports that its ranks have ended. So when every part has ended the log
    holds all that there is to wait for, and "the commit is late" differs from "there is nothing to commit".
    """

    #: Step -> the ranks whose parts are staged. Steps up to the newest committed one are forgotten.
    ranks: dict[int, set[int]] = field(default_factory=dict)
    #: The steps of which every rank's part is staged.
    whole: set[int] = field(default_factory=set)
    #: Step -> why its checkpoint will never be committed.
    refused: dict[int, str] = field(default_factory=dict)
    #: The newest committed step; None: none is.
    committed: int | None = None

    @property
    def awaited(self) -> int | None:
        """The newest step whose checkpoint is neither committed nor refused, nor older than a committed one."""
        return max(self.whole.difference(self.refused), default=None)

    @property
    def newest_refused(self) -> int | None:
        """The newest step whose checkpoint was refused, if no later one is committed."""
        return max(self.refused, default=None)

    def stage(self, fact: CheckpointStaged) -> None:
        """Note a node's part."""
        if self.committed is not None and fact.step <= self.committed:
            return
        ranks = self.ranks.setdefault(fact.step, set())
        ranks.update(fact.ranks)
        if fact.is_whole or ranks.issuperset(range(fact.world_size)):
            self.whole.add(fact.step)

    def commit(self, step: int) -> None:
        """Note a commit: it settles the older ones too, which may never be committed after it."""
        self.committed = max(step, self.committed or 0)
        for known in (self.ranks, self.refused):
            for old in [other for other in known if other <= step]:
                del known[old]
        self.whole = {other for other in self.whole if other > step}

    def refuse(self, step: int, reason: str) -> None:
        """Note a refusal."""
        if self.committed is None or step > self.committed:
            self.refused[step] = reason
