"""Which runs of a list are meant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from contracts.run_states import STATES
from trainbus.client.errors import UsageError

#: Conditions that the gateway calls by the same name.
TEXTS = ("user", "team", "model", "name", "kind", "study", "evaluates")


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Conditions on runs, as ``GET /training-runs`` has them; None: any. ``*`` in a text stands for anything."""

    states: tuple[str, ...] = ()
    user: str | None = None
    #: A team and its parts: ``research`` and ``research/vision``.
    team: str | None = None
    model: str | None = None
    name: str | None = None
    #: Requested since then.
    since: datetime | None = None
    #: How many of the newest.
    limit: int | None = None
    #: train or evaluate.
    kind: str | None = None
    #: Id or name of the study whose trials are meant.
    study: str | None = None
    #: Part of the name, the user, the team or the model, or the beginning of the id.
    text: str | None = None
    #: Id of the run whose evaluations are meant.
    evaluates: str | None = None
    #: Whether the trials of studies are among the runs.
    trials: bool = True

    def __post_init__(self) -> None:
        unknown = [state for state in self.states if state not in STATES]
        if unknown:
            raise UsageError(f"there is no state {unknown[0]!r}; there are {', '.join(STATES)}")

    @property
    def is_empty(self) -> bool:
        """Whether every run is meant."""
        return replace(self, trials=True) == RunFilter()

    def to_params(self) -> dict[str, Any]:
        """Return the conditions as the gateway takes them, without the limit."""
        texts = {name: getattr(self, name) for name in TEXTS} | {"q": self.text}
        params: dict[str, Any] = {name: text for name, text in texts.items() if text is not None}
        if self.states:
            params["state"] = list(self.states)
        if self.since is not None:
            params["since"] = self.since.isoformat()
        if not self.trials:
            params["trials"] = False
        return params
