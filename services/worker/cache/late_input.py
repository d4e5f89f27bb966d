"""What ranks read through the agent, while it may not be open yet: a restarted agent opens it beside its other work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import structlog

from services.worker.cache.node_cache import CacheError
from services.worker.retry import retry_transient

log = structlog.get_logger(__name__)

T = TypeVar("T")


class InputUnavailableError(Exception):
    """It will not be opened; the text says why."""


class LateInput(Generic[T]):
    """A dataset or a checkpoint that the ranks of a generation read; None where they need none."""

    def __init__(self) -> None:
        self._opened: T | None = None
        #: Why it will not be open; what is here at first holds if ``open_again`` is cancelled.
        self._problem = "the run is over on this node"
        self._is_settled = asyncio.Event()

    @classmethod
    def of(cls, opened: T | None) -> LateInput[T]:
        """Return an input that is open."""
        settled = cls()
        settled._opened, settled._problem = opened, ""
        settled._is_settled.set()
        return settled

    async def open_again(self, what: str, open_input: Callable[[], Awaitable[T | None]]) -> None:
        """Open what an earlier life of the agent had opened, however long the store is away; never raises.

        Args:
            what: names it in logs and to the rank that needs it and cannot have it.
        """
        try:
            self._opened = await retry_transient(open_input, f"{what} cannot be reopened now, trying again")
            self._problem = ""
        except (CacheError, OSError) as error:
            # The ranks may have all that they need.
            log.warning(f"{what} cannot be reopened", error=str(error))
            self._problem = f"the agent could not reopen {what}: {error}"
        except Exception as error:  # a rank that waits gets an answer in any case
            log.exception(f"{what} cannot be reopened")
            self._problem = f"the agent could not reopen {what}: {error!r}"
        finally:
            self._is_settled.set()

    async def get(self) -> T | None:
        """Wait until it is open.

        Raises:
            InputUnavailableError: it cannot be opened, or the generation ended before it was.
        """
        await self._is_settled.wait()
        if self._problem:
            raise InputUnavailableError(self._problem)
        return self._opened
