"""Finds a run by what a person calls it: its id, its name, or the beginning of one of them."""

from __future__ import annotations

import asyncio
import difflib
from contextlib import suppress

import sqlalchemy as sa

from services.gateway.projection import Projection
from services.gateway.queries import RUNS_AND_PROGRESS, NotFound, Row
from services.gateway.store import RUNS, Store, begins_with

#: Runs named in the answer to an ambiguous reference.
MAX_CANDIDATES = 10
#: Names compared with a mistyped one: of those that begin as it does, and of the newest.
MAX_COMPARED = 200
#: Characters that a mistyped name is taken to have right at its beginning.
SURE_CHARS = 2
MAX_SUGGESTIONS = 3


class RunNotFound(NotFound):
    """No run is called like this; ``candidates`` are the most similar names."""

    def __init__(self, reference: str, candidates: list[str]) -> None:
        self.candidates = candidates
        hint = f"did you mean {' or '.join(candidates)}?" if candidates else "`trainbus ps` lists them"
        super().__init__(f"there is no run {reference!r}; {hint}")


class AmbiguousReference(Exception):
    """A reference is the beginning of several runs; ``candidates`` are the ids of some of them."""

    def __init__(self, reference: str, found: list[Row]) -> None:
        self.candidates = [row["run_id"] for row in found]
        count = f"{len(found)} runs" if len(found) < MAX_CANDIDATES else f"{len(found)} runs or more"
        listed = "\n".join(f"  {row['run_id']}  {row['name']}" for row in found)
        super().__init__(f"{reference!r} is the start of {count}; give more of it:\n{listed}")


async def fetch_run(store: Store, run_id: str) -> Row:
    """Return the run with this very id.

    Raises:
        NotFound: there is none.
    """
    found = await store.fetch(RUNS_AND_PROGRESS.where(RUNS.c.run_id == run_id))
    if not found:
        raise NotFound(f"there is no run {run_id!r}")
    return found[0]


async def find_run(projection: Projection, reference: str) -> Row:
    """Return the run with this id, else the newest of this name, else the one whose id or whose name begins like this.

    But for an id that is known, it waits until the read model has all that was published before.

    Raises:
        RunNotFound: there is none.
        AmbiguousReference: there are several.
    """
    store = projection.store
    with suppress(NotFound):
        return await fetch_run(store, reference)
    await projection.catch_up()
    if (found := await _look_up(store, reference)) is not None:
        return found
    raise RunNotFound(reference, await _find_similar_names(store, reference))


async def _look_up(store: Store, reference: str) -> Row | None:
    newest_first = RUNS.c.requested_at.desc(), RUNS.c.run_id.desc()
    for exact in (RUNS.c.run_id == reference, RUNS.c.name == reference):
        if rows := await store.fetch(RUNS_AND_PROGRESS.where(exact).order_by(*newest_first).limit(1)):
            return rows[0]
    for column in (RUNS.c.run_id, RUNS.c.name):
        # In the order of the index: to find the newest of a hundred thousand that begin alike, all would be read.
        query = RUNS_AND_PROGRESS.where(begins_with(column, reference)).order_by(column)
        rows = await store.fetch(query.limit(MAX_CANDIDATES))
        if len(rows) > 1:
            raise AmbiguousReference(reference, list(rows))
        if rows:
            return rows[0]
    return None


async def _find_similar_names(store: Store, reference: str) -> list[str]:
    """Return the names most like a mistyped one, out of a bounded number."""
    names: set[str] = set()
    alike = sa.select(RUNS.c.name).where(begins_with(RUNS.c.name, reference[:SURE_CHARS])).distinct()
    newest = sa.select(RUNS.c.name).order_by(RUNS.c.requested_at.desc())
    for query in (alike, newest):
        names |= {row["name"] for row in await store.fetch(query.limit(MAX_COMPARED)) if row["name"]}
    # A comparison with hundreds of names takes a tenth of a second, in which others would wait.
    return await asyncio.to_thread(difflib.get_close_matches, reference, sorted(names), MAX_SUGGESTIONS)
