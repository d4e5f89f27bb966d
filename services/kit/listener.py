"""The socket on which a service answers HTTP."""

from __future__ import annotations

import socket


def open_listener(host: str, port: int) -> socket.socket:
    """Listen on an address, and send each part of an answer at once.

    asyncio sets ``TCP_NODELAY`` only on sockets that name TCP as their protocol, which ``create_server`` does not:
    the body of an answer would wait 40 ms for the acknowledgement of its headers. Connections have what their
    listener has.

    Raises:
        OSError: the port is in use, or the host is not this machine's.
    """
    listener = socket.create_server((host, port))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
