"""The facts of a run that trained and ended well."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from contracts.base import Fact
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import (
    CheckpointRef,
    Member,
    RunAccepted,
    RunCompleted,
    RunExited,
    RunPlaced,
    RunQueued,
    RunStarted,
)
from contracts.spec.run import RunSpec

SOURCE = "loadtest"
METRICS = {"validation/loss": 0.25}


def make_run_facts(run_id: str, spec: RunSpec, members: tuple[Member, ...]) -> list[Fact]:
    """Return the seven facts of a run from its acceptance to its end: the third places it on ``members``."""
    uri = f"s3://models/default/{run_id}/checkpoints/epoch_3/step_00000300.g1.json"
    reached = CheckpointRef(uri=uri, step=300, epoch=3, samples_consumed=76_800)
    digest = hashlib.sha256(run_id.encode()).hexdigest()
    placed = RunPlaced(
        run_id=run_id,
        generation=1,
        members=members,
        world_size=sum(len(member.slots) for member in members),
        spec=spec,
        decided_at_sequence=1,
        decided_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    node_id = members[0].node_id
    return [
        RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source=SOURCE),
        RunQueued(run_id=run_id, next_generation=1),
        placed,
        RunStarted(run_id=run_id, generation=1, node_id=node_id, exactness="exact"),
        CheckpointCommitted(
            run_id=run_id, generation=1, checkpoint=reached, size_bytes=1, final=True, manifest_sha256=digest
        ),
        RunExited(run_id=run_id, generation=1, node_id=node_id, outcome="succeeded", step=300, metrics=METRICS),
        RunCompleted(run_id=run_id, generation=1, checkpoint=reached, metrics=METRICS),
    ]
