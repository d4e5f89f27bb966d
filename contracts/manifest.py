"""The manifest of a checkpoint: the files that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from pydantic import TypeAdapter, ValidationError

from contracts.events.checkpoint import CheckpointFile

#: The address of a manifest, with its run.
MANIFEST_URI = re.compile(r"s3://[^/]+/[^/]+/(?P<run_id>[^/]+)/checkpoints/epoch_-?\d+/step_-?\d+\.g\d+\.json")
#: Folder in a checkpoint of a Task with what its model needs beside the weights (``Task.artifacts``).
ARTIFACTS_FOLDER = "artifacts"
_FILES = TypeAdapter(tuple[CheckpointFile, ...])


def files_of(manifest: bytes) -> tuple[CheckpointFile, ...]:
    """Return the files that a manifest names.

    Raises:
        ValueError: this is no manifest, so the blobs that it needs are unknown.
    """
    try:
        return _FILES.validate_python(json.loads(manifest)["files"])
    except (KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"not a manifest: {error!r}") from error


def artifacts_of(files: Iterable[CheckpointFile]) -> dict[str, CheckpointFile]:
    """Return the artifacts of a Task among the files of a checkpoint, by their names."""
    prefix = f"{ARTIFACTS_FOLDER}/"
    return {file.path.removeprefix(prefix): file for file in files if file.path.startswith(prefix)}


def run_of_manifest(uri: str | None) -> str | None:
    """Return the run whose checkpoint a manifest's address names; None for any other text."""
    match = MANIFEST_URI.fullmatch(uri or "")
    return match["run_id"] if match else None
