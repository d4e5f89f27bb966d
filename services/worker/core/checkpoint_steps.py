"""Which checkpoints are complete on a node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from contracts.events.checkpoint import Exactness
from contracts.ranks import CheckpointLine


def ready_steps(checkpoints: Mapping[int, Sequence[CheckpointLine]], *, at_end: bool) -> list[int]:
    """Steps that every local rank has completed; at the end, those that any has, for nobody will follow."""
    steps = [{line.step for line in lines} for lines in checkpoints.values()]
    if not steps:
        return []
    return sorted(set.union(*steps) if at_end else set.intersection(*steps))


def worst(exactness: Iterable[Exactness]) -> Exactness:
    """What a whole is of which these are the parts."""
    return "exact" if all(each == "exact" for each in exactness) else "samples-exact"
