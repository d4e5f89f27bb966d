"""The shares of this node's slots that generations use."""

from __future__ import annotations

from collections.abc import Iterable


class SlotShares:
    """Which generation uses which share of which slots."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], tuple[tuple[int, ...], float]] = {}

    def allocate(self, run_id: str, generation: int, slots: Iterable[int], share: float) -> None:
        """Note that a generation uses ``share`` of each of the slots; 0: it uses no device."""
        if share:
            self._held[run_id, generation] = tuple(slots), share

    def release(self, run_id: str, generation: int) -> None:
        """Note that the ranks of a generation have ended."""
        self._held.pop((run_id, generation), None)

    def of_others(self, run_id: str) -> dict[int, list[float]]:
        """Return slot -> the shares of it that other runs use."""
        shares: dict[int, list[float]] = {}
        for (other, _), (slots, share) in self._held.items():
            for slot in slots if other != run_id else ():
                shares.setdefault(slot, []).append(share)
        return shares
