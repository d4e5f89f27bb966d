"""The time of the log: what every difference between two moments is measured in.

Facts carry the timestamp that the server gave them. The machine's wall clock may differ from it by minutes, and may
jump; a difference between the two would declare nodes lost and revoke placements. So "now" is the newest timestamp of
the server, plus the monotonic time since it arrived. No wall clock takes part.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import nats.errors
import structlog

from contracts import topology
from services.kit.bus import Bus
from services.kit.clock import Clock

log = structlog.get_logger(__name__)

#: A timestamp that is so much older than "now" means that the server's clock was set back, or that old facts arrive.
STEP_BACK_S = 10.0
#: How often the server is asked for its time: monotonic clocks drift, and stop while a machine is suspended.
SYNC_S = 30.0
SYNC_TIMEOUT_S = 2.0


class LogClock:
    """The server's time, continued by the monotonic clock. ``virtual``: the clock itself is that time (simulations)."""

    def __init__(self, clock: Clock, virtual: bool = False) -> None:
        self._clock, self._virtual = clock, virtual
        self._newest: datetime | None = None
        self._observed_at_s = 0.0

    def now(self) -> datetime:
        """Return the server's time, as far as it is known. Before the first timestamp it is the wall clock's."""
        if self._virtual or self._newest is None:
            return self._clock.now()
        return self._newest + timedelta(seconds=self._clock.monotonic() - self._observed_at_s)

    def observe(self, stored_at: datetime) -> None:
        """Set the clock by a timestamp of the server that has just arrived."""
        behind_s = (self.now() - stored_at).total_seconds() if self._newest is not None else 0.0
        # A fact that was under way for a moment must not set the clock back by that moment.
        if self._newest is None or behind_s <= 0 or behind_s > STEP_BACK_S:
            self._newest, self._observed_at_s = stored_at, self._clock.monotonic()

    async def synchronize(self, bus: Bus) -> None:
        """Ask the server that stores the facts for its time."""
        if self._virtual:
            return
        try:
            subject = f"$JS.API.STREAM.INFO.{topology.FACTS.name}"
            answer = json.loads((await bus.nc.request(subject, b"", timeout=SYNC_TIMEOUT_S)).data)
            self.observe(datetime.fromisoformat(answer["ts"]))
        except (nats.errors.Error, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            log.info("the server's time is not known", error=repr(error))
