"""The bus over HTTP: every event of its streams as CloudEvents, and any request of the contracts onto it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, HTTPException, Path, Query, Request
from fastapi.responses import StreamingResponse

from contracts import subjects, topology
from contracts.base import ingestion_id_for, request_id_for, run_id_for, study_id_for
from contracts.events import REQUESTS
from contracts.events.train import IngestRequested, RestoreRequested, TrainRequested, TuneRequested
from services.gateway import views
from services.gateway.commands import MAX_KEY, BusUnavailable, Commands
from services.gateway.sse import HEADERS, EventStream
from services.kit.bus import Bus, Message
from services.kit.service import Service

Key = Annotated[
    str | None, Header(alias="Idempotency-Key", max_length=MAX_KEY, description="the same key is the same request")
]
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
#: The longest range of events in one answer.
MAX_RANGE = 10_000
#: Messages among which the newest ones are searched first.
NEAREST = 200
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
        follow: Annotated[bool, Query(description="false: what there is now, as JSON")] = True,
        last_event_id: Annotated[int, Header(alias="Last-Event-ID", ge=0, description="go on after this event")] = 0,
        tail: Annotated[int | None, Query(ge=0, le=MAX_RANGE, description="begin with the last so many events")] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_RANGE, description="without follow: at most so many events")] = 1000,
    ) -> Any:
        """Events of the bus in their order as CloudEvents: server-sent events `event`, or a range as JSON.

        `facts` hold what has happened, `requests` what was asked for, `progress` and `logs` what runs report.
        """
        source, filters = STREAMS[stream], tuple(subject)
        async with _bus_in_time():
            _check_filters(source, filters)
            newest = None
            if tail is not None and last_event_id == 0:
                newest = await read_newest(bus, source, filters, lambda found: len(found) >= tail)
                newest = newest[max(0, len(newest) - tail) :]
                last_event_id = await _position_before(bus, source, newest)
            if not follow:
                return await _read_range(bus, source, filters, last_event_id, limit, newest)
        events = EventStream(bus, source.name, filters, last_event_id, None, _encode, "events")
        return StreamingResponse(events.body(service.stopping), media_type="text/event-stream", headers=HEADERS)

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
        ack = await commands.publish(event, envelope, "")
        return views.AcceptedEvent(
            request_id=envelope.id,
            refusal=subjects.refused(request_id_for(envelope.source, envelope.type, envelope.id)),
            **{name: make(envelope.source, envelope.id) for name, make, kinds in RESULTS if known in kinds},
            duplicate=ack.duplicate,
            sequence=ack.sequence,
        )

    return router


async def read_newest(
    bus: Bus, stream: topology.Stream, filters: tuple[str, ...], enough: Callable[[list[Message[Any]]], bool]
) -> list[Message[Any]]:
    """Return the newest events on ``filters``, oldest first: as many as are enough, or all there are.

    A long stream is read from its end, in ever longer parts.
    """
    last = max([await bus.get_last_sequence(each, stream.name) for each in filters or (">",)])
    reach = 0 if len(filters) == 1 else NEAREST
    while True:
        start = max(1, last - reach)
        found = await bus.read_history(*filters, stream=stream.name, start_sequence=start) if last else []
        if start <= 1 or enough(found):
            return found
        reach = reach * 10 or NEAREST


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


async def _position_before(bus: Bus, stream: topology.Stream, newest: list[Message[Any]]) -> int:
    """Return the sequence after which ``newest`` begin; with none of them, the end of the stream."""
    return newest[0].sequence - 1 if newest else await bus.get_last_sequence(">", stream.name)


async def _read_range(
    bus: Bus,
    stream: topology.Stream,
    filters: tuple[str, ...],
    after: int,
    limit: int,
    found: list[Message[Any]] | None,
) -> views.CloudEvents:
    """Return at most ``limit`` events after a sequence, out of ``found`` if it holds them already."""
    if found is None:
        found = []
        async with aclosing(bus.follow(stream.name, filters, after + 1, until_caught_up=True)) as batches:
            async for batch in batches:
                found += batch
                if len(found) > limit:
                    break
    part = views.StoredRange.of([(item.sequence, _encode(item)[1]) for item in found], limit, after)
    return views.CloudEvents(events=part.items, **part.position)


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
