"""Finds a run by what a person calls it: its id, its name, or the beginning of one of them."""

from __future__ import annotations

import difflib

import sqlalchemy as sa

from services.gateway.queries import RUNS_AND_PROGRESS, NotFound, Row
from services.gateway.store import RUNS, Store, begins_with

#: Runs named in the answer to an ambiguous reference.
MAX_CANDIDATES = 10
#: Names compared with a mistyped one: those that begin as it does, and the newest.
MAX_COMPARED = 500
#: Characters that a mistyped name is taken to have right at its beginning.
SURE_CHARS = 2
MAX_SUGGESTIONS = 3


class RunNotFound(NotFound):
    """No run is called like this; ``candidates`` are the most similar names."""

    def __init__(self, reference: str, candidates: list[str]) -> None:
        self.candidates = candidates
        hint = f": did you mean {' or '.join(candidates)}?" if candidates else ""
        super().__init__(f"no run has the id, the name or the beginning of an id or a name {reference!r}{hint}")


class AmbiguousReference(Exception):
    """A reference means several runs; ``candidates`` are their ids."""

    def __init__(self, reference: str, candidates: list[str]) -> None:
        self.candidates = candidates
        super().__init__(f"{reference!r} could mean {len(candidates)} runs or more: give the run's id")


async def find_run(store: Store, reference: str) -> Row:
    """Return the run with this id, else with this name, else whose id, else whose name alone begins like this.

    Raises:
        RunNotFound: there is none.
        AmbiguousReference: there are several.
    """
    for condition in (
        RUNS.c.run_id == reference,
        RUNS.c.name == reference,
        begins_with(RUNS.c.run_id, reference),
        begins_with(RUNS.c.name, reference),
    ):
        query = RUNS_AND_PROGRESS.where(condition).order_by(RUNS.c.requested_at.desc()).limit(MAX_CANDIDATES)
        rows = await store.fetch(query)
        if len(rows) == 1:
            return rows[0]
        if rows:
            raise AmbiguousReference(reference, [row["run_id"] for row in rows])
    raise RunNotFound(reference, await _find_similar_names(store, reference))


async def _find_similar_names(store: Store, reference: str) -> list[str]:
    """Return the names most like a mistyped one, out of a bounded number."""
    names: set[str] = set()
    alike = sa.select(RUNS.c.name).where(begins_with(RUNS.c.name, reference[:SURE_CHARS])).distinct()
    newest = sa.select(RUNS.c.name).order_by(RUNS.c.requested_at.desc())
    for query in (alike, newest):
        names |= {row["name"] for row in await store.fetch(query.limit(MAX_COMPARED)) if row["name"]}
    return difflib.get_close_matches(reference, sorted(names), MAX_SUGGESTIONS)
