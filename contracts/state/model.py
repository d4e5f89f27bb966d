"""A registered model's life as its facts add up: promotions, gates, approvals and aliases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from contracts.events.model import ModelApproved, ModelConfigured, ModelFact, ModelStaged
from contracts.spec.gates import ModelGates


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


@dataclass(slots=True)
class ModelSettings:
    """What people have set for a model: its gates, its aliases, and which candidates they approved."""

    gates: ModelGates = field(default_factory=ModelGates)
    #: Version of the configuration; 0: none was ever set.
    configuration: int = 0
    #: Run -> the first answer.
    approvals: dict[str, ModelApproved] = field(default_factory=dict)
    #: Alias -> the fact that set it.
    aliases: dict[str, ModelStaged] = field(default_factory=dict)

    def apply(self, fact: ModelFact) -> None:
        """Fold one fact, in the order of the log. Other facts change nothing."""
        match fact:
            case ModelConfigured() if fact.version > self.configuration:
                self.gates, self.configuration = fact.gates, fact.version
            case ModelApproved():
                self.approvals.setdefault(fact.run_id, fact)
            case ModelStaged(version=None):
                self.aliases.pop(fact.alias, None)
            case ModelStaged():
                self.aliases[fact.alias] = fact
