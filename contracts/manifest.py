"""The manifest of a checkpoint: the files that it names."""

from __future__ import annotations

import json

from pydantic import TypeAdapter, ValidationError

from contracts.events.checkpoint import CheckpointFile

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
