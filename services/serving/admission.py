"""Admission: which requests may wait, for how long, and which are refused before any work is done for them.

Two things can be too slow: the process of a model, before which a ``HostQueue`` stands, and the server itself, whose
open requests ``ServerLoad`` counts. What waits is bounded by time, so an answer that is given is not late.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.serving.core.batch_times import BatchTimes

#: Batches that are in the hands of a process: the one that it computes, and the next one.
WINDOW_BATCHES = 2
#: Open requests below which the server is not examined for being slow, and the weight of the newest interval.
MIN_BACKLOG = 32
WEIGHT = 0.02

IsDisconnected = Callable[[], Awaitable[bool]]


class OverloadedError(Exception):
    """The request would wait for too long, or has. ``retry_after_s``: whole seconds until another one may not."""

    def __init__(self, text: str, wait_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = max(1, math.ceil(wait_s))


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


@dataclass(slots=True, eq=False)
class _Waiter:
    samples: int
    turn: asyncio.Future[None]


@dataclass(slots=True)
class Arrivals:
    """Requests whose heads the event loop has read in this round, and that nothing else has counted yet.

    With a thousand sockets ready at once all of them would pass before the first one counts as open.
    """

    count: int = 0

    def count_one(self) -> None:
        """Count one until the next round, in which it is open."""
        if not self.count:
            asyncio.get_running_loop().call_soon(self._forget)
        self.count += 1

    def _forget(self) -> None:
        self.count = 0


class HostQueue:
    """The requests to one host. Its process has a window of them; the rest waits here, first in, first out."""

    def __init__(self, model: str, max_batch: int, max_wait_s: float) -> None:
        self._model, self._window, self._max_wait_s = model, WINDOW_BATCHES * max_batch, max_wait_s
        self.batch_times = BatchTimes(max_batch)
        self._waiters: deque[_Waiter] = deque()
        #: Requests of a batch in which the process ended. Each gets it for itself, before the others.
        self._suspects: deque[_Waiter] = deque()
        self._is_alone = False
        self._handed = self._waiting = 0
        self.arrivals = Arrivals()

    @property
    def max_wait_s(self) -> float:
        """The seconds that a request may wait: at least one batch, else those of a slow model would never be full."""
        return max(self._max_wait_s, self.batch_times.per_batch_s)

    @property
    def expected_wait_s(self) -> float:
        """The seconds until the process begins with a request that comes now."""
        return self.batch_times.estimate_s(self._handed + self._waiting + self.arrivals.count)

    def check(self) -> None:
        """Do nothing where another request may wait.

        Raises:
            OverloadedError: it would wait for too long.
        """
        wait_s = self.expected_wait_s
        if wait_s > self.max_wait_s:
            raise OverloadedError(
                f"model {self._model!r} is overloaded: a request would wait for {wait_s:.1f} s, and may for "
                f"{self.max_wait_s:g} s; try again later",
                wait_s,
            )

    async def wait_turn(self, samples: int, is_disconnected: IsDisconnected | None = None) -> None:
        """Wait until the process may have a request with so many samples; ``end_turn`` ends that.

        Raises:
            OverloadedError: it would wait for too long, or has.
            ClientDisconnected: nobody waits for the answer any more.
        """
        self.check()
        if not self._waiters and self._has_capacity(samples):
            self._handed += samples
            return
        waiter = _Waiter(samples, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._waiting += samples
        max_wait_s = self.max_wait_s
        if not await self._wait_in_line(waiter, max_wait_s):
            raise OverloadedError(
                f"model {self._model!r} is overloaded: the request has waited for {max_wait_s:g} s; try again later",
                self.expected_wait_s,
            )
        try:
            is_abandoned = is_disconnected is not None and await is_disconnected()
        except BaseException:
            self.end_turn(samples)
            raise
        if is_abandoned:
            self.end_turn(samples)
            raise ClientDisconnected

    def line_up_suspect(self, samples: int) -> Callable[[float], Awaitable[bool]]:
        """Put a request before those that wait, so that the process gets nothing beside it.

        Returns:
            What waits for its turn, at most for some seconds, and returns whether it has come.
        """
        waiter = _Waiter(samples, asyncio.get_running_loop().create_future())
        self._suspects.append(waiter)
        self._waiting += samples
        return lambda timeout_s: self._wait_in_line(waiter, timeout_s)

    def end_turn(self, samples: int) -> None:
        """End a turn, and give the next ones theirs."""
        self._handed -= samples
        self._is_alone = self._is_alone and self._handed > 0
        self._hand_over()

    def _hand_over(self) -> None:
        if self._suspects and not self._handed:
            self._is_alone = True
            self._hand(self._suspects.popleft())
        while self._waiters and self._has_capacity(self._waiters[0].samples):
            self._hand(self._waiters.popleft())

    def _hand(self, waiter: _Waiter) -> None:
        self._waiting -= waiter.samples
        self._handed += waiter.samples
        waiter.turn.set_result(None)

    def _has_capacity(self, samples: int) -> bool:
        if self._suspects or self._is_alone:
            return False
        return not self._handed or self._handed + samples <= self._window

    async def _wait_in_line(self, waiter: _Waiter, timeout_s: float) -> bool:
        """Wait for a turn; return whether it has come in time. If not, it never comes."""
        try:
            await asyncio.wait({waiter.turn}, timeout=timeout_s)
        except asyncio.CancelledError:
            if waiter.turn.done():
                self.end_turn(waiter.samples)
            else:
                self._remove(waiter)
            raise
        if not waiter.turn.done():
            self._remove(waiter)
        return waiter.turn.done()

    def _remove(self, waiter: _Waiter) -> None:
        (self._suspects if waiter in self._suspects else self._waiters).remove(waiter)
        self._waiting -= waiter.samples
        self._hand_over()


@dataclass(slots=True)
class ServerLoad:
    """The open requests for predictions of this server, whatever they wait for: being parsed as much as a process."""

    max_open: int
    max_wait_s: float
    open: int = 0
    arrivals: Arrivals = field(default_factory=Arrivals)
    #: Seconds between two requests that end, while there is a backlog.
    _interval_s: float = 0.0
    _ended_at: float = 0.0

    def begin_request(self) -> None:
        """Count a request."""
        self.open += 1

    def end_request(self) -> None:
        """Count a request no more, and measure."""
        self.open -= 1
        if self.open < MIN_BACKLOG:
            self._interval_s = self._ended_at = 0.0
            return
        now = time.monotonic()
        if self._ended_at:
            self._interval_s += WEIGHT * (now - self._ended_at - self._interval_s)
        self._ended_at = now

    def check(self) -> None:
        """Do nothing where another request may come.

        Raises:
            OverloadedError: too many are open, or it would wait for too long.
        """
        waiting = self.open + self.arrivals.count
        wait_s = waiting * self._interval_s
        if waiting >= self.max_open or wait_s > self.max_wait_s:
            raise OverloadedError(f"the server is overloaded: {waiting} requests wait; try again later", wait_s)
