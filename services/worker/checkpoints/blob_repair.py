"""Rotten blobs, written anew from what this node still has of them."""

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
    """Hears what was found wrong in the store, and mends it in the background, one finding after the other."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    def handle_fact(self, event: Event) -> None:
        """Take note of a fact that says how the store is."""
        match event:
            case CheckpointRefused():
                # Perhaps something we relied upon is not there: look before relying on anything again.
                self._context.known_blobs.forget()
            case CheckpointRotten():
                # Whatever becomes of the repair, no upload of ours relies on them any more.
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
        async with self._one_at_a_time:
            try:
                await repair(self._context, rotten)
            except TransientError as error:
                log.warning("what is rotten could not be mended", uri=rotten.uri, error=str(error))


async def repair(context: NodeContext, rotten: CheckpointRotten) -> list[str]:
    """Write anew what this node has of the rotten blobs and say so; return their addresses.

    The bytes are hashed again before they are sent, and once more by the store: what is not right here does no harm.
    """
    repaired = []
    differences: dict[str, Chunk] | None = None
    for uri in rotten.blobs:
        digest = blob_sha256(uri)
        content = await asyncio.to_thread(kit.read_verified, context.cache.find(digest), digest) if digest else None
        if content is None and digest:
            if differences is None:
                differences = await _differences(context, rotten.uri)
            content = await asyncio.to_thread(_encode_anew, context, differences.get(uri), digest)
        if content is None:
            continue
        await context.objects.put(uri, content)
        log.info("rotten blob written anew", blob=uri, step=rotten.step)
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


async def _differences(context: NodeContext, manifest_uri: str) -> dict[str, Chunk]:
    """Blob -> the difference in it, of all that a manifest names, also those below others."""
    try:
        files = await context.cache.manifest_files(manifest_uri)
    except CacheError as error:
        log.warning("rotten differences cannot be made anew", error=str(error))
        return {}
    found: dict[str, Chunk] = {}
    for file in files:
        for chunk in file.chunks:
            below: Chunk | None = chunk
            while below is not None and below.base is not None:
                found[below.uri] = below
                below = below.base
    return found


def _encode_anew(context: NodeContext, chunk: Chunk | None, digest: str) -> bytes | None:
    """The difference's blob, from the piece and its base; None unless it becomes the very same bytes."""
    if chunk is None or chunk.base is None:
        return None
    find = context.cache.find
    piece = kit.read_verified(find(chunk.sha256), chunk.sha256)
    base = kit.read_verified(find(chunk.base.sha256), chunk.base.sha256)
    if piece is None or base is None:
        return None
    for width in kit.WIDTHS:
        blob = kit.encode(piece, base, width)
        if hashlib.sha256(blob).hexdigest() == digest:
            return blob
    return None
