"""From folders on this node to the object store: checkpoints by content, artifacts by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from contracts.events.checkpoint import CheckpointFile, Chunk
from contracts.events.run import Artifact
from contracts.ranks import CheckpointLine
from services.kit.objects import Objects, hash_file
from services.worker.cache import Cache
from services.worker.files import inside

log = structlog.get_logger(__name__)

PARALLEL_UPLOADS = 4


class UploadError(ValueError):
    """What a rank named cannot be uploaded; the text says why."""


async def upload_checkpoint(
    lines: Sequence[CheckpointLine], folder: Path, objects: Objects, bucket: str, cache: Cache
) -> tuple[CheckpointFile, ...]:
    """Upload the files of all local ranks' folders of one step. What the store has is not sent again.

    Raises:
        UploadError: a folder is not there or not the generation's own, or two ranks disagree on a file.
    """
    files: dict[str, Path] = {}
    for line in lines:
        source = Path(line.folder) if Path(line.folder).is_absolute() else folder / line.folder
        if not source.is_dir() or not inside(source, folder):
            raise UploadError(f"checkpoint folder {line.folder!r} is not a folder inside the generation's own")
        for path in sorted(source.rglob("*")):
            if path.is_file() and not path.is_symlink():
                name = path.relative_to(source).as_posix()
                known = files.setdefault(name, path)
                if known != path and await _hash(known) != await _hash(path):
                    raise UploadError(f"two ranks of this node wrote different files as {name!r}: name them by rank")
    gate = asyncio.Semaphore(PARALLEL_UPLOADS)

    async def send(name: str, path: Path) -> CheckpointFile:
        async with gate:
            digest = await _hash(path)
            uri, _ = await objects.upload_blob(path, bucket, sha256=digest)
            await asyncio.to_thread(cache.add, path, digest)
            size_bytes = path.stat().st_size
            chunk = Chunk(sha256=digest, size_bytes=size_bytes, uri=uri)
            return CheckpointFile(path=name, sha256=digest, size_bytes=size_bytes, chunks=(chunk,))

    return tuple(await asyncio.gather(*(send(name, path) for name, path in sorted(files.items()))))


async def upload_artifacts(names: Sequence[str], folder: Path, objects: Objects, base_uri: str) -> tuple[Artifact, ...]:
    """Upload the files that a result names. What is not there, or not the run's own, is left out."""
    artifacts = []
    for name in dict.fromkeys(names):
        path = folder / name
        if path.is_symlink() or not path.is_file() or not inside(path, folder):
            log.warning("artifact is not a file in the generation's folder", artifact=name)
            continue
        short = path.resolve().relative_to(folder.resolve()).as_posix()
        uri = f"{base_uri}/{short}"
        digest = await _hash(path)
        await objects.upload(path, uri)
        artifacts.append(Artifact(name=short, uri=uri, sha256=digest, size_bytes=path.stat().st_size))
    return tuple(artifacts)


async def _hash(path: Path) -> str:
    return await asyncio.to_thread(hash_file, path)
