"""Which checkpoints are complete on a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.ranks import CheckpointLine


def ready_steps(checkpoints: Mapping[int, Sequence[CheckpointLine]], *, at_end: bool) -> list[int]:
    """Steps that every local rank has completed; at the end, those that any has, for nobody will follow."""
    steps = [{line.step for line in lines} for lines in checkpoints.values()]
    if not steps:
        return []
    return sorted(set.union(*steps) if at_end else set.intersection(*steps))
