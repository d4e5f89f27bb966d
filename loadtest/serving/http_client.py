"""A client of HTTP/1.1 that costs a tenth of a general one: under load it must not take the cores from the server."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
CLOSE = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Response:
    """A response; ``head`` has its status line and headers."""

    status: int
    head: bytes
    body: bytes


class Connection(asyncio.Protocol):
    """A connection, which has one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._response: asyncio.Future[Response] | None = None
        self.is_open = True

    async def send(self, request: bytes) -> Response:
        """Send a request and return its response.

        Raises:
            ConnectionError: the connection has ended before.
        """
        assert self._transport is not None
        self._response = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._response

    def close(self) -> None:
        """End the connection."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(HEAD_END)
        if end < 0:
            return
        head, rest = self._received[:end], self._received[end + len(HEAD_END) :]
        if (body := _read_body(head, rest)) is None:
            return
        self._received = b""
        self.is_open = self.is_open and CLOSE.search(head) is None
        if self._response is not None and not self._response.done():
            self._response.set_result(Response(int(head[9:12]), head, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._response is not None and not self._response.done():
            self._response.set_exception(exc or ConnectionResetError("the server has ended the connection"))


def _read_body(head: bytes, rest: bytes) -> bytes | None:
    """Return the body behind a head; None where it is not whole yet."""
    if CHUNKED.search(head) is None:
        found = CONTENT_LENGTH.search(head)
        size = int(found[1]) if found else 0
        return rest if len(rest) >= size else None
    parts: list[bytes] = []
    while (end := rest.find(b"\r\n")) >= 0:
        size = int(rest[:end].partition(b";")[0], 16)
        if len(rest) < end + size + 4:
            return None
        if size == 0:
            return b"".join(parts)
        parts.append(rest[end + 2 : end + 2 + size])
        rest = rest[end + size + 4 :]
    return None


@dataclass(slots=True)
class HttpClient:
    """Connections to one server: a request takes one that is free, or opens another."""

    url: str
    #: Seconds after which a request is given up.
    timeout_s: float
    _free: list[Connection] = field(default_factory=list)

    async def post(self, body: bytes, content_type: str) -> Response:
        """Return the response to a request.

        Raises:
            OSError, TimeoutError: there is none.
        """
        parts = urlsplit(self.url)
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        head = (
            f"POST {path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        async with asyncio.timeout(self.timeout_s):
            connection = await self._connect(parts.hostname or "", parts.port or 80)
            try:
                response = await connection.send(head.encode() + body)
            except BaseException:
                connection.close()
                raise
        if connection.is_open:
            self._free.append(connection)
        return response

    def close(self) -> None:
        """Close the connections that are free."""
        while self._free:
            self._free.pop().close()

    async def _connect(self, host: str, port: int) -> Connection:
        while self._free:
            if (connection := self._free.pop()).is_open:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
        return connection
