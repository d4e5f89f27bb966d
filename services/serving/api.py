"""The HTTP interface: the Open Inference Protocol v2, POST /predict, and an OpenAPI page typed by the models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fastapi_offline
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic_core import from_json
from starlette.routing import Route

from services.serving.admission import ClientDisconnected, OverloadedError
from services.serving.core.problems import RequestRefused
from services.serving.core.protocol import HEADER_LENGTH, describe_model, encode_response, parse_infer
from services.serving.core.rows import find_rows, outputs_to_rows, rows_to_samples
from services.serving.core.signature import Signature, answer_schema, row_schema
from services.serving.early_refusal import build_refusal
from services.serving.router import NotServedError, PredictionFailed, Router, ServedModel
from services.serving.version import ServedVersion

SERVER = {"name": "trainbus", "extensions": ["binary_tensor_data"]}
ASSETS_PATH = "/docs/assets"
#: Media types of a body that is a file of a sample, by the beginning of their names.
FILE_TYPES = ("image/", "audio/", "video/", "application/octet-stream")
NDJSON = ("application/x-ndjson", "application/jsonl")
#: What answered: the version, the run that trained it, and the SHA-256 of the manifest of its checkpoint.
VERSION_HEADER, RUN_HEADER, DIGEST_HEADER = "Trainbus-Version", "Trainbus-Run", "Trainbus-Digest"


def build_api(router: Router, version: str, max_body_bytes: int, is_folded: Callable[[], bool]) -> FastAPI:
    """Return the application. ``is_folded``: whether the log has been read, so that it is known what is served."""
    app = FastAPI(
        title="trainbus serving",
        version="1",
        description="Predictions of the promoted models: POST /predict, and the Open Inference Protocol v2.",
        docs_url=None,
        redoc_url=None,
    )
    _add_error_handlers(app)
    app.routes.extend(_prediction_routes(router, max_body_bytes))
    app.include_router(_protocol_routes(router, version, is_folded))
    app.include_router(_page_routes(router))
    folder = Path(fastapi_offline.__file__).parent / "static"
    app.mount(ASSETS_PATH, StaticFiles(directory=folder))
    app.openapi = lambda: build_openapi(app, router)  # type: ignore[method-assign]
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestRefused)
    async def on_refused(_: Request, error: RequestRefused) -> JSONResponse:
        problems = [{"field": each.field, "message": each.text} for each in error.problems]
        return JSONResponse({"error": str(error), "problems": problems}, error.status)

    @app.exception_handler(NotServedError)
    async def on_not_served(_: Request, error: NotServedError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 404)

    @app.exception_handler(OverloadedError)
    async def on_overloaded(_: Request, error: OverloadedError) -> JSONResponse:
        return build_refusal(error)

    @app.exception_handler(ClientDisconnected)
    async def on_disconnected(_: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=499)  # as nginx counts it; nobody reads it

    @app.exception_handler(PredictionFailed)
    async def on_failed(_: Request, error: PredictionFailed) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 500)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise RequestRefused.of("", f"the body has more than {max_bytes:,} bytes: send fewer rows at once")
    return bytes(body)


# -- the Open Inference Protocol ----------------------------------------------


def _protocol_routes(router: Router, version: str, is_folded: Callable[[], bool]) -> APIRouter:
    api = APIRouter(include_in_schema=False)

    @api.get("/v2")
    async def server() -> dict[str, Any]:
        return {**SERVER, "version": version}

    @api.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @api.get("/v2/health/ready")
    async def ready() -> JSONResponse:
        # Not that of the models: one that cannot be served would take all others out of a load balancer.
        good = is_folded()
        return JSONResponse({"ready": good}, 200 if good else 503)

    @api.get("/v2/models/{name}")
    @api.get("/v2/models/{name}/versions/{number}")
    async def describe(response: Response, name: str, number: str | None = None) -> dict[str, Any]:
        model, chosen = router.find_version(name, number)
        numbers = [chosen.version] if number else [each.version for each in model.versions()]
        response.headers.update(name_version(chosen))
        return describe_model(name, numbers, chosen.signature)

    @api.get("/v1/models/{name}")  # KServe's first protocol
    @api.get("/v2/models/{name}/ready")
    @api.get("/v2/models/{name}/versions/{number}/ready")
    async def model_ready(name: str, number: str | None = None) -> JSONResponse:
        _, chosen = router.find_version(name, number)
        good = chosen.host.process is not None
        return JSONResponse({"name": name, "ready": good}, 200 if good else 503)

    return api


# -- predictions --------------------------------------------------------------


def _prediction_routes(router: Router, max_body_bytes: int) -> list[Route]:
    """Return the routes of predictions. FastAPI's, which resolve parameters, would cost an eighth of an answer."""

    async def infer(request: Request) -> Response:
        name, number = request.path_params["name"], request.path_params.get("number")
        model, chosen = router.find_version(name, number)
        body = await _read_body(request, max_body_bytes)
        parsed = parse_infer(body, request.headers.get(HEADER_LENGTH), chosen.signature)
        answer = await router.predict(model, chosen if number else None, parsed.samples, request.is_disconnected)
        content, header_bytes = encode_response(name, answer.version.version, parsed, answer.outputs)
        headers = name_version(answer.version)
        if header_bytes is None:
            return Response(content, media_type="application/json", headers=headers)
        headers[HEADER_LENGTH] = str(header_bytes)
        return Response(content, media_type="application/octet-stream", headers=headers)

    async def predict(request: Request) -> Response:
        name = request.path_params.get("name") or request.query_params.get("model")
        version = request.query_params.get("version")
        served, chosen = router.find_version(name, version)
        body = await _read_body(request, max_body_bytes)
        samples = parse_body(body, request.headers.get("content-type", ""), chosen.signature)
        answer = await router.predict(served, chosen if version else None, samples, request.is_disconnected)
        return _predictions(served, answer.version, outputs_to_rows(answer.outputs))

    # KServe's first protocol is what its client speaks unless it is told otherwise.
    paths = {
        "/predict": predict,
        "/predict/{name}": predict,
        "/v2/models/{name}/infer": infer,
        "/v2/models/{name}/versions/{number}/infer": infer,
        "/v1/models/{name}:predict": predict,
    }
    return [Route(path, function, methods=["POST"]) for path, function in paths.items()]


def _predictions(model: ServedModel, version: ServedVersion, rows: list[dict[str, Any]]) -> Response:
    content = {"model": model.name, "version": version.version, "predictions": rows}
    body = json.dumps(content, separators=(",", ":"))
    return Response(body, media_type="application/json", headers=name_version(version))


def name_version(version: ServedVersion) -> dict[str, str]:
    """Return the headers that say which weights gave an answer."""
    named = {VERSION_HEADER: str(version.version), RUN_HEADER: version.promotion.run_id}
    return {**named, DIGEST_HEADER: digest} if (digest := version.host.artifact.digest) else named


def parse_body(body: bytes, content_type: str, signature: Signature) -> list[dict[str, bytes]]:
    """Return the samples of a body: JSON, one JSON row a line, or the bytes of one file.

    Raises:
        RequestRefused: it is none of these, or does not fit the model.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith(FILE_TYPES):
        if signature.is_table or len(signature.inputs) != 1:
            names = ", ".join(map(repr, signature.input_names))
            raise RequestRefused.of("", f"a file alone is no row of this model: send JSON with {names or 'its fields'}")
        return [{signature.inputs[0].name: body}]
    try:
        content = [from_json(line) for line in body.splitlines() if line.strip()] if kind in NDJSON else None
        content = from_json(body) if content is None else content
    except ValueError as error:
        hint = ""
        if signature.is_table is False:
            hint = "; send a file with its own type, as in curl -H 'Content-Type: image/png' --data-binary @FILE"
        raise RequestRefused.of("", f"the body is no JSON: {error}{hint}") from error
    return rows_to_samples(find_rows(content), signature)


# -- pages --------------------------------------------------------------------


def _page_routes(router: Router) -> APIRouter:
    api = APIRouter(include_in_schema=False)
    docs = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="trainbus serving",
        swagger_js_url=f"{ASSETS_PATH}/swagger-ui-bundle.js",
        swagger_css_url=f"{ASSETS_PATH}/swagger-ui.css",
        swagger_favicon_url="data:,",
    )
    content = bytes(docs.body).decode()

    @api.get("/")
    @api.get("/docs")
    async def page() -> HTMLResponse:
        return HTMLResponse(content)

    @api.get("/models")
    async def models() -> list[dict[str, Any]]:
        return [describe_served(each) for each in router.models.values()]

    return api


def describe_served(model: ServedModel) -> dict[str, Any]:
    """Return what is served of a model, and how it does."""
    primary, previous = model.primary, model.previous
    described: dict[str, Any] = {
        "model": model.name,
        "version": primary.version if primary else None,
        "run_id": primary.promotion.run_id if primary else None,
        "previous_version": previous.version if previous else None,
        "problem": model.problem,
        "processes": [
            {"version": each.version, "device": each.host.device, "memory_bytes": each.host.resident_bytes}
            for each in model.versions()
        ],
    }
    if primary is not None:
        tally = primary.tally
        described |= {
            "ready": primary.host.process is not None,
            "golden_samples": primary.golden_samples,
            "answered": tally.answered,
            "errors": tally.errors,
            "refused": tally.refused,
            "p50_ms": round(tally.percentile_s(0.5) * 1000, 2),
            "p99_ms": round(tally.percentile_s(0.99) * 1000, 2),
        }
    return described


def build_openapi(app: FastAPI, router: Router) -> dict[str, Any]:
    """Return the OpenAPI document, with a path for each model that is served now, typed from its signature."""
    paths: dict[str, Any] = {}
    for model in router.models.values():
        if model.primary is not None:
            paths[f"/predict/{model.name}"] = {"post": _describe_predict(model.name, model.primary)}
            paths[f"/v2/models/{model.name}/infer"] = {"post": _describe_infer(model.name, model.primary)}
    return {
        "openapi": "3.1.0",
        "info": {"title": app.title, "version": app.version, "description": app.description},
        "paths": paths,
    }


def _describe_predict(name: str, version: ServedVersion) -> dict[str, Any]:
    row = row_schema(version.signature)
    content: dict[str, Any] = {
        "application/json": {
            "schema": {"type": "object", "properties": {"rows": {"type": "array", "items": row}}, "required": ["rows"]}
        }
    }
    if version.signature.is_table is False and len(version.signature.inputs) == 1:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    answer = {
        "type": "object",
        "properties": {
            "model": {"type": "string"},
            "version": {"type": "integer"},
            "predictions": {"type": "array", "items": answer_schema(version.signature)},
        },
    }
    return {
        "summary": f"Predict with {name}, version {version.version} of run {version.promotion.run_id}",
        "requestBody": {"required": True, "content": content},
        "responses": _responses(answer),
    }


def _describe_infer(name: str, version: ServedVersion) -> dict[str, Any]:
    tensor = {"type": "object", "required": ["name", "shape", "datatype"]}
    inputs = ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in version.signature.inputs)
    return {
        "summary": f"The Open Inference Protocol v2 for {name}",
        "description": f"Inputs: {inputs or 'unknown'}.",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"type": "object", "properties": {"inputs": {"type": "array", "items": tensor}}}
                }
            },
        },
        "responses": _responses({"type": "object"}),
    }


def _responses(answer: Mapping[str, Any]) -> dict[str, Any]:
    error = {"type": "object", "properties": {"error": {"type": "string"}, "problems": {"type": "array"}}}
    content = {"application/json": {"schema": error}}
    refused = {"description": "Bad input: each problem with its field", "content": content}
    return {
        "200": {"description": "The predictions", "content": {"application/json": {"schema": dict(answer)}}},
        "400": refused,
        "422": refused,
    }
