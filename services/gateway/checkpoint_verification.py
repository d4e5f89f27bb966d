"""Verify checkpoints: read back every blob that their manifests name and compare it with its hash."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from contracts.manifest import Blob, blobs_of_files, files_of
from contracts.verification import CheckpointVerification
from services.gateway.core.rows import Checkpoint
from services.gateway.long_answer import Advance
from services.kit.concurrency import gather_limited
from services.kit.messages import TransientError
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.kit.store.uris import blob_sha256

#: Blobs that are read at the same time.
PARALLEL = 4


async def verify_checkpoints(
    objects: ObjectStore, checkpoints: Sequence[Checkpoint], advance: Advance
) -> CheckpointVerification:
    """Find checkpoints with blobs that are missing or differ from their hash.

    Each blob is read once, also if several checkpoints share it. ``advance`` gets (bytes read, all bytes).
    """
    rotten: dict[str, set[str]] = {}
    users: dict[Blob, list[str]] = {}
    for each in checkpoints:
        blobs = await _read_blobs(objects, each)
        if blobs is None:
            rotten[each.uri] = {each.uri}
        for blob in blobs or ():
            users.setdefault(blob, []).append(each.uri)
    done, total = 0, sum(blob.size_bytes for blob in users)

    async def check(blob: Blob) -> None:
        nonlocal done
        if not await _is_intact(objects, blob):
            for uri in users[blob]:
                rotten.setdefault(uri, set()).add(blob.uri)
        done += blob.size_bytes
        advance(done, total)

    await gather_limited((check(blob) for blob in users), limit=PARALLEL)
    runs = {each.uri: each.run_id for each in checkpoints}
    return CheckpointVerification(
        checkpoints=len(checkpoints),
        rotten={uri: sorted(rotten[uri]) for uri in runs if uri in rotten},
        runs=sorted({runs[uri] for uri in rotten}),
    )


async def _read_blobs(objects: ObjectStore, checkpoint: Checkpoint) -> list[Blob] | None:
    """Return the blobs of a checkpoint, None if its manifest is not the one that was committed."""
    try:
        content = await objects.get_or_find_damage(checkpoint.uri)
        if checkpoint.manifest_sha256 not in (None, hashlib.sha256(content).hexdigest()):
            return None
        return await asyncio.to_thread(lambda: list(blobs_of_files(files_of(content))))
    except (ObjectNotFound, ValueError):
        return None


async def _is_intact(objects: ObjectStore, blob: Blob) -> bool:
    try:
        return await objects.hash(blob.uri) == blob_sha256(blob.uri)
    except ObjectNotFound:
        return False
    except TransientError:
        # A store with checksums of its own does not serve rotten bytes. If it is away, this raises, too.
        await objects.head(blob.uri)
        return False
