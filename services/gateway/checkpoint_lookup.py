"""Finds a checkpoint of a run by what a person calls it: its step, ``best`` or ``last``."""

from __future__ import annotations

from typing import Annotated

from fastapi import HTTPException, Path, Query

from contracts.best_checkpoint import ranking_metrics
from contracts.spec.run import RunSpec
from services.gateway import checkpoint_queries
from services.gateway.core.rows import Checkpoint
from services.gateway.pages import MAX_INTEGER
from services.gateway.projection import Projection
from services.gateway.queries import Row
from services.gateway.run_lookup import find_run
from services.gateway.store import CHECKPOINTS, Store

BEST, LAST = "best", "last"
MARK_PATTERN = r"^(best|last|\d{1,18})$"
Mark = Annotated[str, Path(pattern=MARK_PATTERN, description="a step, best or last")]
MarkQuery = Annotated[
    str | None, Query(alias="mark", pattern=MARK_PATTERN, description="a step, best or last; default: all")
]
Generation = Annotated[
    int | None, Query(ge=0, le=MAX_INTEGER, description="of those of one step; default: the last generation's")
]


async def find_checkpoint(
    projection: Projection, run: str, mark: str, generation: int | None = None
) -> tuple[Row, Checkpoint]:
    """Return a run and the checkpoint of it that is not deleted and that a mark means.

    Raises:
        RunNotFound: there is no such run.
        AmbiguousReference: there are several.
        HTTPException: the run has no such checkpoint.
    """
    row = await find_run(projection, run)
    for is_last_try in (False, True):
        found = await select_checkpoint(projection.store, row, mark, generation)
        if isinstance(found, Checkpoint):
            return row, found
        if not is_last_try:
            await projection.catch_up()
    raise HTTPException(404, found)


async def select_checkpoint(store: Store, row: Row, mark: str, generation: int | None = None) -> Checkpoint | str:
    """Return the checkpoint that a mark means, or why there is none."""
    run_id = row["run_id"]
    newest = await checkpoint_queries.read_newest_present(store, run_id)
    if not newest:
        return f"run {run_id} has no committed checkpoint"
    if mark == LAST:
        return newest[0]
    if mark == BEST:
        if (best := await checkpoint_queries.find_best(store, row)) is not None:
            return best[0]
        spec = RunSpec.model_validate(row["spec"]) if row["spec"] else None
        wanted = " or ".join(metric.name for metric in ranking_metrics(spec)) or "a metric"
        present = ", ".join(sorted({name for each in newest for name in each.metrics})) or "no metrics"
        return f"no checkpoint of run {run_id} was measured by {wanted}; they have {present}: name one by its step"
    wanted_rows = [CHECKPOINTS.c.step == int(mark)]
    if generation is not None:
        wanted_rows.append(CHECKPOINTS.c.generation == generation)
    if of_step := await checkpoint_queries.read_newest_present(store, run_id, *wanted_rows):
        return of_step[0]
    steps = ", ".join(str(each.step) for each in reversed(newest))
    return f"run {run_id} has no checkpoint of step {mark}; it has steps {steps}"
