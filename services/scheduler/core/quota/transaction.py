"""Changes of a snapshot, and of what teams are charged for, that are kept or undone together."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from services.scheduler.core.place.snapshot import ClusterSnapshot, NodeSlots
from services.scheduler.core.quota.entitlements import Entitlements, held
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.suspects import note_suspect


class Transaction:
    """Tries placements and releases; what is not committed is rolled back at the end of the block."""

    def __init__(self, snapshot: ClusterSnapshot, entitlements: Entitlements) -> None:
        self.snapshot, self.entitlements = snapshot, entitlements
        self._before = snapshot.state_id
        self._changes: list[tuple[Run, list[NodeSlots], bool]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.rollback()

    def allocate(self, run: Run, slots: Iterable[NodeSlots]) -> None:
        """Give the run these slots."""
        self._change(run, list(slots), allocates=True)

    def release(self, run: Run, slots: Iterable[NodeSlots]) -> None:
        """Take these slots from the run."""
        self._change(run, list(slots), allocates=False)

    def release_run(self, run: Run) -> None:
        """Take all slots from the run that it has."""
        self.release(run, held(run))

    def commit(self) -> None:
        """Keep the changes that were made so far."""
        self._changes.clear()
        self._before = self.snapshot.state_id

    def rollback(self) -> None:
        """Undo the changes that were not committed, the last one first."""
        if not self._changes:
            return
        for run, slots, allocated in reversed(self._changes):
            self._apply(run, slots, allocates=not allocated)
        self._changes.clear()
        self.snapshot.state_id = self._before

    def _change(self, run: Run, slots: list[NodeSlots], *, allocates: bool) -> None:
        self._changes.append((run, slots, allocates))
        self._apply(run, slots, allocates=allocates)

    def _apply(self, run: Run, slots: list[NodeSlots], *, allocates: bool) -> None:
        try:
            if allocates:
                self.snapshot.allocate(run.slot_spec, slots)
                self.entitlements.charge(run, slots)
            else:
                self.snapshot.release(run.slot_spec, slots)
                self.entitlements.refund(run, slots)
        except Exception as error:
            note_suspect(error, run_id=run.run_id)
            raise
