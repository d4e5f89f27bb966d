"""When the leader may make its next pass: at once, or, in a simulation, when the world stands still."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol


class CyclePacer(Protocol):
    """Lets passes go one by one."""

    async def before_cycle(self) -> None:
        """Return when the next pass may be made. All that was published before is folded."""

    def after_cycle(self, published: int, wake_at: datetime | None) -> None:
        """A pass was made: the highest sequence that it published, 0 if it had nothing to say; when to look again."""


class UnpacedCycles:
    """No pass waits for anything."""

    async def before_cycle(self) -> None:
        return None

    def after_cycle(self, published: int, wake_at: datetime | None) -> None:
        return None
