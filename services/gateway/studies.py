"""Studies over HTTP: listed by the read model, and shown with their trials by the fold of their facts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated

from fastapi import APIRouter, HTTPException, Path

from contracts import subjects
from contracts.base import TOKEN_PATTERN
from contracts.events.study import StudyRejected
from contracts.state.study import Studies, Study, Trial
from services.gateway import queries, views
from services.gateway.parameters import Limit
from services.gateway.projection import Projection
from services.gateway.run_parameters import ChosenRuns
from services.kit.bus import Bus


def study_view(study: Study) -> views.StudyView:
    """Return a study as clients see it. Pure."""
    only = study.spec.objectives[0] if len(study.spec.objectives) == 1 else None
    winner = _find_best(study, only.mode) if only else None
    return views.StudyView(
        study_id=study.study_id,
        name=study.spec.name,
        state=study.state,
        reason=study.reason,
        best=list(study.best) or ([winner.number] if winner else []),
        planned_trials=study.spec.trials,
        trials_by_state=dict(sorted(Counter(trial.state for trial in study.search_trials).items())),
        objective=only and only.metric,
        mode=only and only.mode,
        best_value=winner.values[0] if winner else None,
        trials=[
            views.TrialView(
                trial=trial.number,
                run_id=trial.run_id,
                run_ids=trial.run_ids,
                state=trial.state,
                purpose=trial.purpose,
                params=trial.params,
                values=list(trial.values),
                reports={step: list(values) for step, values in trial.reports.items()},
                metrics=trial.metrics,
                reason=trial.reason,
            )
            for trial in study.trials
        ],
    )


def _find_best(study: Study, mode: str) -> Trial | None:
    """Return the best of the trials that have completed and break no constraint."""
    completed = [trial for trial in study.search_trials if trial.state == "completed" and trial.values]
    counted = [trial for trial in completed if not any(each > 0 for each in trial.violations)]
    finite = [trial for trial in counted if math.isfinite(trial.values[0])]
    return (min if mode == "min" else max)(finite, key=lambda trial: trial.values[0], default=None)


async def read_study(bus: Bus, study_id: str) -> views.StudyView:
    """Return one study with its trials."""
    folded = Studies()
    for received in await bus.read_history(subjects.study(study_id)):
        folded.apply(received.event, received.sequence)
        if isinstance(received.event, StudyRejected):
            event = received.event
            name = event.name or ""
            return views.StudyView(study_id=study_id, name=name, state="rejected", reason=event.reason)
    if (study := folded.studies.get(study_id)) is None:
        raise HTTPException(404, f"there is no study {study_id!r}: GET /hpo/studies lists them")
    return study_view(study)


def read_routes(projection: Projection) -> APIRouter:
    """What is known of studies."""
    router = APIRouter()

    @router.get("/hpo/studies", response_model=views.Studies)
    async def get_studies(wanted: ChosenRuns, limit: Limit = 100, cursor: str | None = None) -> views.Studies:
        """Studies, newest first, with what their trials have reached: those with a trial that meets the filters."""
        await projection.catch_up()
        return await queries.list_studies(projection.store, wanted, limit=limit, cursor=cursor)

    @router.get("/hpo/studies/{study_id}", response_model=views.StudyView)
    async def get_study(study_id: Annotated[str, Path(pattern=TOKEN_PATTERN)]) -> views.StudyView:
        """One study with its trials."""
        return await read_study(projection.bus, study_id)

    return router
