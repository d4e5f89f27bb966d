"""Asks for training runs: by a request of their own, or to go on from a checkpoint of another."""

from __future__ import annotations

from contextlib import suppress

from fastapi import HTTPException, Response
from pydantic import ValidationError

from contracts.base import run_id_for
from contracts.envelope import Envelope, InvalidData
from contracts.events.train import TrainRequested
from contracts.problems import describe_problems
from contracts.resumption import ResumptionChanges, ResumptionError, ResumptionPoint, plan_resumption
from contracts.spec.run import RunSpec
from services.gateway import views
from services.gateway.commands import Commands, KeyReused, same_request
from services.gateway.core.rows import Checkpoint
from services.gateway.queries import NotFound, Row
from services.gateway.run_lookup import fetch_run
from services.gateway.store import Store


async def publish_training(
    commands: Commands,
    store: Store,
    train: TrainRequested,
    envelope: Envelope,
    response: Response,
    *,
    is_repeatable: bool,
    parent_run_id: str | None = None,
) -> views.AcceptedRequest:
    """Publish a request to train, and name its run in the answer's Location.

    Args:
        is_repeatable: a client chose the event's id, so that the same request may have been published before.

    Raises:
        KeyReused: another run was asked for under the event's id.
        BusUnavailable: NATS does not answer.
    """
    run_id = run_id_for(envelope.source, envelope.id)
    known: Row | None = None
    if is_repeatable:
        with suppress(NotFound):
            known = await fetch_run(store, run_id)
    if known is not None and not same_request(known, train):
        raise KeyReused(envelope.id)
    response.headers["Location"] = f"/training-runs/{run_id}"
    accepted = await commands.publish(
        views.AcceptedRequest, train, envelope, run_id=run_id, parent_run_id=parent_run_id
    )
    return accepted.model_copy(update={"state": known["state"], "duplicate": True}) if known else accepted


def plan_resumed_run(
    row: Row, checkpoint: Checkpoint, changes: ResumptionChanges, envelope: Envelope
) -> TrainRequested:
    """Return the request of a run that goes on from a checkpoint of the run in ``row``.

    Raises:
        HTTPException: nothing would be left to train, or the run cannot see a change.
        InvalidData: a change is not valid.
    """
    point = ResumptionPoint(
        run_id=row["run_id"],
        is_completed=row["state"] == "completed",
        uri=checkpoint.uri,
        step=checkpoint.step,
        epoch=checkpoint.epoch,
        is_final=checkpoint.final,
    )
    try:
        return plan_resumption(RunSpec.model_validate(row["spec"]), point, changes, row["dataset_id"])
    except ResumptionError as error:
        raise HTTPException(422, str(error)) from error
    except ValidationError as error:
        raise InvalidData(envelope, describe_problems(error, changes.model_dump())) from error
