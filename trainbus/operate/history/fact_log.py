"""The facts that the scheduler folds, from the bus or from a file: the same entries on every read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from contracts import topology
from contracts.envelope import RawMessage
from trainbus.client.errors import UsageError
from trainbus.operate.connection import Connection
from trainbus.operate.history.log import FOLLOWED, Entry, LogError, entry_of, read
from trainbus.operate.history.requests import REQUEST_SUBJECTS, RequestIndex


class FactLog(Protocol):
    """A log that can be read more than once."""

    name: str
    #: Entries, or the last sequence number; 0 while it is not known.
    length: int

    def entries(self) -> AsyncIterator[Entry]:
        """Yield every entry, in order."""
        ...

    async def requests(self) -> RequestIndex | None:
        """Return the requests that are answered in it; None where they are not known."""
        ...


class FileLog:
    """A log in a JSONL file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UsageError(f"there is no file {path}")
        self.path, self.name, self.length = path, str(path), 0

    async def entries(self) -> AsyncIterator[Entry]:
        count = 0
        try:
            for entry in read(self.path):
                count += 1
                yield entry
        except LogError as error:
            raise UsageError(str(error)) from error
        self.length = count

    async def requests(self) -> RequestIndex | None:
        return None


class BusLog:
    """The stream of facts, up to the sequence number ``end``."""

    name = "the bus"

    def __init__(self, connection: Connection, end: int) -> None:
        self.connection, self.length = connection, end

    @classmethod
    async def open(cls, connection: Connection) -> BusLog:
        """Return the log up to its present end."""
        return cls(connection, await connection.last_sequence(topology.FACTS))

    async def entries(self) -> AsyncIterator[Entry]:
        async for raw in _read_until(self.connection, topology.FACTS, FOLLOWED, self.length):
            yield entry_of(raw)

    async def requests(self) -> RequestIndex | None:
        found = RequestIndex()
        end = await self.connection.last_sequence(topology.REQUESTS)
        async for raw in _read_until(self.connection, topology.REQUESTS, REQUEST_SUBJECTS, end):
            found.add(raw)
        return found


async def _read_until(
    connection: Connection, stream: topology.Stream, filters: tuple[str, ...], end: int
) -> AsyncIterator[RawMessage]:
    """Yield the messages on these subjects up to the sequence number ``end``."""
    async for batch in connection.follow_raw(stream, *filters, until_caught_up=True):
        for raw in batch:
            if raw.sequence > end:
                return
            yield raw
