"""The HTTP interface: routes, and the answers for errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import metadata
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import from_json

from contracts import subjects, topology
from contracts.base import TOKEN_PATTERN, study_id_for
from contracts.events.run import RunLog, RunProgress
from contracts.events.train import (
    CancelRequested,
    DrainRequested,
    StopStudyRequested,
    TrainRequested,
    TuneRequested,
    UndrainRequested,
)
from contracts.run_states import TERMINAL_STATES
from services.gateway import checkpoint_queries, curve_queries, queries, studies, views
from services.gateway.bodies import body_of, describe_bodies, read_json_body
from services.gateway.checkpoint_routes import checkpoint_routes
from services.gateway.commands import Commands, recorded_why
from services.gateway.datasets import dataset_routes
from services.gateway.event_routes import event_routes
from services.gateway.files import RunFiles, file_routes
from services.gateway.instrument import Instrument, SameSite
from services.gateway.lake import lake_routes
from services.gateway.long_answer import LongAnswers
from services.gateway.mlflow_pages import find_mlflow_url
from services.gateway.model_routes import model_routes
from services.gateway.packages import package_routes
from services.gateway.page import (
    CONTENT_SECURITY_POLICY,
    DOCS,
    DOCS_ASSETS_PATH,
    DOCS_CONTENT_SECURITY_POLICY,
    PAGE,
    docs_assets_dir,
)
from services.gateway.parameters import MAX_RANGE, Follow, Key, LastEventId, Limit, RangeLimit, Reason, Text
from services.gateway.policy_routes import policy_routes
from services.gateway.problems import RESPONSES, add_problem_handlers, describe_problems
from services.gateway.projection import Projection, event_row
from services.gateway.queries import Row
from services.gateway.ranges import cut_range, read_newest, read_range
from services.gateway.run_lookup import fetch_run, find_run
from services.gateway.run_parameters import ChosenRuns
from services.gateway.run_requests import publish_training
from services.gateway.settings import GatewaySettings
from services.gateway.sse import HEADERS, Encode, EventStream
from services.kit.bus import Message
from services.kit.service import Service

#: Curves in one answer.
MAX_CURVES = 500
StudyId = Annotated[str, Path(pattern=TOKEN_PATTERN)]


def build_api(service: Service, projection: Projection, files: RunFiles, settings: GatewaySettings) -> FastAPI:
    """The application: everything it does goes through the bus or the read model."""
    app = FastAPI(
        title="trainbus",
        version="1",
        description="Train models and follow them. Name a run by its id, a unique beginning of it, or its name.",
        responses=RESPONSES,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; /docs is served by _operation_routes
        redoc_url=None,
    )
    app.add_middleware(SameSite)
    app.add_middleware(Instrument)
    add_problem_handlers(app)
    describe_problems(app)
    describe_bodies(app)
    commands, answers = Commands(service.bus), LongAnswers(service.stopping)
    app.include_router(_operation_routes(service, projection))
    app.include_router(_requests(service, commands, projection))
    app.include_router(package_routes(service.settings))
    app.include_router(_run_routes(commands, projection))
    app.include_router(checkpoint_routes(commands, projection))
    app.include_router(file_routes(projection, files, answers))
    app.include_router(dataset_routes(projection, files, settings, commands, service.bus, answers))
    app.include_router(lake_routes(settings, files))
    app.include_router(_stream_routes(service, projection))
    app.include_router(event_routes(service))
    app.include_router(studies.read_routes(projection))
    app.include_router(_catalog_routes(projection, settings))
    app.include_router(model_routes(commands, projection))
    app.include_router(policy_routes(service.bus, commands))
    app.mount(DOCS_ASSETS_PATH, StaticFiles(directory=docs_assets_dir()))
    return app


# -- runs -----------------------------------------------------------------------


def _requests(service: Service, commands: Commands, projection: Projection) -> APIRouter:
    """What can be asked for: each answers 202 as soon as the request is on the bus."""
    router, store = APIRouter(), projection.store

    @router.post(
        "/training-runs",
        status_code=202,
        response_model=views.AcceptedRequest,
        openapi_extra=body_of(TrainRequested),
    )
    async def post_run(request: Request, response: Response, key: Key = None) -> views.AcceptedRequest:
        """Ask for a training run. 202: it is on the bus, and will be accepted or rejected."""
        body = await read_json_body(request)
        train, envelope = commands.parse(TrainRequested, body, key or "")
        return await publish_training(commands, store, train, envelope, response, is_repeatable=bool(key))

    @router.post(
        "/hpo/studies",
        status_code=202,
        response_model=views.AcceptedStudyRequest,
        openapi_extra=body_of(TuneRequested),
    )
    async def post_study(request: Request, response: Response, key: Key = None) -> views.AcceptedStudyRequest:
        """Ask for a search over hyper-parameters. 202: it is on the bus, and will be accepted or rejected."""
        tune, envelope = commands.parse(TuneRequested, await read_json_body(request), key or "")
        study_id = study_id_for(envelope.source, envelope.id)
        response.headers["Location"] = f"/hpo/studies/{study_id}"
        return await commands.publish(views.AcceptedStudyRequest, tune, envelope, study_id=study_id)

    @router.post("/hpo/studies/{study_id}/stop", status_code=202, response_model=views.AcceptedStudyRequest)
    async def stop_study(
        study_id: StudyId, key: Key = None, reason: Reason = "stopped by request"
    ) -> views.AcceptedStudyRequest:
        """End a study: no further trials, and its runs are cancelled."""
        found = await studies.read_study(service.bus, study_id)
        if found.state != "running":
            raise HTTPException(409, f"study {study_id} is already {found.state}: there is nothing to stop")
        envelope = commands.envelope(StopStudyRequested, key or "")
        request = StopStudyRequested(study_id=study_id, reason=reason)
        return await commands.publish(views.AcceptedStudyRequest, request, envelope, study_id=study_id)

    @router.get("/submit-schema")
    async def get_submit_schema() -> dict[str, Any]:
        """The JSON Schema of what POST /training-runs takes."""
        return TrainRequested.model_json_schema()

    @router.post("/training-runs/{run}/cancel", status_code=202, response_model=views.AcceptedRequest)
    async def cancel(run: str, key: Key = None, reason: Reason = "cancelled by request") -> views.AcceptedRequest:
        """Stop a run for good. Its checkpoints stay."""
        row = await find_run(projection, run)
        if row["state"] in TERMINAL_STATES:
            raise HTTPException(409, f"run {row['run_id']} is already {row['state']}: there is nothing to cancel")
        request = CancelRequested(run_id=row["run_id"], reason=reason)
        envelope = commands.envelope(CancelRequested, key or "")
        return await commands.publish(
            views.AcceptedRequest, request, envelope, run_id=row["run_id"], state=row["state"]
        )

    async def change_drain(
        kind: type[DrainRequested | UndrainRequested], node_id: str, key: str | None, **fields: str | None
    ) -> views.AcceptedNodeRequest:
        await projection.catch_up()
        await queries.check_node(store, node_id)
        envelope = commands.envelope(kind, key or "")
        request = kind(node_id=node_id, **fields)
        return await commands.publish(views.AcceptedNodeRequest, request, envelope, node_id=node_id)

    @router.post("/nodes/{node_id}/drain", status_code=202, response_model=views.AcceptedNodeRequest)
    async def drain(
        node_id: str, key: Key = None, reason: Reason = "drained by request", user: Text = None
    ) -> views.AcceptedNodeRequest:
        """Take a node out of use, until it is undrained; its runs move to other nodes."""
        return await change_drain(DrainRequested, node_id, key, reason=reason, user=user)

    @router.post("/nodes/{node_id}/undrain", status_code=202, response_model=views.AcceptedNodeRequest)
    async def undrain(
        node_id: str, key: Key = None, reason: Reason = "undrained by request", user: Text = None
    ) -> views.AcceptedNodeRequest:
        """Put a drained node back into use."""
        return await change_drain(UndrainRequested, node_id, key, reason=reason, user=user)

    return router


def _run_routes(commands: Commands, projection: Projection) -> APIRouter:
    """What is known of runs."""
    router, store = APIRouter(), projection.store

    @router.get("/training-runs", response_model=views.RunPage)
    async def get_runs(
        wanted: ChosenRuns,
        limit: Limit = 50,
        cursor: str | None = None,
        trials: Annotated[
            bool, Query(description="false: without the trials of studies, which GET /hpo/studies folds")
        ] = True,
        counts: Annotated[
            bool, Query(description="add how many runs each state, kind, user, team and model has")
        ] = False,
    ) -> views.RunPage:
        """Runs, newest first."""
        if cursor is None:
            await projection.catch_up()  # who has just asked for a run finds it here
        wanted = replace(wanted, trials=trials)
        page = await queries.list_runs(store, wanted, limit=limit, cursor=cursor)
        return page.model_copy(update={"counts": await queries.count_runs(store, wanted)}) if counts else page

    @router.get("/training-runs/{run}", response_model=views.RunDetail)
    async def get_run(
        run: str,
        fresh: Annotated[
            bool, Query(description="wait until all that was published before is in the answer, for a known id too")
        ] = False,
        timeline: Annotated[
            int, Query(ge=0, le=10_000, description="how many of its newest facts the timeline has")
        ] = queries.MAX_TIMELINE,
    ) -> views.RunDetail:
        """Everything about one run."""
        if fresh:
            await projection.catch_up_with_progress()
        return await queries.run_detail(store, (await find_run(projection, run))["run_id"], timeline)

    @router.get("/training-runs/{run}/curves", response_model=views.Curves)
    async def get_curves(
        run: str,
        name: Annotated[
            list[str] | None, Query(max_length=MAX_CURVES, description="metrics; all if none is named")
        ] = None,
        max_points: Annotated[int, Query(ge=2, le=10_000, description="of each curve")] = 500,
        limit: Annotated[int, Query(ge=1, le=MAX_CURVES, description="curves; fewer if they have many points")] = 50,
        cursor: str | None = None,
    ) -> views.Curves:
        """Metric curves by their names, without what was trained twice, thinned for plotting."""
        row = await find_run(projection, run)
        return await curve_queries.list_curves(
            store, row["run_id"], names=name or [], max_points=max_points, limit=limit, cursor=cursor
        )

    @router.get("/training-runs/{run}/checkpoints", response_model=views.Checkpoints)
    async def get_checkpoints(run: str, limit: Limit = 100, cursor: str | None = None) -> views.Checkpoints:
        """Committed checkpoints, the newest first."""
        row = await find_run(projection, run)
        return await checkpoint_queries.list_checkpoints(store, row, limit=limit, cursor=cursor)

    @router.get("/training-runs/{run}/why", response_model=views.Why)
    async def get_why(run: str) -> dict[str, Any]:
        """Why the run is where it is, by the scheduler's answer."""
        row = await find_run(projection, run)
        if row["state"] not in TERMINAL_STATES and (answer := await commands.ask_scheduler(row)) is not None:
            return answer
        await projection.catch_up()
        return recorded_why(await fetch_run(store, row["run_id"]))

    return router


# -- streams --------------------------------------------------------------------


def _stream_routes(service: Service, projection: Projection) -> APIRouter:
    router, store, bus = APIRouter(), projection.store, service.bus

    async def respond(
        row: Row, stream: str, subject: str, after: int, done: Callable[[Row], bool], encode: Encode, route: str
    ) -> Response:
        async def is_finished() -> bool:
            return done(await fetch_run(store, row["run_id"]))

        events = EventStream(bus, stream, (subject,), after, is_finished, encode, route)
        if await events.is_exhausted():
            return Response(status_code=204)  # an EventSource then does not come back
        return StreamingResponse(events.body(service.stopping), media_type="text/event-stream", headers=HEADERS)

    async def read_tail(subject: str, after: int, lines: int) -> views.Logs:
        """Read the last batches that together hold so many lines, of those after a sequence."""

        def count(found: Iterable[Message[RunLog]]) -> int:
            return sum(len(item.event.lines) for item in found)

        found = await read_newest(bus, topology.LOGS, (subject,), lambda found: count(found) >= lines)
        kept = deque(item for item in found if item.sequence > after)
        held = count(kept)
        while kept and held - len(kept[0].event.lines) >= lines:
            held -= len(kept.popleft().event.lines)
        batches = [_encode_log(item)[1] for item in kept]
        return views.Logs(batches=batches, last_event_id=kept[-1].sequence if kept else after, has_more=False)

    @router.get("/training-runs/{run}/metrics", response_model=views.Metrics)
    async def get_metrics(
        run: str, follow: Follow = True, last_event_id: LastEventId = 0, limit: RangeLimit = 1000
    ) -> Any:
        """Metric points as server-sent events ``metrics``: all there are, then live, then ``end``."""
        row = await find_run(projection, run)
        subject = subjects.progress(row["run_id"])
        if follow:
            return await respond(
                row, topology.PROGRESS.name, subject, last_event_id, _terminal, _encode_metrics, "metrics"
            )
        batches, position = await read_range(
            bus, topology.PROGRESS.name, (subject,), last_event_id, limit, _encode_metrics
        )
        return views.Metrics(batches=batches, **position)

    @router.get("/training-runs/{run}/logs", response_model=views.Logs)
    async def get_logs(
        run: str,
        follow: Follow = True,
        last_event_id: LastEventId = 0,
        limit: RangeLimit = 1000,
        tail: Annotated[int | None, Query(ge=1, le=MAX_RANGE, description="without follow: the last lines")] = None,
    ) -> Any:
        """Output lines of all ranks as server-sent events ``log``."""
        row = await find_run(projection, run)
        subject = subjects.log(row["run_id"])
        if follow:
            return await respond(row, topology.LOGS.name, subject, last_event_id, _terminal, _encode_log, "logs")
        if tail is not None:
            return await read_tail(subject, last_event_id, tail)
        batches, position = await read_range(bus, topology.LOGS.name, (subject,), last_event_id, limit, _encode_log)
        return views.Logs(batches=batches, **position)

    @router.get("/training-runs/{run}/events", response_model=views.Facts)
    async def get_events(
        run: str, follow: Follow = True, last_event_id: LastEventId = 0, limit: RangeLimit = 1000
    ) -> Any:
        """The run's facts as server-sent events named after the fact; ends with the verdict, if one is due."""
        row = await find_run(projection, run)
        if follow:
            subject = subjects.run(row["run_id"])
            return await respond(
                row, topology.FACTS.name, subject, last_event_id, views.is_settled, _encode_fact, "events"
            )
        await projection.catch_up()  # what was told of the run before the question is in the answer
        facts = await queries.run_facts(store, row["run_id"], last_event_id, limit + 1)
        events, position = cut_range([(fact.sequence, fact) for fact in facts], limit, last_event_id)
        return views.Facts(events=events, **position)

    return router


def _terminal(row: Row) -> bool:
    return row["state"] in TERMINAL_STATES


def _encode_metrics(item: Message[RunProgress]) -> tuple[str, views.MetricBatch]:
    return "metrics", views.MetricBatch.model_validate(from_json(item.event.model_dump_json()))


def _encode_log(item: Message[RunLog]) -> tuple[str, views.LogBatch]:
    return "log", views.LogBatch.model_validate(item.event.model_dump())


def _encode_fact(item: Message[Any]) -> tuple[str, views.Fact]:
    return item.event.fact, views.Fact.model_validate(views.timeline_fields(event_row(item)))


# -- nodes, datasets, models, the page and what operators look at -----------------


def _catalog_routes(projection: Projection, settings: GatewaySettings) -> APIRouter:
    router, store = APIRouter(), projection.store
    version = metadata.version("trainbus")

    @router.get("/about", response_model=views.About)
    async def get_about() -> views.About:
        """The version, and where MLflow's pages are."""
        return views.About(version=version, mlflow_url=await find_mlflow_url(settings))

    @router.get("/nodes", response_model=views.Nodes)
    async def get_nodes(limit: Limit = 500, cursor: str | None = None) -> views.Nodes:
        """Nodes by their names, each with its state and what runs there."""
        await projection.catch_up()
        return await queries.list_nodes(store, limit=limit, cursor=cursor)

    @router.get("/datasets", response_model=views.Datasets)
    async def get_datasets(limit: Limit = 100, cursor: str | None = None) -> views.Datasets:
        """Datasets that can be trained on, newest first."""
        await projection.catch_up()
        return await queries.list_datasets(store, limit=limit, cursor=cursor)

    @router.get("/models", response_model=views.Models)
    async def get_models(limit: Limit = 100, cursor: str | None = None) -> views.Models:
        """The versions of all registered models, of each model the newest first."""
        await projection.catch_up()
        return await queries.list_versions(store, limit=limit, cursor=cursor)

    @router.get("/registered-models", response_model=views.RegisteredModels)
    async def get_registered_models(limit: Limit = 100, cursor: str | None = None) -> views.RegisteredModels:
        """Registered models by their names: champion, aliases, what is served, and whose promotion waits."""
        await projection.catch_up()
        return await queries.list_models(store, limit=limit, cursor=cursor)

    return router


def _operation_routes(service: Service, projection: Projection) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(DOCS, headers={"Content-Security-Policy": DOCS_CONTENT_SECURITY_POLICY})

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"service": service.name, "status": "ok"}

    @router.get("/ready")
    async def ready() -> JSONResponse:
        checks = service.check_readiness()
        good = all(checks.values())
        return JSONResponse({"service": service.name, "ready": good, "checks": checks}, 200 if good else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return router


__all__ = ["build_api"]
