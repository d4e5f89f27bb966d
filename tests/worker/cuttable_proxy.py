"""A proxy before a nats-server that can be cut: then nothing comes through, in both directions, and nobody is told."""

from __future__ import annotations

import asyncio

from contracts.ranks import format_endpoint
from tests.tcp_proxy import PORTION, TcpProxy


class CuttableProxy(TcpProxy):
    """Forwards everything, but for the time that it is cut."""

    def __init__(self, upstream: int, host: str = "127.0.0.1") -> None:
        super().__init__(upstream, host)
        self._is_open = asyncio.Event()
        self._is_open.set()

    @property
    def url(self) -> str:
        return f"nats://{format_endpoint(self._host, self.port)}"

    def cut(self) -> None:
        """Forward nothing from now on. What is sent meanwhile is delivered late, as TCP does."""
        self._is_open.clear()

    def heal(self) -> None:
        """Forward again."""
        self._is_open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._is_open.wait()
        answers, requests = await self.connect()
        await asyncio.gather(self._forward(reader, requests), self._forward(answers, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while portion := await reader.read(PORTION):
                await self._is_open.wait()
                writer.write(portion)
                await writer.drain()
        finally:
            writer.close()
