"""What the log has of a run before it is completed: nobody takes for true what nothing supports."""

from __future__ import annotations

from datetime import UTC, datetime

from contracts.base import Fact
from contracts.events.run import Member, RunCompleted, RunExited, RunPlaced, RunQueued
from contracts.spec.run import RunSpec

PLAIN = RunSpec(name="a", command=["true"])


def supported(end: RunCompleted, spec: RunSpec = PLAIN) -> list[Fact]:
    """Return the end of an accepted run, and before it that it was queued, placed on n1, and has ended well there."""
    run_id, generation = end.run_id, end.generation
    placed = RunPlaced(
        run_id=run_id,
        generation=generation,
        members=(Member(node_id="n1", slots=(0,), ranks=(0,)),),
        world_size=1,
        spec=spec,
        decided_at_sequence=0,
        decided_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    exited = RunExited(run_id=run_id, generation=generation, node_id="n1", outcome="succeeded")
    return [RunQueued(run_id=run_id, next_generation=generation), placed, exited, end]
