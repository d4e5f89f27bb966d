"""A small topology of the tests' own, and a wait that polls a condition instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from contracts import topology
from contracts.events.run import RunCancelled
from contracts.topology import Consumer, Stream, Topology

STREAM = Stream("TEST", ("run.*.*",), "facts of a test")
CONSUMER = Consumer("test", "TEST", (RunCancelled,), "a test", max_deliver=3, ack_wait_s=1.0)
TOPOLOGY = Topology((STREAM, topology.DEAD_LETTERS), (CONSUMER,), (topology.LEASES, topology.JOBS))


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 10.0) -> None:
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
