"""The steps whose checkpoints are complete on a node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from contracts.events.checkpoint import Exactness
from contracts.ranks import CheckpointLine


def ready_steps(checkpoints: Mapping[int, Sequence[CheckpointLine]], *, at_end: bool) -> list[int]:
    """Return the steps that every local rank has completed; at the end, those that any has."""
    steps = [{line.step for line in lines} for lines in checkpoints.values()]
    if not steps:
        return []
    return sorted(set.union(*steps) if at_end else set.intersection(*steps))


def weakest_exactness(exactness: Iterable[Exactness]) -> Exactness:
    """Return the exactness of a checkpoint with these parts."""
    return "exact" if all(each == "exact" for each in exactness) else "samples-exact"
