"""Time as a dependency, so that tests need not sleep."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Wall time for what is written down, monotonic time for what is measured."""

    def now(self) -> datetime: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's own clock, in UTC."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()


class BootClock(SystemClock):
    """A clock whose monotonic time also counts while the machine is suspended: for promises made to other machines."""

    def monotonic(self) -> float:
        return boot_s()


def boot_s() -> float:
    """Return seconds since the machine was started, those in which it was suspended among them."""
    # macOS has no such clock by that name; its monotonic clock goes on.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
