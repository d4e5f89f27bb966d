"""The socket of a service's HTTP interface."""

from __future__ import annotations

import asyncio
import socket

import pytest

from services.kit.http_server import open_listener


async def test_an_answer_in_two_parts_is_sent_at_once() -> None:
    options: list[int] = []

    class Answer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted = transport.get_extra_info("socket")
            options.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    listener = open_listener("127.0.0.1", 0)
    server = await asyncio.get_running_loop().create_server(Answer, sock=listener)
    async with server:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b""
        writer.close()
    assert options == [1]


def test_a_port_in_use_is_an_error() -> None:
    with open_listener("127.0.0.1", 0) as first, pytest.raises(OSError, match=str(first.getsockname()[1])):
        open_listener("127.0.0.1", first.getsockname()[1])
