"""Which version of each model is to be served, as the facts about it add up."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.base import Event, Fact
from contracts.events.model import ModelDeployed, ModelDeployFailed, ModelPromoted
from contracts.state.model import champion_of

FOLDED: tuple[type[Fact], ...] = (ModelPromoted, ModelDeployed, ModelDeployFailed)


@dataclass(slots=True)
class ModelVersions:
    """The promotions of one model, and what became of them here."""

    promotions: dict[int, ModelPromoted] = field(default_factory=dict)
    #: Versions in the order in which they were deployed.
    deployed: list[int] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)

    def apply(self, event: Event) -> None:
        """Fold one fact about this model."""
        match event:
            case ModelPromoted():
                self.promotions.setdefault(event.version, event)
            case ModelDeployed():
                if event.version not in self.deployed:
                    self.deployed.append(event.version)
            case ModelDeployFailed():
                self.failed.add(event.version)

    @property
    def champion(self) -> ModelPromoted | None:
        """The promotion that counts now, whether it can be served or not."""
        return champion_of(list(self.promotions.values()))

    @property
    def wanted(self) -> ModelPromoted | None:
        """What is to be served: the champion, or where that has failed, what was served before it."""
        champion = self.champion
        if champion is None or champion.version not in self.failed:
            return champion
        sound = [each for each in self.deployed if each not in self.failed and each in self.promotions]
        return self.promotions[sound[-1]] if sound else None


def share_artifact(first: ModelPromoted, second: ModelPromoted) -> bool:
    """Return whether two promotions are of one checkpoint, so that one process can serve both."""
    return (first.run_id, first.checkpoint_uri) == (second.run_id, second.checkpoint_uri)


def pick_by_share(count: int, share: float) -> bool:
    """Return whether the request of this number belongs to a share: evenly spread, not drawn."""
    return int((count + 1) * share) > int(count * share)
