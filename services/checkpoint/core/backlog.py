"""What to commit first, and what not at all, when staged checkpoints have piled up.

While the service or the store was away, ranks went on and staged one checkpoint after the other. Who waits for one of
them waits for the newest: a run that has ended for its result, one that was preempted for the place where it goes on.
And most of the others would be deleted by retention right after their commit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from contracts.events.checkpoint import CheckpointCommitted, CheckpointStaged
from contracts.spec.run import RunSpec
from services.checkpoint.core.commit import AssembledCheckpoint
from services.checkpoint.core.retention import judged_uris, plan


def newest_first(steps: Mapping[int, Mapping[int, CheckpointStaged]]) -> list[Mapping[int, CheckpointStaged]]:
    """Return the parts of each step: the final checkpoint's, then by step, the newest first."""
    order = sorted(steps, key=lambda step: (any(part.final for part in steps[step].values()), step), reverse=True)
    return [steps[step] for step in order]


def is_superseded(
    checkpoint: AssembledCheckpoint,
    spec: RunSpec,
    committed: Sequence[CheckpointCommitted],
    deleted: Collection[str],
) -> bool:
    """Whether retention would delete the checkpoint as soon as it was committed.

    Only commits that stand count: a newer checkpoint that might yet be refused replaces nothing.
    """
    all_of_them = [*committed, checkpoint.as_committed()]
    held = judged_uris(spec, all_of_them, deleted)
    return any(deletion.uri == checkpoint.ref.uri for deletion in plan(all_of_them, deleted, spec.retention, held))
