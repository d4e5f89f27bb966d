"""From the staged parts of a checkpoint to its manifest.

Why each manifest has its generation in its name (``step_00000100.g2.json``). A resumed run reaches the
same step again when the commit of that step was never published (the service was killed between manifest
and commit) or was not yet seen by the scheduler when it placed the run anew. With one name for both, the
second generation would find the first one's manifest and would have to overwrite it, under the eyes of
whoever restores from it, or go without a checkpoint. With two names nothing is ever overwritten, and the
one truth about what is committed is the stream: a manifest counts if a ``checkpoint_committed`` names it,
and that fact is fenced by the placement. One that no fact names is never restored from, and swept later.
Within one generation the manifest is a function of stored facts, so all instances write the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from contracts.events.checkpoint import CheckpointFile, CheckpointStaged
from contracts.events.run import CheckpointRef, RunPlaced

BLOBS = "blobs/sha256/"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Other nodes' parts are still missing."""

    missing_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The parts can never make a checkpoint; the text says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Assembled:
    """Every rank's part is there. What remains is to verify the files against the store."""

    ref: CheckpointRef
    manifest: bytes
    files: tuple[CheckpointFile, ...]
    metrics: dict[str, float]
    final: bool

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def assemble(placed: RunPlaced, staged: Iterable[CheckpointStaged], bucket: str) -> Assembled | Waiting | Refusal:
    """Put the parts of one step together, in stream order. Same facts, same bytes.

    Parts of other generations, and of nodes that the placement does not name, are left out.
    """
    members = {member.node_id: set(member.ranks) for member in placed.members}
    parts: dict[str, CheckpointStaged] = {}
    for part in staged:
        if part.generation == placed.generation and part.node_id in members:
            # The first word of a node counts: every instance decides from the same one.
            parts.setdefault(part.node_id, part)
    for node_id, part in parts.items():
        if set(part.ranks) != members[node_id] or part.world_size != placed.world_size:
            return Refusal(
                f"node {node_id} staged ranks {sorted(part.ranks)} of {part.world_size}, but generation "
                f"{placed.generation} placed ranks {sorted(members[node_id])} of {placed.world_size} there"
            )
    missing = set(range(placed.world_size)).difference(*(part.ranks for part in parts.values()))
    if missing:
        return Waiting(tuple(sorted(missing)))
    ordered = sorted(parts.values(), key=lambda part: min(part.ranks))
    first = ordered[0]
    for part in ordered[1:]:
        if (part.epoch, part.samples_consumed) != (first.epoch, first.samples_consumed):
            return Refusal(
                f"the ranks disagree about step {first.step}: node {first.node_id} is at sample "
                f"{first.samples_consumed} of epoch {first.epoch}, node {part.node_id} at sample "
                f"{part.samples_consumed} of epoch {part.epoch}"
            )
    files: dict[str, CheckpointFile] = {}
    for part in ordered:
        for file in part.files:
            if problem := _file_problem(file, bucket):
                return Refusal(problem)
            if files.setdefault(file.path, file) != file:
                return Refusal(f"two ranks wrote different contents to {file.path!r}: give each rank its own file")
    if not files:
        return Refusal(f"the checkpoint of step {first.step} has no files")
    # The lowest rank's word on a metric goes before the others'.
    metrics = {name: value for part in reversed(ordered) for name, value in part.metrics.items()}
    listed = tuple(files[path] for path in sorted(files))
    manifest = {
        "version": 1,
        "run_id": placed.run_id,
        "experiment": placed.spec.experiment,
        "generation": placed.generation,
        "step": first.step,
        "epoch": first.epoch,
        "samples_consumed": first.samples_consumed,
        "world_size": placed.world_size,
        "files": [file.model_dump(mode="json") for file in listed],
        "metrics": metrics,
    }
    uri = manifest_uri(bucket, placed.spec.experiment, placed.run_id, first.epoch, first.step, placed.generation)
    ref = CheckpointRef(uri=uri, step=first.step, epoch=first.epoch, samples_consumed=first.samples_consumed)
    return Assembled(ref, canonical_json(manifest), listed, metrics, any(part.final for part in ordered))


def manifest_uri(bucket: str, experiment: str, run_id: str, epoch: int, step: int, generation: int) -> str:
    """Where a checkpoint's manifest is. The generation is part of the name: see the top of this file."""
    return f"s3://{bucket}/{experiment}/{run_id}/checkpoints/epoch_{epoch}/step_{step:08d}.g{generation}.json"


def canonical_json(value: Any) -> bytes:
    """The one way to write ``value``: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _file_problem(file: CheckpointFile, bucket: str) -> str:
    if any(part in ("", ".", "..") for part in file.path.split("/")):
        return f"the file path {file.path!r} leaves the checkpoint's folder"
    if sum(chunk.size_bytes for chunk in file.chunks) != file.size_bytes:
        return f"the chunks of {file.path!r} do not add up to its {file.size_bytes} bytes"
    for chunk in file.chunks:
        if chunk.uri != blob_uri(bucket, chunk.sha256):
            return f"{file.path!r} must be stored as blobs by their hash in bucket {bucket}, not as {chunk.uri}"
    return ""


def blob_uri(bucket: str, sha256: str) -> str:
    return f"s3://{bucket}/{BLOBS}{sha256[:2]}/{sha256}"
