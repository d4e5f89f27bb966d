"""Progress bars on stderr, where stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.replay.log import Entry
    from trainbus.client.fact_log import FactLog

#: Entries between two updates of the bar.
STRIDE = 500


@contextmanager
def count_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many of ``total`` are done; the block calls what it gets with the number so far."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total or None)
        yield lambda done: shown.update(task, completed=done)


@contextmanager
def byte_bar(title: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show how many bytes are done; the block calls what it gets with (bytes so far, all bytes)."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


async def entries_with_bar(log: FactLog, title: str) -> AsyncIterator[Entry]:
    """Yield the entries of a log and show how far it is read."""
    with count_bar(title, log.length) as advance:
        count = 0
        async for entry in log.entries():
            count += 1
            if count % STRIDE == 0:
                advance(entry.sequence if log.length and log.name == "the bus" else count)
            yield entry
