"""The placement of a run that counts, read from the log."""

from __future__ import annotations

from dataclasses import dataclass

from contracts import subjects
from contracts.events.run import RunPlaced
from contracts.state.placements import PLACEMENT_FACTS, Placements
from services.kit.bus import Bus, ExpectedSequence

#: Runs whose placement is remembered, at most.
MAX_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class StandingPlacement:
    """The newest placement of a run that counts, and where it stands in the log."""

    placed: RunPlaced
    sequence: int
    #: Of the last message on its subject, whatever it says: what is published under it is not if the run was placed
    #: again meanwhile.
    fence: ExpectedSequence


class PlacementReader:
    """Finds the placement that counts; the log is read again only once something was published after it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: dict[str, StandingPlacement] = {}

    async def find(self, run_id: str) -> StandingPlacement | None:
        """Return the newest placement of a run that counts; None if none does."""
        subject = subjects.fact("run", run_id, RunPlaced.fact)
        last = await self._bus.get_last_sequence(subject)
        if not last:
            return None
        known = self._known.get(run_id)
        if known is not None and known.fence.sequence == last:
            return known
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        placements, standing = Placements(), None
        # Read after the fence: what came between shuts it.
        filters = (subjects.fact("run", run_id, fact.fact) for fact in PLACEMENT_FACTS)
        for message in await self._bus.read_history(*filters):
            if placements.apply(message.event):
                standing = StandingPlacement(message.event, message.sequence, ExpectedSequence(last, subject))
        if standing is not None:
            self._known[run_id] = standing
        return standing
