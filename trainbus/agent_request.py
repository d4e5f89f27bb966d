"""One request to the node's agent, on a connection of its own, and its reply."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from contracts.ranks import Line, json_line

#: Seconds after which a waiting rank looks itself whether what it waits for is here.
POLL_S = 5.0
#: Seconds until a request is repeated.
RETRY_S = 0.2


def request_from_agent(
    agent: Path, line: Line, is_here: Callable[[], bool] = lambda: False
) -> tuple[bytes | None, bool]:
    """Return the agent's reply, None if it ended without one or ``is_here`` meanwhile, and whether there was an agent.

    While it waits, this process sits in a read from the agent's socket, and takes no CPU.
    """
    connected, received = False, b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(POLL_S)
        try:
            connection.connect(str(agent))
            connection.sendall(json_line(line))
            connected = True
            while b"\n" not in received:
                try:
                    data = connection.recv(65536)
                except TimeoutError:
                    if is_here():
                        return None, True
                    continue
                if not data:
                    return None, True
                received += data
            return received.split(b"\n")[0], True
        except OSError:
            return None, connected
