"""Reading the past for commands: from the bus or from a file, with a bar where it takes a while."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from contracts import topology
from contracts.envelope import RawMessage
from services.scheduler.replay.log import FOLLOWED, Entry, LogError, entry_of, read
from services.scheduler.replay.requests import REQUEST_SUBJECTS, RequestIndex
from trainbus.client.address import Address
from trainbus.client.connection import Link, connect
from trainbus.client.errors import USAGE, CliError

#: Entries between two looks at the bar.
STRIDE = 500


class Past(Protocol):
    """A log that can be read as often as one likes, and is the same every time."""

    name: str

    def entries(self, title: str) -> AsyncIterator[Entry]:
        """Every entry, in order."""
        ...

    async def requests(self) -> RequestIndex | None:
        """The requests that were answered in it; None where they are not known."""
        ...


class FileLog:
    """A log in a file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise CliError(f"there is no file {path}", USAGE)
        self.path, self.name = path, str(path)
        self._count = 0

    async def entries(self, title: str) -> AsyncIterator[Entry]:
        count = 0
        with bar(title, self._count) as advance:
            try:
                for count, entry in enumerate(read(self.path), 1):
                    if count % STRIDE == 0:
                        advance(count)
                    yield entry
            except LogError as error:
                raise CliError(str(error), USAGE) from error
        self._count = count

    async def requests(self) -> RequestIndex | None:
        return None


class BusLog:
    """The stream of facts, up to where it is at this moment."""

    name = "the bus"

    def __init__(self, link: Link, end: int) -> None:
        self.link, self.end = link, end

    async def entries(self, title: str) -> AsyncIterator[Entry]:
        with bar(title, self.end) as advance:
            async for raw in _messages(self.link, topology.FACTS, FOLLOWED, self.end):
                if raw.sequence % STRIDE == 0:
                    advance(raw.sequence)
                yield entry_of(raw)

    async def requests(self) -> RequestIndex | None:
        found = RequestIndex()
        end = await self.link.last_sequence(topology.REQUESTS)
        async for raw in _messages(self.link, topology.REQUESTS, REQUEST_SUBJECTS, end):
            found.add(raw)
        return found


class OpenPast:
    """The log that is meant: a file, or what the stack's bus holds."""

    def __init__(self, address: Callable[[], Address], path: Path | None) -> None:
        self._address, self._path = address, path
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Past:
        if self._path is not None:
            return FileLog(self._path)
        link = await self._stack.enter_async_context(connect(self._address()))
        return BusLog(link, await link.last_sequence(topology.FACTS))

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()


async def _messages(
    link: Link, stream: topology.Stream, filters: tuple[str, ...], end: int
) -> AsyncIterator[RawMessage]:
    """What is on these subjects up to the sequence ``end``."""
    async for batch in link.raw(stream, *filters, until_caught_up=True):
        for raw in batch:
            if raw.sequence > end:
                return
            yield raw


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if somebody sits there."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total or None)
        yield lambda done: shown.update(task, completed=done)


__all__ = ["BusLog", "FileLog", "OpenPast", "Past", "bar"]
