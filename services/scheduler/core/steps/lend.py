"""Lend: idle slots go to runs beyond their quota, unless the owner waits for them and gets the rest back."""

from __future__ import annotations

from services.scheduler.core.cycle_state import CycleState
from services.scheduler.core.place.resource_request import ResourceRequest, resource_request_of
from services.scheduler.core.place.snapshot import NodeSlots
from services.scheduler.core.state.suspects import note_suspect


class IdleLoans:
    """The idle slots that are not lent in this cycle."""

    def __init__(self, cycle: CycleState) -> None:
        self.cycle = cycle
        self._is_done = not cycle.entitlements.lent
        self._held: list[tuple[ResourceRequest, list[NodeSlots]]] = []

    def hold_back(self) -> None:
        """Hold back, once in a cycle, what owners get whose other slots come back in a moment."""
        if self._is_done:
            return
        self._is_done = True
        cycle = self.cycle
        placer, entitlements = cycle.placer, cycle.entitlements
        run_id = ""
        try:
            for run in entitlements.owners(cycle.blocked):
                run_id = run.run_id
                request, least = resource_request_of(cycle.cluster, run), run.spec.slots.min
                if not entitlements.gets_back(run, request, cycle.snapshot, cycle.leaving):
                    continue
                shut, _ = entitlements.shut(run, request, least)
                idle = min(placer.most(cycle.snapshot, run, request, shut), least)
                if idle and (slots := placer.find(cycle.snapshot, run, idle, request, closed=shut)) is not None:
                    cycle.snapshot.allocate(request.slot_spec, slots)
                    self._held.append((request, slots))
        except Exception as error:
            note_suspect(error, run_id=run_id)
            raise

    def release(self) -> None:
        """Make the slots available to the steps that follow, which respect quotas themselves."""
        for request, slots in self._held:
            self.cycle.snapshot.release(request.slot_spec, slots)
