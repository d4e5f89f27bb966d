"""Reads of the read model in SQLite."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sqlalchemy as sa

#: Questions that are answered at a time.
THREADS = 8


class SqliteReader:
    """Answers each question in one visit to a thread.

    Through aiosqlite it takes six, and each waits for the interpreter's lock and for the event loop's next turn.
    """

    def __init__(self, url: sa.URL) -> None:
        self._engine = sa.create_engine(url.set(drivername="sqlite"), pool_size=THREADS)
        sa.event.listen(self._engine, "connect", set_pragmas)
        self._threads = ThreadPoolExecutor(THREADS, "sqlite-reader")

    async def fetch(self, statement: sa.Executable) -> list[sa.RowMapping]:
        """Return the rows that a query gives."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._fetch, statement)

    def _fetch(self, statement: sa.Executable) -> list[sa.RowMapping]:
        with self._engine.connect() as connection:
            return list(connection.execute(statement).mappings())

    async def close(self) -> None:
        """Wait for the questions under way, and close the connections."""
        await asyncio.to_thread(self._threads.shutdown)
        self._engine.dispose()


def set_pragmas(connection: Any, _: object) -> None:
    """Prepare a new connection."""
    cursor = connection.cursor()
    # Readers do not wait for the writer; a crash of the machine may lose the last commits, which
    # are then projected again from the stream.
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA busy_timeout=15000")
    # As in PostgreSQL: a pattern with * in its middle means what one without means.
    cursor.execute("PRAGMA case_sensitive_like=ON")
    cursor.close()
