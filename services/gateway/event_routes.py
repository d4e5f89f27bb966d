"""The bus over HTTP: every event of its streams as CloudEvents, and any request of the contracts onto it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Path, Query, Request
from fastapi.responses import StreamingResponse

from contracts import subjects, topology
from contracts.base import ingestion_id_for, request_id_for, run_id_for, study_id_for
from contracts.events import REQUESTS
from contracts.events.train import IngestRequested, RestoreRequested, TrainRequested, TuneRequested
from services.gateway import views
from services.gateway.commands import BusUnavailable, Commands
from services.gateway.parameters import MAX_RANGE, Follow, Key, LastEventId, RangeLimit
from services.gateway.ranges import read_newest, read_range
from services.gateway.sse import HEADERS, EventStream
from services.kit.bus import Bus, Message
from services.kit.service import Service

#: What ``stream`` may name.
STREAMS: dict[str, topology.Stream] = {
    "facts": topology.FACTS,
    "requests": topology.REQUESTS,
    "progress": topology.PROGRESS,
    "logs": topology.LOGS,
}
#: Subject of a request -> its type.
BY_SUBJECT = {kind.subject_filter(): kind for kind in REQUESTS}
#: What requests lead to: the field of its id, how the id is made, and the requests.
RESULTS: tuple[tuple[str, Callable[[str, str], str], tuple[type[Any], ...]], ...] = (
    ("run_id", run_id_for, (TrainRequested, RestoreRequested)),
    ("study_id", study_id_for, (TuneRequested,)),
    ("ingestion_id", ingestion_id_for, (IngestRequested,)),
)
#: A NATS subject, with wildcards.
SUBJECT_PATTERN = r"^(?:[A-Za-z0-9_*-]{1,128}\.)*(?:[A-Za-z0-9_*-]{1,128}|>)$"
MAX_SUBJECTS = 64
#: Seconds for which the bus is waited for.
READ_TIMEOUT_S = 20.0

Subjects = Annotated[
    list[Annotated[str, Query(pattern=SUBJECT_PATTERN)]],
    Query(
        alias="subject", max_length=MAX_SUBJECTS, description="only these, as on the bus: `run.*.completed`, `run.>`"
    ),
]


def event_routes(service: Service, commands: Commands, read_body: Callable[[Request], Awaitable[bytes]]) -> APIRouter:
    """Return the routes of ``/events`` and ``/requests``."""
    router, bus = APIRouter(), service.bus

    @router.get("/events", response_model=views.CloudEvents)
    async def get_all_events(
        subject: Subjects = [],  # noqa: B006 - FastAPI copies it
        stream: Annotated[Literal["facts", "requests", "progress", "logs"], Query()] = "facts",
        follow: Follow = True,
        last_event_id: LastEventId = 0,
        tail: Annotated[int | None, Query(ge=0, le=MAX_RANGE, description="begin with the last so many events")] = None,
        limit: RangeLimit = 1000,
    ) -> Any:
        """Events of the bus in their order as CloudEvents: server-sent events `event`, or a range as JSON.

        `facts` hold what has happened, `requests` what was asked for, `progress` and `logs` what runs report.
        """
        source, filters = STREAMS[stream], tuple(subject)
        async with _bus_in_time():
            _check_filters(source, filters)
            if tail is not None and last_event_id == 0:
                last_event_id = await _position_before(bus, source, filters, tail)
            if not follow:
                events, position = await read_range(bus, source.name, filters, last_event_id, limit, _encode)
                return views.CloudEvents(events=events, **position)
        followed = EventStream(bus, source.name, filters, last_event_id, None, _encode, "events")
        return StreamingResponse(followed.body(service.stopping), media_type="text/event-stream", headers=HEADERS)

    @router.post(
        "/requests/{kind}",
        status_code=202,
        response_model=views.AcceptedEvent,
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
        },
    )
    async def post_request(
        kind: Annotated[str, Path(description="its subject on the bus, as `cancel.requested`; see contracts/schemas")],
        request: Request,
        key: Key = None,
    ) -> views.AcceptedEvent:
        """Publish a request. 202: it is on the bus, and the service that it is for answers by a fact.

        The body is what the bus carries. The routes for runs, nodes and models check first what they can.
        """
        known = BY_SUBJECT.get(kind)
        if known is None:
            raise HTTPException(404, f"there is no request {kind!r}; there is: {', '.join(sorted(BY_SUBJECT))}")
        event, envelope = commands.parse(known, await read_body(request), key or "")
        ack = await commands.store(event, envelope)
        return views.AcceptedEvent(
            request_id=envelope.id,
            refusal=subjects.refused(request_id_for(envelope.source, envelope.type, envelope.id)),
            **{name: make(envelope.source, envelope.id) for name, make, kinds in RESULTS if known in kinds},
            duplicate=ack.duplicate,
            sequence=ack.sequence,
        )

    return router


@asynccontextmanager
async def _bus_in_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            yield
    except TimeoutError as error:
        raise BusUnavailable("NATS does not answer: ask again") from error


def _check_filters(stream: topology.Stream, filters: tuple[str, ...]) -> None:
    """Refuse filters that the bus would refuse.

    Raises:
        HTTPException: one of them covers events of another, or none of the stream can be on it.
    """
    for number, one in enumerate(filters):
        for other in filters[number + 1 :]:
            if subjects.overlap(one, other):
                raise HTTPException(422, f"subject: {one} and {other} overlap: give only the wider one")
        if not any(subjects.overlap(one, each) for each in stream.subjects):
            raise HTTPException(422, f"subject: {one} is not on this stream, which has {', '.join(stream.subjects)}")


async def _position_before(bus: Bus, stream: topology.Stream, filters: tuple[str, ...], count: int) -> int:
    """Return the sequence after which the newest ``count`` events begin; with none of them, the end of the stream."""
    newest = await read_newest(bus, stream, filters, lambda found: len(found) >= count)
    newest = newest[max(0, len(newest) - count) :]
    return newest[0].sequence - 1 if newest else await bus.get_last_sequence(">", stream.name)


def _encode(item: Message[Any]) -> tuple[str, views.CloudEvent]:
    envelope = item.envelope
    return "event", views.CloudEvent(
        id=envelope.id,
        source=envelope.source,
        type=envelope.type,
        time=envelope.time,
        subject=envelope.subject,
        correlationid=envelope.correlation_id,
        causationid=envelope.causation_id,
        sequence=item.sequence,
        natssubject=item.subject,
        data=item.event.to_plain(),
    )
