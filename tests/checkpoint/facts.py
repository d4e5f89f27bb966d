"""Facts as the scheduler and the agents would publish them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from contracts.base import Fact
from contracts.events.checkpoint import CheckpointCommitted, CheckpointFile, CheckpointStaged, Chunk
from contracts.events.run import CheckpointRef, Member, RunAccepted, RunPlaced, RunQueued
from contracts.spec.run import RunSpec
from contracts.spec.training import Retention
from services.kit.store.uris import blob_key

RUN = "rtest"
NODES = {"a": (0, 1), "b": (2, 3)}


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def blob_uri(bucket: str, content: bytes) -> str:
    return f"s3://{bucket}/{blob_key(sha(content))}"


def placed(generation: int = 1, *, run: str = RUN, retention: Retention | None = None, **fields: object) -> RunPlaced:
    spec = RunSpec(name="test", command=["true"], experiment="digits", retention=retention or Retention())
    values: dict[str, object] = {
        "members": tuple(Member(node_id=n, slots=tuple(range(len(r))), ranks=r) for n, r in NODES.items()),
        "world_size": 4,
        "spec": spec,
        "decided_at_sequence": 0,
        "decided_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    return RunPlaced(run_id=run, generation=generation, **{**values, **fields})  # type: ignore[arg-type]


def support(run: RunPlaced) -> tuple[Fact, Fact]:
    """What the log has of a run before it is placed."""
    accepted = RunAccepted(run_id=run.run_id, spec=run.spec, request_id="q", request_source="test")
    return accepted, RunQueued(run_id=run.run_id, next_generation=run.generation)


def tuned(uri: str) -> RunAccepted:
    """A run that begins with a checkpoint's weights."""
    task = {"task": "t:T", "code": {"uri": "s3://code/c", "sha256": "0" * 64}, "training": {"epochs": 1}}
    spec = RunSpec.model_validate({"name": "tuned", **task, "init_from": uri})
    return RunAccepted(run_id="rtuned", spec=spec, request_id="1", request_source="s")


def file(bucket: str, path: str, content: bytes, **fields: object) -> CheckpointFile:
    chunk = Chunk(sha256=sha(content), size_bytes=len(content), uri=blob_uri(bucket, content))
    values: dict[str, object] = {"sha256": sha(content), "size_bytes": len(content), "chunks": (chunk,)}
    return CheckpointFile(path=path, **{**values, **fields})  # type: ignore[arg-type]


def staged(
    bucket: str, node: str, step: int = 100, generation: int = 1, *, run: str = RUN, **fields: object
) -> CheckpointStaged:
    """One node's part: a file of its own for each rank, or ``files``."""
    ranks = NODES.get(node, (0, 1, 2, 3))
    values: dict[str, object] = {
        "ranks": ranks,
        "world_size": 4,
        "epoch": 1,
        "samples_consumed": step * 64,
        "files": tuple(file(bucket, f"rank_{rank}.bin", content(rank, step, generation)) for rank in ranks),
    }
    return CheckpointStaged(run_id=run, generation=generation, node_id=node, step=step, **{**values, **fields})  # type: ignore[arg-type]


def content(rank: int, step: int, generation: int = 1) -> bytes:
    return f"weights of rank {rank} at step {step} of generation {generation}".encode()


def committed(
    step: int, loss: float | None = None, *, generation: int = 1, run: str = RUN, final: bool = False
) -> CheckpointCommitted:
    uri = f"s3://models/digits/{run}/checkpoints/epoch_1/step_{step:08d}.g{generation}.json"
    return CheckpointCommitted(
        run_id=run,
        generation=generation,
        checkpoint=CheckpointRef(uri=uri, step=step, epoch=1, samples_consumed=step),
        size_bytes=1,
        metrics={} if loss is None else {"validation/loss": loss},
        final=final,
    )
