"""Registered models over HTTP: their settings and history, and requests to change them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from contracts.base import TOKEN_PATTERN
from contracts.base import Request as BusRequest
from contracts.events.train import (
    ApproveRequested,
    ConfigureRequested,
    PromoteRequested,
    RollbackRequested,
    StageRequested,
)
from services.gateway import queries, views
from services.gateway.bodies import body_of, read_json_body
from services.gateway.commands import Commands
from services.gateway.parameters import Key, Limit
from services.gateway.projection import Projection

Name = Annotated[str, Path(pattern=TOKEN_PATTERN, description="name of the registered model")]
#: What a model can be asked for: the last part of the address -> the request.
ACTIONS: dict[str, type[BusRequest]] = {
    "promote": PromoteRequested,
    "rollback": RollbackRequested,
    "approve": ApproveRequested,
    "stage": StageRequested,
    "gates": ConfigureRequested,
}


def model_routes(commands: Commands, projection: Projection) -> APIRouter:
    """Return the routes of ``/models/{name}``."""
    router = APIRouter()

    @router.get("/models/{name}", response_model=views.RegisteredModel)
    async def get_model(name: Name) -> views.RegisteredModel:
        """Return a model's champion, gates and aliases, and the runs whose promotion waits for somebody."""
        await projection.catch_up()
        return await queries.get_model(projection.store, name)

    @router.get("/models/{name}/versions", response_model=views.Models)
    async def get_versions(name: Name, limit: Limit = 100, cursor: str | None = None) -> views.Models:
        """Return the versions of a model, the newest first."""
        await projection.catch_up()
        page = await queries.list_versions(projection.store, limit=limit, cursor=cursor, model=name)
        if not page.models:
            await queries.get_model(projection.store, name)  # a model that is not there is not found
        return page

    def add_action(action: str, kind: type[BusRequest]) -> None:
        async def act(name: Name, request: Request, key: Key = None) -> views.AcceptedModelRequest:
            event, envelope = commands.parse(kind, await read_json_body(request), key or "", model=name)
            return await commands.publish(views.AcceptedModelRequest, event, envelope, model=name)

        act.__doc__ = f"{kind.__doc__} The body has the fields of `{kind.verb}.requested`, without `model`."
        router.add_api_route(
            f"/models/{{name}}/{action}",
            act,
            methods=["PUT" if action == "gates" else "POST"],
            name=f"{action}_model",
            status_code=202,
            response_model=views.AcceptedModelRequest,
            openapi_extra=body_of(kind, without={"model"}),
        )

    for action, kind in ACTIONS.items():
        add_action(action, kind)
    return router
