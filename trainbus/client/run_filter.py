"""Which runs of a list are meant."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from contracts.run_states import STATES
from trainbus.client.errors import UsageError
from trainbus.client.views import RunView


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Conditions on runs; None: any. A name, user, team or model may have ``*`` for anything."""

    states: tuple[str, ...] = ()
    user: str | None = None
    #: A team is met by its parts too: ``research`` by ``research/vision``.
    team: str | None = None
    model: str | None = None
    name: str | None = None
    #: Requested since then.
    since: datetime | None = None
    #: How many of the newest.
    limit: int | None = None

    def __post_init__(self) -> None:
        unknown = [state for state in self.states if state not in STATES]
        if unknown:
            raise UsageError(f"there is no state {unknown[0]!r}; there are {', '.join(STATES)}")

    @property
    def is_empty(self) -> bool:
        """Whether every run is meant."""
        return self == RunFilter()

    def to_params(self) -> dict[str, Any]:
        """Return the conditions as the gateway takes them; it may list more than ``matches``."""
        texts = {name: getattr(self, name) for name in ("user", "team", "model", "name")}
        params: dict[str, Any] = {name: text for name, text in texts.items() if text is not None}
        if self.states:
            params["state"] = list(self.states)
        if self.since is not None:
            params["since"] = self.since.isoformat()
        return params

    def matches(self, view: RunView) -> bool:
        """Whether a run is meant."""
        if self.states and view.state not in self.states:
            return False
        if self.since is not None and (view.requested_at is None or view.requested_at < self.since):
            return False
        texts = ((self.user, view.user), (self.model, view.model), (self.name, view.name))
        if not all(wanted is None or fnmatchcase(text or "", wanted) for wanted, text in texts):
            return False
        team = view.team or ""
        return self.team is None or fnmatchcase(team, self.team) or fnmatchcase(team, f"{self.team}/*")
