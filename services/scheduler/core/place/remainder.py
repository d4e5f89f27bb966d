"""What is left of a node, as placement by fragmentation sees it."""

from __future__ import annotations

#: Thousandths left of each accelerator, in descending order.
Left = tuple[int, ...]


class State:
    """What is left of a node. There is one object for all that are equal, so that it is looked up by identity."""

    __slots__ = ("cpu_milli", "left", "memory_bytes", "milli", "model", "profile")

    def __init__(self, left: Left, cpu_milli: int, memory_bytes: int, model: str, profile: str) -> None:
        self.left, self.cpu_milli, self.memory_bytes = left, cpu_milli, memory_bytes
        self.model, self.profile = model, profile
        self.milli = sum(left)
