"""A proxy before a nats-server that can be cut: then nothing comes through, in both directions, and nobody is told."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

PORTION = 64 * 1024


class CuttableProxy:
    """Listens on a port of its own; use it as an async context manager."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    def cut(self) -> None:
        """Forward nothing from now on. What is sent meanwhile is delivered late, as TCP does."""
        self._is_open.clear()

    def heal(self) -> None:
        """Forward again."""
        self._is_open.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(OSError):
            await self._is_open.wait()
            answers, requests = await asyncio.open_connection("127.0.0.1", self._upstream)
            await asyncio.gather(self._forward(reader, requests), self._forward(answers, writer))
        self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while portion := await reader.read(PORTION):
                await self._is_open.wait()
                writer.write(portion)
                await writer.drain()
        finally:
            writer.close()
