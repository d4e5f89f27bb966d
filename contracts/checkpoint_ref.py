"""What names a committed checkpoint. Apart from the facts that have it: lists of runs have it, too."""

from __future__ import annotations

from contracts.base import FactPart, ObjectUri, Sha256


class CheckpointRef(FactPart):
    """A committed checkpoint: enough to resume from."""

    uri: ObjectUri
    step: int
    epoch: int
    samples_consumed: int
    #: Of the manifest's bytes. Who resumes refuses any others.
    manifest_sha256: Sha256 | None = None
    #: The script has reported no step: ``step`` counts its checkpoints.
    step_is_count: bool = False
