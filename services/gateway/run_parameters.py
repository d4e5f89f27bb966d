"""The parameters by which routes choose runs: the same, with the same meaning, for runs and for studies."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Depends, HTTPException, Query

from contracts.run_states import STATES
from services.gateway.queries import RunFilter

#: A time before now, as ``since`` takes it.
AGE = re.compile(r"(?P<count>\d{1,9})(?P<unit>[smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Pattern = Annotated[str | None, Query(max_length=200, description="`*` is anything")]


def _since_s(since: str | None) -> float | None:
    """Return the time that ``since`` names, in seconds since the epoch."""
    if since is None:
        return None
    if age := AGE.fullmatch(since):
        return time.time() - float(age["count"]) * SECONDS[age["unit"]]
    try:
        moment = datetime.fromisoformat(since)
    except ValueError as error:
        message = f"since: {since!r} is neither a time like 2026-01-31T12:00:00Z nor an age like 90s, 10m, 2h or 7d"
        raise HTTPException(422, message) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _read_filter(
    state: Annotated[list[str] | None, Query(description="one or more of " + ", ".join(STATES))] = None,
    user: Pattern = None,
    team: Annotated[str | None, Query(max_length=200, description="this team and its parts; `*` is anything")] = None,
    model: Pattern = None,
    name: Pattern = None,
    q: Annotated[
        str | None,
        Query(max_length=200, description="part of the name, user, team or model, or the beginning of the id"),
    ] = None,
    since: Annotated[
        str | None, Query(max_length=40, description="a time (2026-01-31T12:00:00Z) or an age: 90s, 10m, 2h, 7d")
    ] = None,
    kind: Annotated[
        Literal["train", "evaluate"] | None, Query(description="evaluate: what the platform itself measures")
    ] = None,
    evaluates: Annotated[str | None, Query(max_length=200, description="id of the run that is measured")] = None,
    study: Annotated[
        str | None, Query(max_length=200, description="the trials of the study of this id or name; `*` is anything")
    ] = None,
) -> RunFilter:
    # Each once: of several, each is a search of its own.
    states = dict.fromkeys(s for given in state or [] for s in given.split(",") if s)
    if unknown := states.keys() - set(STATES):
        raise HTTPException(422, f"state: {', '.join(sorted(unknown))} is none of {', '.join(STATES)}")
    return RunFilter(tuple(states), user, team, model, name, q, _since_s(since), kind, evaluates, study)


ChosenRuns = Annotated[RunFilter, Depends(_read_filter)]
