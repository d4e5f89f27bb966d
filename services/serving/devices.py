"""The devices of model processes: each process gets the one that has the fewest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class DevicePool:
    """Hands out devices by name (``cpu``, ``cuda:1``; ``auto`` is the first GPU where there is one)."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._processes: Counter[str] = Counter()

    def take_device(self) -> str:
        """Return the device for one more process, until ``give_back``."""
        name = min(self._names, key=lambda each: self._processes[each])
        self._processes[name] += 1
        return name

    def give_back(self, name: str) -> None:
        """Count a process no more."""
        self._processes[name] -= 1
