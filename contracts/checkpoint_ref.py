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
    #: ``step`` is a version of the script's output folder, counted: at which step it was is not known.
    step_is_count: bool = False

    @property
    def point(self) -> str:
        """What it is a checkpoint of, for people: ``step 40``, or ``version 2``."""
        return name_point(self.step, is_version=self.step_is_count)


def name_point(step: int, *, is_version: bool) -> str:
    """Return what a checkpoint is of, for people: a training step, or a version of an output folder."""
    return f"version {step}" if is_version else f"step {step}"
