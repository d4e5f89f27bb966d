"""The retry of work that the bus or the store does not accept now."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from services.kit.bus import TransientError

log = structlog.get_logger(__name__)

T = TypeVar("T")


async def retry_transient(work: Callable[[], Awaitable[T]], warning: str, **details: object) -> T:
    """Run ``work`` until it succeeds, and log ``warning`` each time that it does not.

    It does not pause: the calls of bus and store have waited themselves before they raise.
    """
    while True:
        try:
            return await work()
        except TransientError as error:
            log.warning(warning, error=str(error), **details)
