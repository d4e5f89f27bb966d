"""Which version each alias of a model names, as the facts have it."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.events.model import ModelFact, ModelPromoted, ModelStaged
from contracts.state.model import ModelSettings, champion_of

CHAMPION = "champion"


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """A version of a model: its number in the facts, and its checkpoint."""

    version: int
    checkpoint_uri: str


@dataclass(slots=True)
class Model:
    """A model's promotions and its aliases."""

    #: By version.
    promotions: dict[int, ModelPromoted] = field(default_factory=dict)
    settings: ModelSettings = field(default_factory=ModelSettings)
    #: Aliases that were removed by request.
    removed: set[str] = field(default_factory=set)

    def apply(self, fact: ModelFact) -> None:
        """Fold one fact, in the order of the log."""
        match fact:
            case ModelPromoted():
                self.promotions.setdefault(fact.version, fact)
            case ModelStaged(version=None):
                self.removed.add(fact.alias)
            case ModelStaged():
                self.removed.discard(fact.alias)
        self.settings.apply(fact)

    @property
    def champion(self) -> ModelPromoted | None:
        return champion_of(tuple(self.promotions.values()))

    @property
    def aliases(self) -> dict[str, AliasTarget]:
        """The version that each alias names."""
        found = {}
        for alias, fact in self.settings.aliases.items():
            if fact.version is not None and fact.checkpoint_uri is not None:
                found[alias] = AliasTarget(fact.version, fact.checkpoint_uri)
        if (champion := self.champion) is not None:
            found[CHAMPION] = AliasTarget(champion.version, champion.checkpoint_uri)
        return found


@dataclass(slots=True)
class Registry:
    """Every model. ``sequence`` is the last fact folded in."""

    models: dict[str, Model] = field(default_factory=dict)
    sequence: int = 0

    def apply(self, fact: ModelFact, sequence: int) -> None:
        """Fold one fact; one that was folded changes nothing."""
        if sequence > self.sequence:
            self.models.setdefault(fact.model, Model()).apply(fact)
            self.sequence = sequence
