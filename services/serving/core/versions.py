"""Which version of each model is to be served here, as the facts about it add up.

Each instance judges for itself: what fails on another one may have failed for a reason of its host's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from contracts.base import Event, Fact
from contracts.events.model import ModelDeployed, ModelDeployFailed, ModelPromoted
from contracts.state.model import champion_of

FOLDED: tuple[type[Fact], ...] = (ModelPromoted, ModelDeployed, ModelDeployFailed)


@dataclass(slots=True)
class ModelVersions:
    """The promotions of one model, and what became of them here."""

    #: Of this instance of serving.
    instance: str = ""
    promotions: dict[int, ModelPromoted] = field(default_factory=dict)
    #: Versions in the order in which they were deployed.
    deployed: list[int] = field(default_factory=list)
    #: Those that were deployed on this instance, and when.
    deployed_here: dict[int, datetime] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def apply(self, event: Event, at: datetime) -> None:
        """Fold one fact about this model, stored at a time."""
        match event:
            case ModelPromoted():
                self.promotions.setdefault(event.version, event)
            case ModelDeployed():
                if event.version not in self.deployed:
                    self.deployed.append(event.version)
                if self._is_own(event):
                    self.deployed_here.setdefault(event.version, at)
            case ModelDeployFailed() if self._is_own(event):
                self.failed.add(event.version)

    def _is_own(self, event: ModelDeployed | ModelDeployFailed) -> bool:
        return event.instance in ("", self.instance)

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
        return self.find_before(champion.version)

    def find_before(self, version: int) -> ModelPromoted | None:
        """Return what was served last beside a version, and did not fail."""
        sound = [each for each in self.deployed if each not in self.failed | {version} and each in self.promotions]
        return self.promotions[sound[-1]] if sound else None


def share_artifact(first: ModelPromoted, second: ModelPromoted) -> bool:
    """Return whether two promotions are of one checkpoint, so that one process can serve both."""
    return (first.run_id, first.checkpoint_uri) == (second.run_id, second.checkpoint_uri)


def pick_by_share(count: int, share: float) -> bool:
    """Return whether the request of this number belongs to a share: evenly spread, not drawn."""
    return int((count + 1) * share) > int(count * share)
