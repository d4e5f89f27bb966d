"""A small topology of the tests' own, and a wait that polls a condition instead of sleeping."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable

from contracts import topology
from contracts.events.run import RunCancelled
from contracts.topology import Consumer, Stream, Topology

STREAM = Stream("TEST", ("run.*.*",), "facts of a test")
CONSUMER = Consumer("test", "TEST", (RunCancelled,), "a test", max_deliver=3, ack_wait_s=3.0)
TOPOLOGY = Topology((STREAM, topology.DEAD_LETTERS), (CONSUMER,), (topology.LEASES, topology.JOBS))
#: As EXTEND_SHARE: handlers say so often that they are at work that the machine may stand still for two seconds.
OFTEN = 0.1


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 60.0) -> None:
    """Wait until ``condition`` holds; fail naming ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        outcome = condition()
        if isinstance(outcome, Awaitable):
            outcome = await outcome
        if outcome:
            return
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        await asyncio.sleep(0.01)


def wait_for_nats(host: str, port: int, timeout_s: float = 60.0) -> None:
    """Block until a nats-server greets on host:port."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=0.5) as link:
            if link.recv(4) == b"INFO":
                return
        assert time.monotonic() < deadline, f"no nats-server on {host}:{port} after {timeout_s:.0f} s"
        time.sleep(0.05)
