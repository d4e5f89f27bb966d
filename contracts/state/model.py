"""A registered model's life as its promotions add up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Promotion(Protocol):
    """What every view of a promotion has."""

    @property
    def version(self) -> int: ...
    @property
    def rollback(self) -> bool: ...


P = TypeVar("P", bound=Promotion)


def champion_of(promotions: Sequence[P]) -> P | None:
    """Return the promotion that counts now: the one of the highest version."""
    return max(promotions, key=lambda each: each.version, default=None)


def rollback_target(promotions: Iterable[P]) -> P | None:
    """Return what a rollback brings back. Each rollback takes one promotion off, so two go back two."""
    stack: list[P] = []
    for promotion in promotions:
        if not promotion.rollback:
            stack.append(promotion)
        elif stack:
            stack.pop()
    return stack[-2] if len(stack) > 1 else None
