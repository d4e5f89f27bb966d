"""The journal of finished shards: a later attempt resumes from it, and garbage collection spares them."""

from __future__ import annotations

import time

import structlog
from pydantic import ValidationError

from contracts.datasets import canonical_json
from contracts.events.dataset import ShardFile
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.sharding.core.garbage import read_journal

log = structlog.get_logger(__name__)

#: Seconds between two writes; a kill loses the shards recorded since the last.
EVERY_S = 5.0


class Journal:
    """One small object beside the ingestion's index. Concurrent writers may lose entries, which only repeats work."""

    def __init__(self, objects: ObjectStore, uri: str, every_s: float = EVERY_S) -> None:
        self._objects, self._uri, self._every_s = objects, uri, every_s
        self._shards: dict[str, ShardFile] = {}
        self._written_at = time.monotonic()

    async def read(self) -> dict[str, ShardFile]:
        """Return the shards that an earlier attempt finished, by name."""
        try:
            self._shards = read_journal(await self._objects.get(self._uri))
        except ObjectNotFound:
            pass
        except (ValueError, ValidationError) as error:
            log.warning("a journal cannot be read: starting without it", uri=self._uri, error=repr(error))
        return dict(self._shards)

    async def record(self, name: str, shard: ShardFile) -> None:
        """Record that this shard and its index are in the store."""
        self._shards[name] = shard
        if time.monotonic() - self._written_at >= self._every_s:
            # Set at once, so that concurrent calls do not write too.
            self._written_at = time.monotonic()
            content = {name: made.model_dump(mode="json") for name, made in self._shards.items()}
            await self._objects.put(self._uri, canonical_json(content))

    async def remove(self) -> None:
        """Remove the journal: from now on the manifest names the shards."""
        await self._objects.delete(self._uri)
