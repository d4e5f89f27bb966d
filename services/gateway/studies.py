"""Studies over HTTP: requested, listed, shown and stopped. They are folded from their facts when they are asked for."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Path

from contracts import subjects
from contracts.base import TOKEN_PATTERN
from contracts.events.study import StudyAccepted, StudyCompleted, StudyRejected, StudyStopped
from contracts.state.study import Studies, Study
from services.gateway import views
from services.kit.bus import Bus

#: What the list of studies is made of: not the facts of trials.
LISTED = (StudyAccepted, StudyRejected, StudyCompleted, StudyStopped)


def study_view(study: Study) -> views.StudyView:
    """Return a study as clients see it. Pure."""
    return views.StudyView(
        study_id=study.study_id,
        name=study.spec.name,
        state=study.state,
        reason=study.reason,
        best=list(study.best),
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


async def list_studies(bus: Bus) -> views.Studies:
    """Return every study without its trials, oldest first."""
    found: dict[str, views.StudyView] = {}
    for received in await bus.read_history(*(event.subject_filter() for event in LISTED)):
        event = received.event
        if isinstance(event, StudyAccepted):
            found[event.study_id] = views.StudyView(study_id=event.study_id, name=event.spec.name, state="running")
        elif isinstance(event, StudyRejected):
            found[event.study_id] = views.StudyView(
                study_id=event.study_id, name=event.name or "", state="rejected", reason=event.reason
            )
        elif isinstance(event, StudyCompleted | StudyStopped) and (view := found.get(event.study_id)) is not None:
            best = list(event.best) if isinstance(event, StudyCompleted) else []
            changes = {"state": event.fact, "reason": event.reason, "best": best}
            found[event.study_id] = view.model_copy(update=changes)
    return views.Studies(studies=list(found.values()))


def read_routes(bus: Bus) -> APIRouter:
    """What is known of studies."""
    router = APIRouter()

    @router.get("/hpo/studies", response_model=views.Studies)
    async def get_studies() -> views.Studies:
        """Studies, oldest first, without their trials."""
        return await list_studies(bus)

    @router.get("/hpo/studies/{study_id}", response_model=views.StudyView)
    async def get_study(study_id: Annotated[str, Path(pattern=TOKEN_PATTERN)]) -> views.StudyView:
        """One study with its trials."""
        return await read_study(bus, study_id)

    return router
