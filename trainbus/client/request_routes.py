"""By which route of the gateway each request goes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contracts.base import Request
from contracts.events.train import (
    AdoptPolicyRequested,
    ApproveRequested,
    CancelRequested,
    ConfigureRequested,
    DrainRequested,
    IngestRequested,
    PinRequested,
    PromoteRequested,
    RestoreRequested,
    RollbackRequested,
    ScrubRequested,
    StageRequested,
    StopStudyRequested,
    TrainRequested,
    TuneRequested,
    UndrainRequested,
)


@dataclass(frozen=True, slots=True)
class RequestRoute:
    """A method and an address, and what goes with them: parameters of the query, or a body in JSON."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    body: str | None = None


def find_route(request: Request) -> RequestRoute:
    """Return the route of a request.

    Raises:
        ValueError: there is none for it.
    """
    match request:
        case TrainRequested():
            return RequestRoute("POST", "/training-runs", body=request.model_dump_json(exclude_defaults=True))
        case CancelRequested(run_id=run_id):
            return _with_params("POST", f"/training-runs/{run_id}/cancel", request)
        case RestoreRequested(run_id=run_id, step=int(step)):
            return RequestRoute("POST", f"/training-runs/{run_id}/checkpoints/{step}/restore")
        case PinRequested(run_id=run_id, step=step, pinned=pinned):
            path = f"/training-runs/{run_id}/checkpoints/{step}/pin"
            return _with_params("PUT" if pinned else "DELETE", path, request)
        case ScrubRequested(run_id=run_id):
            path = "/checkpoints/scrub" if run_id is None else f"/training-runs/{run_id}/checkpoints/scrub"
            return _with_params("POST", path, request)
        case IngestRequested():
            return _with_body("POST", "/ingestions", request)
        case TuneRequested():
            return _with_body("POST", "/hpo/studies", request)
        case StopStudyRequested(study_id=study_id):
            return _with_params("POST", f"/hpo/studies/{study_id}/stop", request)
        case DrainRequested(node_id=node_id, scope="node"):
            return _with_params("POST", f"/nodes/{node_id}/drain", request)
        case UndrainRequested(node_id=node_id):
            return _with_params("POST", f"/nodes/{node_id}/undrain", request)
        case AdoptPolicyRequested():
            return _with_body("PUT", "/policy", request)
        case ConfigureRequested(model=model):
            return _with_body("PUT", f"/models/{model}/gates", request)
        case PromoteRequested() | RollbackRequested() | ApproveRequested() | StageRequested():
            return _with_body("POST", f"/models/{request.model}/{request.verb}", request)
    raise ValueError(f"{request!r} has no route over HTTP")


def _with_params(method: str, path: str, request: Request) -> RequestRoute:
    included = {"reason", "user", "repair"}
    return RequestRoute(method, path, request.model_dump(mode="json", exclude_defaults=True, include=included))


def _with_body(method: str, path: str, request: Request) -> RequestRoute:
    """The name of a model stands in the address."""
    return RequestRoute(method, path, body=request.model_dump_json(exclude_defaults=True, exclude={"model"}))
