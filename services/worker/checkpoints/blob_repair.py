"""The repair of corrupted blobs, from the copies that this node has."""

from __future__ import annotations

import asyncio
import hashlib

import structlog

from contracts.base import Event
from contracts.events.checkpoint import CheckpointRefused, CheckpointRepaired, CheckpointRotten, Chunk
from services.kit import chunks as kit
from services.kit.bus import TransientError
from services.kit.concurrency import cancel_and_wait
from services.kit.store.uris import blob_sha256
from services.worker.cache.node_cache import CacheError
from services.worker.node_context import NodeContext

log = structlog.get_logger(__name__)


class BlobRepairer:
    """Repairs what the scrubber finds corrupted in the store, one checkpoint after the other, in the background."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    def handle_fact(self, event: Event) -> None:
        """Act on a fact about the state of the store."""
        match event:
            case CheckpointRefused():
                # A blob that an upload relied on may be missing: look each one up again.
                self._context.known_blobs.clear()
            case CheckpointRotten():
                # No upload relies on them any more, even if the repair fails.
                self._context.known_blobs.distrust(blob_sha256(uri) for uri in event.blobs)
                if event.repair:
                    task = asyncio.create_task(self._repair(event))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            case _:
                pass

    async def close(self) -> None:
        await cancel_and_wait(*self._tasks)

    async def _repair(self, rotten: CheckpointRotten) -> None:
        async with self._lock:
            try:
                await repair_blobs(self._context, rotten)
            except TransientError as error:
                log.warning("corrupted blobs could not be repaired", uri=rotten.uri, error=str(error))


async def repair_blobs(context: NodeContext, rotten: CheckpointRotten) -> list[str]:
    """Write the corrupted blobs again that this node has, and publish each; return their addresses.

    The bytes are hashed before they are sent, and again by the store, so that a corrupted copy is never written.
    """
    repaired = []
    deltas: dict[str, Chunk] | None = None
    for uri in rotten.blobs:
        digest = blob_sha256(uri)
        content = await asyncio.to_thread(kit.read_verified, context.cache.find(digest), digest) if digest else None
        if content is None and digest:
            if deltas is None:
                deltas = await _find_deltas(context, rotten.uri)
            content = await asyncio.to_thread(_encode_again, context, deltas.get(uri), digest)
        if content is None:
            continue
        await context.objects.put(uri, content)
        log.info("corrupted blob repaired", blob=uri, step=rotten.step)
        await context.bus.publish(
            CheckpointRepaired(
                run_id=rotten.run_id,
                uri=rotten.uri,
                step=rotten.step,
                blob=uri,
                node_id=context.settings.node_id,
                found_at=rotten.found_at,
            )
        )
        repaired.append(uri)
    return repaired


async def _find_deltas(context: NodeContext, manifest_uri: str) -> dict[str, Chunk]:
    """Return blob -> the chunk that it encodes as a difference, of a manifest's chunks and their bases."""
    try:
        files = await context.cache.manifest_files(manifest_uri)
    except CacheError as error:
        log.warning("corrupted differences cannot be encoded again", error=str(error))
        return {}
    found: dict[str, Chunk] = {}
    for file in files:
        for chunk in file.chunks:
            below: Chunk | None = chunk
            while below is not None and below.base is not None:
                found[below.uri] = below
                below = below.base
    return found


def _encode_again(context: NodeContext, chunk: Chunk | None, digest: str) -> bytes | None:
    """Return a difference's blob, from chunk and base; None unless it is the same bytes as before."""
    if chunk is None or chunk.base is None:
        return None
    find = context.cache.find
    piece = kit.read_verified(find(chunk.sha256), chunk.sha256)
    base = kit.read_verified(find(chunk.base.sha256), chunk.base.sha256)
    if piece is None or base is None:
        return None
    for width in kit.WIDTHS:
        blob = kit.encode_difference(piece, base, width)
        if hashlib.sha256(blob).hexdigest() == digest:
            return blob
    return None
