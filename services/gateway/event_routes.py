"""The bus over HTTP: every event of its streams as CloudEvents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import StreamingResponse

from contracts import subjects, topology
from services.gateway import views
from services.gateway.commands import BusUnavailable
from services.gateway.parameters import MAX_RANGE, Follow, LastEventId, RangeLimit
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


def event_routes(service: Service) -> APIRouter:
    """Return the route of ``/events``."""
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
