"""JSON that routes are sent: how it is described, and how it is read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from contracts.envelope import MAX_BODY_BYTES

M = TypeVar("M", bound=BaseModel)


def body_of(model: type[BaseModel], *, without: Collection[str] = (), required: bool = True) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route that reads its body itself.

    Args:
        without: fields that the address of the route has in place of the body.
    """
    # A class is described in one way where it is sent and in another where it is answered.
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}-Input")
    schema["properties"] = {name: part for name, part in schema["properties"].items() if name not in without}
    schema["required"] = [name for name in schema.get("required", ()) if name not in without]
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def describe_bodies(app: FastAPI) -> None:
    """Have the OpenAPI document of the application hold the definitions that ``body_of`` refers to."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        document = describe()
        for route in document["paths"].values():
            for operation in route.values():
                for content in operation.get("requestBody", {}).get("content", {}).values():
                    found = content["schema"].pop("$defs", {})
                    document["components"]["schemas"] |= {f"{name}-Input": schema for name, schema in found.items()}
        return document

    app.openapi = openapi  # type: ignore[method-assign]


async def read_json_body(request: Request) -> bytes:
    """Return the body of a request; b"" if it has none.

    Raises:
        HTTPException: 415, it is not JSON by its header; 413, it is too long.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(
                413, f"the body has more than {MAX_BODY_BYTES:,} bytes: put large content into the object store"
            )
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    # A form or plain text is what a web page may send across sites without asking.
    if content_type != "application/json" and (body or content_type):
        raise HTTPException(415, "send the request with Content-Type: application/json")
    return bytes(body)


async def read_body(model: type[M], request: Request) -> M:
    """Return the body of a request as an instance of ``model``; none is taken for an empty object.

    A parameter of the route would do the same, but FastAPI answers 400 to a body that is not UTF-8, with no word of it.

    Raises:
        HTTPException: as ``read_json_body`` does.
        RequestValidationError: it is no JSON in UTF-8, or does not fit ``model``; with the problem of each field.
    """
    body = await read_json_body(request)
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error
