"""The ledger of garbage collection in the bucket, and what is new in the log since it was written."""

from __future__ import annotations

import asyncio
from datetime import datetime

import structlog

from contracts import topology
from services.checkpoint.core.ledger import LEDGER_FACTS, Ledger
from services.checkpoint.core.ledger_codec import LedgerRefused, decode, encode
from services.kit.bus import Bus
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore

log = structlog.get_logger(__name__)

#: It may be removed at any time: the next collection then folds the whole log.
LEDGER_KEY = "gc/ledger"


class LedgerStore:
    """Reads and writes the ledger. It is a cache of the log, and only used with the stream that it was made of."""

    def __init__(self, bus: Bus, objects: ObjectStore, bucket: str) -> None:
        self._bus, self._objects = bus, objects
        self._uri = f"s3://{bucket}/{LEDGER_KEY}"
        self._stream = ""

    async def read(self) -> tuple[Ledger, int]:
        """Return the ledger of all facts up to now, and how many had to be read for it."""
        info = await self._bus.js.stream_info(topology.FACTS.name)
        created = info.created
        self._stream = created.isoformat() if isinstance(created, datetime) else str(created)
        ledger, facts = await self._load(info.state.last_seq), 0
        filters = tuple(event.subject_filter() for event in LEDGER_FACTS)
        start = ledger.sequence + 1
        async for batch in self._bus.follow(topology.FACTS.name, filters, start, until_caught_up=True):
            for received in batch:
                ledger.apply(received.event, received.envelope.time, received.sequence)
            facts += len(batch)
        return ledger, facts

    async def write(self, ledger: Ledger) -> None:
        """Store the ledger that ``read`` has returned."""
        await self._objects.put(self._uri, await asyncio.to_thread(encode, ledger, self._stream))

    async def _load(self, last_sequence: int) -> Ledger:
        try:
            ledger = await asyncio.to_thread(decode, await self._objects.get(self._uri), self._stream)
            if ledger.sequence > last_sequence:
                raise LedgerRefused("it is of facts that are no longer in the log")
        except ObjectNotFound:
            return Ledger()
        except LedgerRefused as error:
            log.warning("the ledger is not used, folding the log", uri=self._uri, reason=str(error))
            return Ledger()
        return ledger
