"""From the staged parts of a checkpoint to its manifest.

Why each manifest has its generation in its name (``step_00000100.g2.json``). A resumed run reaches the
same step again when the commit of that step was never published (the service was killed between manifest
and commit) or was not yet seen by the scheduler when it placed the run again. With one name for both, the
second generation would find the first one's manifest and would have to overwrite it, while others
restore from it, or go without a checkpoint. With two names nothing is ever overwritten, and the
one truth about what is committed is the stream: a manifest counts if a ``checkpoint_committed`` names it,
and that fact is fenced by the placement. One that no fact names is never restored from, and swept later.
Within one generation the manifest is a function of stored facts, so all instances write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from contracts.events.checkpoint import (
    CheckpointCommitted,
    CheckpointFile,
    CheckpointStaged,
    Chunk,
    Exactness,
    FileListing,
)
from contracts.events.run import CheckpointRef, RunPlaced
from contracts.manifest import MAX_LISTING_BYTES, Blob, blobs_of_files
from services.checkpoint.core.digests import DIGESTS, MAX_DIGESTS_BYTES, state_digest, union

BLOBS = "blobs/sha256/"
BLOB_NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{62})")
#: Differences on differences, at most: as many as ``kit/chunks.py``, which restores them, undoes.
MAX_CHAIN = 4


@dataclass(frozen=True, slots=True)
class MissingParts:
    """Other nodes' parts are still missing."""

    missing_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The parts can never make a checkpoint, for this reason."""

    reason: str
    #: The ranks did their part: the store lacks something, or holds something else.
    infrastructure_failure: bool = False


@dataclass(frozen=True, slots=True)
class AssembledCheckpoint:
    """Every rank's part is there. What remains is to verify the files against the store, and to seal it."""

    run_id: str
    generation: int
    ref: CheckpointRef
    #: The manifest without the hash over the ranks' digests.
    body: Mapping[str, Any]
    files: tuple[CheckpointFile, ...]
    metrics: dict[str, float]
    final: bool
    exactness: Exactness

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def digest_files(self) -> tuple[CheckpointFile, ...]:
        """The files with the ranks' digests of what they hold; none from a program that is not our Trainer."""
        return tuple(file for file in self.files if DIGESTS.match(file.path))

    @property
    def blobs(self) -> dict[Blob, str]:
        """Every blob that is needed to get the files back, and the first file that needs it."""
        return blobs_of_files(self.files)

    def as_committed(self, state_digest: str | None = None, manifest_sha256: str | None = None) -> CheckpointCommitted:
        """Return the fact that commits it; without a manifest, as a candidate to be compared with others."""
        return CheckpointCommitted(
            run_id=self.run_id,
            generation=self.generation,
            checkpoint=self.ref,
            size_bytes=self.size_bytes,
            metrics=self.metrics,
            final=self.final,
            exactness=self.exactness,
            state_digest=state_digest,
            manifest_sha256=manifest_sha256,
        )


@dataclass(frozen=True, slots=True)
class SealedCheckpoint:
    """A manifest in its final bytes, and the fact that commits it."""

    manifest: bytes
    commit: CheckpointCommitted


def select_parts(placed: RunPlaced, staged: Iterable[CheckpointStaged]) -> list[CheckpointStaged] | MissingParts:
    """Return the parts that one step is made of, in the order of their ranks. Their files do not matter here.

    Parts of other generations, and of other nodes or ranks than the placement names, are left out.
    """
    members = {member.node_id: set(member.ranks) for member in placed.members}
    parts: dict[str, CheckpointStaged] = {}
    for part in staged:
        is_placed = part.generation == placed.generation and set(part.ranks) == members.get(part.node_id)
        if is_placed and part.world_size == placed.world_size:
            # The first part of a node counts: every instance decides from the same one.
            parts.setdefault(part.node_id, part)
    if whole := [part for part in parts.values() if part.is_whole]:
        parts = {part.node_id: part for part in whole[:1]}
    missing = set[int]().union(*members.values()).difference(*(part.ranks for part in parts.values()))
    if missing and not whole:
        return MissingParts(tuple(sorted(missing)))
    return sorted(parts.values(), key=lambda part: min(part.ranks))


def assemble(
    placed: RunPlaced, staged: Iterable[CheckpointStaged], bucket: str
) -> AssembledCheckpoint | MissingParts | Refusal:
    """Put the parts of one step together, in stream order. Same facts, same bytes.

    ``files`` of each part are all of its files: those of a listing were read before.
    """
    ordered = select_parts(placed, staged)
    if isinstance(ordered, MissingParts):
        return ordered
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
    if sum(file.size_bytes for path, file in files.items() if DIGESTS.match(path)) > MAX_DIGESTS_BYTES:
        return Refusal(f"the digests of step {first.step} take more than {MAX_DIGESTS_BYTES:,} bytes")
    exact = all(part.exactness == "exact" for part in ordered)
    exactness: Exactness = "exact" if exact else "samples-exact"
    # The lowest rank's value of a metric goes before the others'.
    metrics = {name: value for part in reversed(ordered) for name, value in part.metrics.items()}
    listed = tuple(files[path] for path in sorted(files))
    manifest = {
        "version": 2,
        "run_id": placed.run_id,
        "experiment": placed.spec.experiment,
        "generation": placed.generation,
        "step": first.step,
        "epoch": first.epoch,
        "samples_consumed": first.samples_consumed,
        "world_size": placed.world_size,
        "files": [file.model_dump(mode="json") for file in listed],
        "metrics": metrics,
        "exactness": exactness,
    }
    if first.step_is_count:
        manifest["step_is_count"] = True
    uri = manifest_uri(bucket, placed.spec.experiment, placed.run_id, first.epoch, first.step, placed.generation)
    ref = CheckpointRef(
        uri=uri,
        step=first.step,
        epoch=first.epoch,
        samples_consumed=first.samples_consumed,
        step_is_count=first.step_is_count,
    )
    final = any(part.final for part in ordered)
    return AssembledCheckpoint(placed.run_id, placed.generation, ref, manifest, listed, metrics, final, exactness)


def seal(placed: RunPlaced, assembled: AssembledCheckpoint, digests: Mapping[str, bytes]) -> SealedCheckpoint | Refusal:
    """Complete the manifest with the hash over the state. ``digests`` are the contents of ``digest_files``."""
    try:
        state = state_digest(union(digests)) if digests else None
    except ValueError as error:
        return Refusal(str(error))
    manifest = canonical_json({**assembled.body, "state_digest": state})
    return SealedCheckpoint(manifest, assembled.as_committed(state, hashlib.sha256(manifest).hexdigest()))


def manifest_uri(bucket: str, experiment: str, run_id: str, epoch: int, step: int, generation: int) -> str:
    """Where a checkpoint's manifest is. The generation is part of the name: see the top of this file."""
    return f"s3://{bucket}/{experiment}/{run_id}/checkpoints/epoch_{epoch}/step_{step:08d}.g{generation}.json"


def canonical_json(value: Any) -> bytes:
    """The one way to write ``value``: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def find_listing_problem(listing: FileListing, bucket: str) -> str:
    """Return why a listing is not read, in words; '' if it is."""
    match = BLOB_NAME.fullmatch(listing.uri.removeprefix(f"s3://{bucket}/{BLOBS}"))
    if match is None or match[2] != listing.sha256:
        return f"a list of files must be a blob by its hash in bucket {bucket}, not {listing.uri}"
    if listing.size_bytes > MAX_LISTING_BYTES:
        return f"a list of files has {listing.size_bytes:,} bytes, more than the {MAX_LISTING_BYTES:,} that are read"
    return ""


def _file_problem(file: CheckpointFile, bucket: str) -> str:
    if any(part in ("", ".", "..") for part in file.path.split("/")):
        return f"the file path {file.path!r} leaves the checkpoint's folder"
    if sum(chunk.size_bytes for chunk in file.chunks) != file.size_bytes:
        return f"the chunks of {file.path!r} do not add up to its {file.size_bytes} bytes"
    if DIGESTS.match(file.path) and any(chunk.encoding != "plain" for chunk in file.chunks):
        return f"{file.path!r} must be stored as it is, not as a difference"
    return next((words for chunk in file.chunks if (words := _chunk_problem(file.path, chunk, bucket))), "")


def _chunk_problem(path: str, chunk: Chunk, bucket: str) -> str:
    """Whether a piece, and each that it is a difference to, is a blob of this bucket."""
    link: Chunk | None = chunk
    for _ in range(MAX_CHAIN + 2):
        if link is None:
            return ""
        name = link.uri.removeprefix(f"s3://{bucket}/{BLOBS}")
        match = BLOB_NAME.fullmatch(name)
        if match is None or (link.encoding == "plain" and match[2] != link.sha256):
            return f"{path!r} must be stored as blobs by their hash in bucket {bucket}, not as {link.uri}"
        if link.encoding == "plain":
            if link.base is not None or link.stored_bytes not in (None, link.size_bytes):
                return f"a piece of {path!r} is stored as it is, and yet with a base or another size: {link.uri}"
        elif link.base is None or link.stored_bytes is None:
            return f"a piece of {path!r} is a difference, but to what, or of which size, is not said: {link.uri}"
        link = link.base
    return f"a piece of {path!r} is a difference on more than {MAX_CHAIN} others: {chunk.uri}"
