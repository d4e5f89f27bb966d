"""Progress bars on stderr, where stderr is a terminal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainbus.commands import render

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from contracts.events.dataset import DatasetIngested, DatasetProgress
    from trainbus.operate.history.fact_log import FactLog
    from trainbus.operate.history.log import Entry

#: Entries between two updates of the bar.
STRIDE = 500


def _make_bar(*columns: ProgressColumn, quiet: bool = False, transient: bool = True) -> Progress:
    from rich.progress import Progress

    console = render.console(stderr=True)
    return Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=transient)


@contextmanager
def count_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many of ``total`` are done; the block calls what it gets with the number so far."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    with _make_bar(TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=total or None)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def byte_bar(title: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show how many bytes are done; the block calls what it gets with (bytes so far, all bytes)."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with _make_bar(*columns, quiet=quiet, transient=False) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def ingestion_bar(*, quiet: bool = False) -> Iterator[Callable[[DatasetIngested | DatasetProgress], None]]:
    """Show an ingestion's progress; the block calls what it gets with each fact about it."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from contracts.events.dataset import DatasetProgress
    from trainbus.commands.dataset_tables import format_ingested

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with _make_bar(*columns, quiet=quiet) as bar:
        task = bar.add_task("waiting", total=None)

        def report(event: DatasetIngested | DatasetProgress) -> None:
            if isinstance(event, DatasetProgress):
                bar.update(task, description=event.phase, completed=event.done, total=event.total)
            elif not quiet:
                uri = f": {event.quarantine_uri}" if event.quarantined else ""
                bar.console.print(render.escape(format_ingested(event) + uri), soft_wrap=True)

        yield report


async def entries_with_bar(log: FactLog, title: str) -> AsyncIterator[Entry]:
    """Yield the entries of a log and show how far it is read."""
    with count_bar(title, log.length) as advance:
        count = 0
        async for entry in log.entries():
            count += 1
            if count % STRIDE == 0:
                advance(entry.sequence if log.length and log.name == "the bus" else count)
            yield entry
