"""The lease on a node's name: one agent at a time may join under it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import nats.errors
import structlog
from nats.js.errors import APIError

from contracts import subjects, topology
from services.kit.bus import Bus, TransientError
from services.kit.clock import BootClock
from services.kit.concurrency import cancel_and_wait
from services.kit.lease import Lease, read_record
from services.worker.agent.node_term import NodeTerm

log = structlog.get_logger(__name__)

#: Share of the time to live after which the agent renews: often, so that little of the term is used up when an outage
#: of the bus begins.
RENEW_SHARE = 0.1
#: Seconds before a retry after an error of the bus.
RETRY_S = 0.2
#: Seconds between two warnings that another agent has the name.
WARNING_INTERVAL_S = 10.0


class NodeLease:
    """Acquires and renews the lease for one incarnation of the agent after the other."""

    def __init__(
        self, bus: Bus, node_id: str, ttl_s: float, term: NodeTerm, statement: Callable[[], Mapping[str, str]]
    ) -> None:
        """Each renewal extends ``term`` and says ``statement`` (``contracts.state.node.NodeStatement``)."""
        self._bus, self._node_id, self._ttl_s = bus, node_id, ttl_s
        self._term, self._statement = term, statement
        self._lease: Lease | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._is_held = asyncio.Event()
        self._is_released = False

    @asynccontextmanager
    async def renew_in_background(self, incarnation: str, previous: str) -> AsyncIterator[None]:
        """Acquire and renew the lease while the block runs.

        ``previous``: the incarnation of an agent in this data folder that has ended; its lease is taken over at once.
        """
        self._is_held.clear()
        self._renewal = asyncio.create_task(self._acquire_and_renew(incarnation, previous))
        try:
            yield
        finally:
            await cancel_and_wait(self._renewal)

    async def wait_until_held(self) -> None:
        """Wait until the node's name is ours. A second agent of the same name waits here for ever."""
        assert self._renewal is not None
        waiting = asyncio.create_task(self._is_held.wait())
        try:
            while not self._is_held.is_set():
                await asyncio.wait(
                    {waiting, self._renewal}, timeout=WARNING_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
                self.raise_error()
                if not self._is_held.is_set():
                    log.warning("another agent has this node's name: give each a TRAINBUS_NODE_ID of its own")
        finally:
            waiting.cancel()

    def raise_error(self) -> None:
        """Raise the error that ended the renewal, if there is one."""
        if self._renewal is not None and self._renewal.done():
            self._renewal.result()

    async def release(self) -> None:
        """Release the lease for good."""
        self._is_released = True
        if self._lease is not None:
            await self._lease.release()

    async def _acquire_and_renew(self, incarnation: str, previous: str) -> None:
        """Hold the lease until cancelled or released; retry after errors of the bus."""
        key = subjects.node_lease(self._node_id)
        while not self._is_released:
            try:
                bucket = await self._bus.open_bucket(topology.LEASES)
                record = await read_record(bucket, key)
                if record is not None and previous and record.holder == previous:
                    # Our own, from before this agent was killed: no need to wait until it expires.
                    await bucket.delete(key, last=record.revision)
                self._lease = Lease(
                    bucket,
                    key,
                    incarnation,
                    self._ttl_s,
                    clock=BootClock(),
                    data=self._statement,
                    renew_share=RENEW_SHARE,
                    on_confirmed=self._term.extend,
                )
                async with self._lease.leadership() as renewal:
                    self._is_held.set()
                    await renewal
            except (nats.errors.Error, APIError, TimeoutError, TransientError) as error:
                log.warning("the node's lease cannot be renewed", error=repr(error))
                await asyncio.sleep(RETRY_S)
