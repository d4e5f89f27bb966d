"""One working instance of a service; the others stand by and pull no messages."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import nats.errors
import structlog
from nats.js.errors import APIError

from contracts import topology
from services.kit.bus import Bus, TransientError
from services.kit.lease import RENEW_SHARE, Lease
from services.kit.settings import Settings

log = structlog.get_logger(__name__)


class RivalError(Exception):
    """Another instance works now."""


class ExclusiveRole:
    """A service's lease as a resource: entering waits for it, so that a standby's handlers do not start.

    ``keep_lease`` renews it. While the bus is away it expires, and is acquired again afterwards; if another instance
    has it by then, ``keep_lease`` raises, and the service ends to stand by when it is started again.
    """

    def __init__(self, bus: Bus, key: str, settings: Settings) -> None:
        self._bus, self._key, self._ttl_s = bus, key, settings.lease_ttl_s
        self._holder = f"{settings.instance}-{uuid.uuid4().hex[:8]}"
        self._stack = AsyncExitStack()
        self._lease: Lease | None = None
        self._is_lost = False

    async def __aenter__(self) -> Self:
        bucket = await self._bus.open_bucket(topology.LEASES)
        lease = Lease(bucket, self._key, self._holder, self._ttl_s, clock=self._bus.clock)
        self._renewal = await self._stack.enter_async_context(lease.leadership())
        self._lease = lease
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def keep_lease(self) -> None:
        """Keep the role until cancelled.

        Raises:
            RivalError: another instance has it.
        """
        lease = self._lease
        assert lease is not None
        await asyncio.wait({self._renewal})
        while True:
            try:
                if not await lease.try_acquire():
                    self._is_lost = True
                    raise RivalError(f"another instance has the lease {self._key}: this one ends")
                log.info("lease acquired again", key=self._key)
                await lease.renew_until_lost()
            except (TimeoutError, nats.errors.Error, APIError) as error:
                log.warning("lease not acquired", key=self._key, error=repr(error))
                await asyncio.sleep(self._ttl_s * RENEW_SHARE / 2)

    async def wait_held(self) -> None:
        """Return while this instance has the role; wait while that is open.

        Raises:
            TransientError: another instance has it.
        """
        while self._lease is None or not self._lease.is_held:
            if self._is_lost:
                raise TransientError(f"another instance has the lease {self._key}")
            await asyncio.sleep(self._ttl_s * RENEW_SHARE / 2)
