"""Whether the log supports a placement on this node. Every client of the bus can publish one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from contracts import subjects
from contracts.events.run import RunAccepted, RunPlaced, RunQueued, RunReleased
from contracts.state.placements import Placements
from services.kit.bus import Bus, Message


class PlacementSupport:
    """Compares placements with what was accepted and queued before them."""

    def __init__(self, bus: Bus, node_id: str) -> None:
        self._bus, self._node_id = bus, node_id

    def is_member(self, placed: RunPlaced) -> bool:
        """Whether the node is to run a part of it."""
        return any(member.node_id == self._node_id for member in placed.members)

    async def problem(self, message: Message[RunPlaced]) -> str:
        """Return why this node must not act on a placement; '' if it may. One that the scheduler counts is answered."""
        placed = message.event
        names = [subjects.fact("run", placed.run_id, fact.fact) for fact in (RunAccepted, RunQueued)]
        last = await asyncio.gather(*map(self._bus.get_last_message, names))
        if not _before(message, [each for each in last if each is not None]).problem(placed):
            return ""
        # A replica of the stream may lag behind, which a consumer does not; or somebody has added to the true ones.
        before = _before(message, await self._bus.read_history(*names))
        problem = before.problem(placed)
        if problem and before.is_newest(placed) and self.is_member(placed) and not before.queue_problem(placed):
            # The scheduler does not look at the request again: it holds slots until it is told.
            await self._release(message, problem)
        return problem

    async def _release(self, message: Message[RunPlaced], problem: str) -> None:
        placed = message.event
        released = RunReleased(
            run_id=placed.run_id,
            generation=placed.generation,
            node_id=self._node_id,
            clean=False,
            detail=f"nothing was started: {problem}",
        )
        await self._bus.publish(released, message.envelope)


def _before(message: Message[RunPlaced], history: Iterable[Message[Any]]) -> Placements:
    """What was accepted and queued before a placement."""
    found = Placements()
    for each in history:
        if each.sequence < message.sequence:
            found.apply(each.event)
    return found
