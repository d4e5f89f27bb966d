"""A proxy before an object store that is as bad as the network can be: late, narrow, full of errors, frozen.

It speaks as much HTTP/1.1 as S3 clients do. Every answer waits for the latency; a share of the answers is an error
(503), breaks off in the middle or is cut before its first byte; all bodies together get so many bytes a second; and
everything stands still while it is frozen.
"""

from __future__ import annotations

import asyncio
import random
import time

from tests.tcp_proxy import PORTION, TcpProxy

BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


class FaultProxy(TcpProxy):
    """Answers as late, as slowly and as wrongly as it is told."""

    def __init__(
        self,
        upstream: int,
        *,
        latency_s: float = 0.0,
        error_share: float = 0.0,
        bytes_per_s: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(upstream)
        self._random = random.Random(seed)
        self.latency_s, self.error_share, self.bytes_per_s = latency_s, error_share, bytes_per_s
        #: Bytes of bodies that were given out, answers, and those of them that were faults.
        self.egress_bytes = self.answers = self.faults = 0
        self._free_at_s = self._frozen_until_s = 0.0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def freeze(self, seconds: float) -> None:
        """Nothing comes through for so long: no answer, and no byte of those that are on their way."""
        self._frozen_until_s = time.monotonic() + seconds

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await self._answer(reader, writer):
            pass

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection can be used for another."""
        head = await reader.readuntil(b"\r\n\r\n")
        if b"100-continue" in head.lower():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            # The store would say so, too, before its answer.
            head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:"))
        body = await reader.readexactly(_length(head) or 0)
        await asyncio.sleep(self.latency_s)
        await self._thaw()
        self.answers += 1
        fault = self._random.choice(("busy", "cut", "broken")) if self._random.random() < self.error_share else ""
        self.faults += bool(fault)
        if fault == "busy":
            writer.write(BUSY)
            await writer.drain()
            return True
        if fault == "cut":
            return False
        from_store, to_store = await self.connect()
        try:
            to_store.write(head + body)
            answer = await from_store.readuntil(b"\r\n\r\n")
            writer.write(answer)
            size = 0 if head.startswith(b"HEAD") or answer[9:12] in (b"204", b"304") else _length(answer)
            if size is None:
                return False  # chunked: no S3 store does it for what is measured here
            left = size // 2 if fault == "broken" else size
            while left:
                portion = await from_store.read(min(PORTION, left))
                if not portion:
                    return False
                left -= len(portion)
                await self._pace(len(portion))
                self.egress_bytes += len(portion)
                writer.write(portion)
                await writer.drain()
        finally:
            to_store.close()
        return fault != "broken"

    async def _pace(self, size_bytes: int) -> None:
        await self._thaw()
        if self.bytes_per_s is not None:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self.bytes_per_s
            await asyncio.sleep(self._free_at_s - now_s)
            await self._thaw()

    async def _thaw(self) -> None:
        while (left_s := self._frozen_until_s - time.monotonic()) > 0:  # noqa: ASYNC110 - it may be prolonged meanwhile
            await asyncio.sleep(left_s)


def _length(head: bytes) -> int | None:
    """What Content-Length says, None if it is not there."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return None
