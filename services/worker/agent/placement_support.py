"""Whether the log supports a placement on this node. Every client of the bus can publish one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from contracts import subjects
from contracts.events.run import RunAccepted, RunPlaced, RunQueued, RunReleased
from contracts.state.run import placement_problem
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
        run_id = message.event.run_id
        names = [subjects.fact("run", run_id, fact.fact) for fact in (RunAccepted, RunQueued)]
        last = await asyncio.gather(*map(self._bus.get_last_message, names))
        if not _find_problem(message, [each for each in last if each is not None]):
            return ""
        # A replica of the stream may lag behind, which a consumer does not; or somebody has added to the true ones.
        history = await self._bus.read_history(*names)
        problem = _find_problem(message, history)
        is_newest = message.event.generation >= max(_queued_generations(message, history), default=0)
        if problem and is_newest and self.is_member(message.event) and not _queue_problem(message, history):
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


def _find_problem(message: Message[RunPlaced], history: Sequence[Message[Any]]) -> str:
    accepted = next((each.event for each in history if isinstance(each.event, RunAccepted)), None)
    if accepted is None:
        return f"run {message.event.run_id} was never accepted"
    # As text: NaN is no equal of itself.
    if accepted.spec.model_dump_json() != message.event.spec.model_dump_json():
        return "its request is another one than was accepted"
    return _queue_problem(message, history)


def _queue_problem(message: Message[RunPlaced], history: Sequence[Message[Any]]) -> str:
    queued, wanted = _queued_generations(message, history), message.event.generation
    return placement_problem(message.event, wanted if wanted in queued else max(queued, default=None))


def _queued_generations(message: Message[RunPlaced], history: Sequence[Message[Any]]) -> list[int]:
    """The generations for which its run was queued before the placement."""
    before = (each.event for each in history if each.sequence < message.sequence)
    return [event.next_generation for event in before if isinstance(event, RunQueued)]
