"""Requests about checkpoints over HTTP: to restore or resume one, to pin it, and to read them back and repair them."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from contracts.base import run_id_for
from contracts.events.train import PinRequested, RestoreRequested, ScrubRequested, TrainRequested
from contracts.resumption import ResumptionChanges
from services.gateway import views
from services.gateway.bodies import body_of, read_body
from services.gateway.checkpoint_lookup import Mark, find_checkpoint
from services.gateway.commands import Commands, KeyReused
from services.gateway.parameters import Key, Reason
from services.gateway.projection import Projection
from services.gateway.queries import NotFound
from services.gateway.run_lookup import fetch_run, find_run
from services.gateway.run_requests import plan_resumed_run, publish_training

Repair = Annotated[bool, Query(description="false: only say what is rotten")]


def checkpoint_routes(commands: Commands, projection: Projection) -> APIRouter:
    """Return the routes of requests about checkpoints."""
    router = APIRouter()

    @router.post(
        "/training-runs/{run}/checkpoints/{mark}/restore", status_code=202, response_model=views.AcceptedRequest
    )
    async def restore(run: str, mark: Mark, response: Response, key: Key = None) -> views.AcceptedRequest:
        """Start a new run from a checkpoint: of a step, the best or the last. History is not rewritten."""
        row, checkpoint = await find_checkpoint(projection, run, mark)
        envelope = commands.envelope(RestoreRequested, key or "")
        run_id = run_id_for(envelope.source, envelope.id)
        with suppress(NotFound):
            known = await fetch_run(projection.store, run_id) if key else None
            # A training asked for under the same key is this very run.
            if key and known is not None and known["parent_run_id"] != row["run_id"]:
                raise KeyReused(key)
        response.headers["Location"] = f"/training-runs/{run_id}"
        request = RestoreRequested(run_id=row["run_id"], step=checkpoint.step)
        return await commands.publish(
            views.AcceptedRequest, request, envelope, run_id=run_id, parent_run_id=row["run_id"]
        )

    @router.post(
        "/training-runs/{run}/checkpoints/{mark}/resume",
        status_code=202,
        response_model=views.AcceptedRequest,
        openapi_extra=body_of(ResumptionChanges, required=False),
    )
    async def resume(
        run: str, mark: Mark, request: Request, response: Response, key: Key = None
    ) -> views.AcceptedRequest:
        """Go on from a checkpoint in a new run: for longer, or with the command and settings of the body."""
        changes = await read_body(ResumptionChanges, request)
        row, checkpoint = await find_checkpoint(projection, run, mark)
        envelope = commands.envelope(TrainRequested, key or "")
        train = plan_resumed_run(row, checkpoint, changes, envelope)
        return await publish_training(
            commands,
            projection.store,
            train,
            envelope,
            response,
            is_repeatable=bool(key),
            parent_run_id=row["run_id"],
        )

    async def change_pin(run: str, mark: str, key: str | None, *, pinned: bool, reason: str) -> views.AcceptedRequest:
        row, checkpoint = await find_checkpoint(projection, run, mark)
        request = PinRequested(run_id=row["run_id"], step=checkpoint.step, pinned=pinned, reason=reason)
        envelope = commands.envelope(PinRequested, key or "")
        return await commands.publish(
            views.AcceptedRequest, request, envelope, run_id=row["run_id"], state=row["state"]
        )

    @router.put("/training-runs/{run}/checkpoints/{mark}/pin", status_code=202, response_model=views.AcceptedRequest)
    async def pin(run: str, mark: Mark, key: Key = None, reason: Reason = "pinned by request") -> views.AcceptedRequest:
        """Pin a checkpoint, so that retention does not delete it; `checkpoint_pinned` says that it is."""
        return await change_pin(run, mark, key, pinned=True, reason=reason)

    @router.delete("/training-runs/{run}/checkpoints/{mark}/pin", status_code=202, response_model=views.AcceptedRequest)
    async def unpin(
        run: str, mark: Mark, key: Key = None, reason: Reason = "unpinned by request"
    ) -> views.AcceptedRequest:
        """Unpin a checkpoint: retention decides about it again."""
        return await change_pin(run, mark, key, pinned=False, reason=reason)

    @router.post("/training-runs/{run}/checkpoints/scrub", status_code=202, response_model=views.AcceptedRequest)
    async def scrub_run(run: str, key: Key = None, repair: Repair = True) -> views.AcceptedRequest:
        """Have the checkpoint service read a run's checkpoints back, and repair from other copies what is rotten."""
        row = await find_run(projection, run)
        request = ScrubRequested(run_id=row["run_id"], repair=repair)
        envelope = commands.envelope(ScrubRequested, key or "")
        return await commands.publish(
            views.AcceptedRequest, request, envelope, run_id=row["run_id"], state=row["state"]
        )

    @router.post("/checkpoints/scrub", status_code=202, response_model=views.AcceptedEvent)
    async def scrub(key: Key = None, repair: Repair = True) -> views.AcceptedEvent:
        """Have the checkpoint service read the checkpoints of all runs back, as those of one."""
        envelope = commands.envelope(ScrubRequested, key or "")
        return await commands.publish(views.AcceptedEvent, ScrubRequested(repair=repair), envelope)

    return router
