"""Whether a service gets on with its consumers: messages that wait while none is finished are a backlog that hangs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import nats.errors
import structlog
from nats.js.errors import Error as JetStreamError

if TYPE_CHECKING:
    from nats.js.api import ConsumerInfo

    from services.kit.bus import Bus

log = structlog.get_logger(__name__)

CHECK_EVERY_S = 10.0
#: Seconds without any finished message after which waiting ones count as a backlog that hangs.
STUCK_S = 60.0


def count_unhandled(info: ConsumerInfo) -> int:
    """Return how many messages a service has yet to handle: those that wait and those that are in its hands."""
    return (info.num_pending or 0) + (info.num_ack_pending or 0)


@dataclass(slots=True)
class _Place:
    """How far a consumer is, and since when."""

    floor: int
    since_s: float


class BacklogWatch:
    """Looks at the service's consumers now and then."""

    def __init__(self, bus: Bus, *, every_s: float = CHECK_EVERY_S, stuck_s: float = STUCK_S) -> None:
        self._bus, self._every_s, self._stuck_s = bus, every_s, stuck_s
        self._places: dict[str, _Place] = {}
        #: The consumers that do not get on.
        self.stuck: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Look until cancelled; while the server is away, what was seen last stands."""
        while True:
            try:
                stuck = frozenset([name for name in self._bus.consumers if await self._is_stuck(name)])
            except (nats.errors.Error, JetStreamError, TimeoutError) as error:
                log.info("consumers cannot be looked at", error=repr(error))
            else:
                if stuck - self.stuck:
                    log.warning("messages wait and none is finished", consumers=sorted(stuck))
                self.stuck = stuck
            await asyncio.sleep(self._every_s)

    async def _is_stuck(self, name: str) -> bool:
        info = await self._bus.js.consumer_info(self._bus.consumers[name], name)
        now_s = self._bus.clock.monotonic()
        floor = info.ack_floor.stream_seq or 0 if info.ack_floor is not None else 0
        place = self._places.setdefault(name, _Place(floor, now_s))
        if floor != place.floor or not info.num_pending:
            self._places[name] = _Place(floor, now_s)
            return False
        return now_s - place.since_s > self._stuck_s
