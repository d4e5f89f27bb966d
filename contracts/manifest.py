"""The manifest of a checkpoint, and the listing of one node's part: the files that they name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError

from contracts.events.checkpoint import CheckpointFile, Chunk

#: The address of a manifest, with its run and generation.
MANIFEST_URI = re.compile(
    r"s3://[^/]+/[^/]+/(?P<run_id>[^/]+)/checkpoints/epoch_-?\d+/step_-?\d+\.g(?P<generation>\d+)\.json"
)
#: Folder in a checkpoint of a Task with what its model needs beside the weights (``Task.artifacts``).
ARTIFACTS_FOLDER = "artifacts"
#: The longest list of files that stands in a fact: 350 to 450 chunks. Each reader of a run decodes all of its facts.
MAX_INLINE_BYTES = 128 * 2**10
#: The longest listing that is read: 230,000 chunks, 1.8 TB of one node's. It is parsed in memory.
MAX_LISTING_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Blob:
    """An object that the store must hold; its name is the hash of its bytes."""

    uri: str
    sha256: str
    size_bytes: int


class _Files(BaseModel):
    files: tuple[CheckpointFile, ...]


def files_of(manifest: bytes) -> tuple[CheckpointFile, ...]:
    """Return the files that a manifest or a listing names.

    Raises:
        ValueError: this is neither, so the blobs that it needs are unknown.
    """
    try:
        return _Files.model_validate_json(manifest).files
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"not a manifest: {place}: {first['msg']}") from error


def encode_listing(files: Iterable[CheckpointFile]) -> bytes:
    """Return the listing of files: JSON of ``{"files": [...]}``, which ``files_of`` reads."""
    return _Files(files=tuple(files)).model_dump_json(exclude_defaults=True).encode()


def artifacts_of(files: Iterable[CheckpointFile]) -> dict[str, CheckpointFile]:
    """Return the artifacts of a Task among the files of a checkpoint, by their names."""
    prefix = f"{ARTIFACTS_FOLDER}/"
    return {file.path.removeprefix(prefix): file for file in files if file.path.startswith(prefix)}


def run_of_manifest(uri: str | None) -> str | None:
    """Return the run whose checkpoint a manifest's address names; None for any other text."""
    match = MANIFEST_URI.fullmatch(uri or "")
    return match["run_id"] if match else None


def blobs_of_files(files: Iterable[CheckpointFile]) -> dict[Blob, str]:
    """Every blob that is needed to get the files back, bases included, and the first file that needs it."""
    found: dict[Blob, str] = {}
    for file in files:
        for chunk in file.chunks:
            link: Chunk | None = chunk
            while link is not None:
                plain = link.encoding == "plain" or link.stored_bytes is None
                size_bytes = link.size_bytes if plain else link.stored_bytes
                found.setdefault(Blob(link.uri, link.uri.rsplit("/", 1)[1], size_bytes or 0), file.path)
                link = link.base
    return found
