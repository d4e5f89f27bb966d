"""Requests to the node's agent, each on a connection of its own, and their replies."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from contracts.ranks import Line, RangeReplyLine, ShardReplyLine, json_line

#: Seconds after which a waiting rank looks itself whether what it waits for is here.
POLL_S = 5.0
#: Seconds until a request is repeated.
RETRY_S = 0.2
#: Seconds without an agent after which a rank gives up.
PATIENCE_S = 60.0

Reply = TypeVar("Reply", ShardReplyLine, RangeReplyLine)


def request_until_answered(
    agent: Path,
    line: Line,
    kind: type[Reply],
    what: str,
    *,
    patience_s: float = PATIENCE_S,
    is_here: Callable[[], bool] = lambda: False,
) -> str:
    """Repeat a request until the agent replies or ``is_here``; return why it cannot be granted, '' when it is.

    Args:
        agent: the agent's socket; there may be none while the agent restarts.
        what: names what is requested, where no agent does it.
        patience_s: seconds without an agent after which the request is given up.
        is_here: whether what is requested is here, whoever brought it.
    """
    answered_s = time.monotonic()
    while not is_here():
        raw, connected = _request(agent, line, is_here)
        if (reply := _parse(kind, raw)) is not None:
            return reply.problem
        if connected:
            answered_s = time.monotonic()
        elif time.monotonic() - answered_s > patience_s:
            return f"{what} is not here, and no agent has answered for {patience_s:g} s"
        time.sleep(RETRY_S)
    return ""


def _parse(kind: type[Reply], raw: bytes | None) -> Reply | None:
    try:
        return None if raw is None else kind.model_validate_json(raw)
    except ValidationError:
        return None


def _request(agent: Path, line: Line, is_here: Callable[[], bool]) -> tuple[bytes | None, bool]:
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
