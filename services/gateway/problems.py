"""Answers that are no success: problem documents (RFC 9457), each with what to change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from contracts.envelope import InvalidData
from contracts.problems import FieldProblem, describe_detail, join_problems
from services.gateway.commands import BusUnavailable, KeyReused
from services.gateway.pages import BadCursor
from services.gateway.queries import NotFound
from services.gateway.run_lookup import AmbiguousReference
from services.kit.bus import TransientError

MEDIA_TYPE = "application/problem+json"
#: Seconds after which a request that found no bus or no store may be sent again.
RETRY_AFTER_S = 2
#: The status of the answer to each error of the read model and the bus, and its type.
KNOWN: dict[type[Exception], tuple[int, str]] = {
    NotFound: (404, "not-found"),
    AmbiguousReference: (409, "ambiguous-reference"),
    KeyReused: (409, "idempotency-key-reused"),
    BadCursor: (422, "bad-cursor"),
    BusUnavailable: (503, "bus-unavailable"),
    TransientError: (503, "bus-unavailable"),
}


class Problem(BaseModel):
    """Any answer that is not a success, as RFC 9457 has it."""

    type: str = Field("about:blank", description="names the kind of problem; about:blank: the status says it all")
    title: str = Field(description="the status in words, or the kind of problem")
    status: int
    detail: str = Field(description="what is wrong and what to change")
    problems: list[FieldProblem] = Field([], description="each field that is wrong")
    candidates: list[str] = Field([], description="ids or names of runs that a name could mean")


SCHEMA_REF = "#/components/schemas/Problem"
#: For the OpenAPI document: what every route may answer.
RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"description": HTTPStatus(code).phrase, "content": {MEDIA_TYPE: {"schema": {"$ref": SCHEMA_REF}}}}
    for code in (403, 404, 405, 409, 413, 415, 422, 500, 502, 503)
}


def problem_response(status: int, detail: str, kind: str = "", **more: Any) -> JSONResponse:
    """Return the answer.

    Args:
        kind: names the kind of problem, for programs; '' where the status says it all.
        more: other fields of ``Problem``.
    """
    phrase = HTTPStatus(status).phrase
    named = {"type": f"urn:trainbus:problem:{kind}", "title": kind.replace("-", " ")} if kind else {"title": phrase}
    problem = Problem.model_validate({**named, "status": status, "detail": detail, **more})
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == HTTPStatus.SERVICE_UNAVAILABLE else None
    content = problem.model_dump(exclude_defaults=True) | {"type": problem.type}
    return JSONResponse(content, status, headers, media_type=MEDIA_TYPE)


def describe_problems(app: FastAPI) -> None:
    """Have the OpenAPI document of the application hold the schema that ``RESPONSES`` refer to."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        document = describe()
        problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
        document["components"]["schemas"] |= {**problem.pop("$defs"), "Problem": problem}
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def add_problem_handlers(app: FastAPI) -> None:
    """Have every error of the application answered by a problem document."""

    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        detail = str(error.detail)
        if "route" not in request.scope and error.status_code in (404, 405):
            detail = f"there is no {request.method} {request.url.path}: /docs lists what there is"
        answer = problem_response(error.status_code, detail)
        answer.headers.update(error.headers or {})
        return answer

    async def on_known(_: Request, error: Exception) -> JSONResponse:
        status, kind = next(found for known, found in KNOWN.items() if isinstance(error, known))
        return problem_response(status, str(error), kind, candidates=getattr(error, "candidates", []))

    async def on_invalid(_: Request, error: InvalidData) -> JSONResponse:
        return problem_response(422, str(error), "invalid-request", problems=error.problems)

    async def on_validation(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = [
            FieldProblem(field=".".join(str(part) for part in detail["loc"][1:]), message=describe_detail(detail))
            for detail in error.errors()
        ]
        return problem_response(422, join_problems(problems), "invalid-request", problems=problems)

    async def on_defect(_: Request, error: Exception) -> JSONResponse:
        return problem_response(500, f"the gateway failed ({type(error).__name__}): its log says at what. Report it")

    handlers: dict[type[Exception], Callable[[Request, Any], Awaitable[JSONResponse]]] = {
        **dict.fromkeys(KNOWN, on_known),
        HTTPException: on_http,
        InvalidData: on_invalid,
        RequestValidationError: on_validation,
        Exception: on_defect,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
