"""Answers to requests; and those that have none yet: runs that are published and neither accepted nor rejected."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from contracts import subjects, topology
from contracts.base import Request, request_id_for, run_id_for
from contracts.events.train import RestoreRequested, TrainRequested
from contracts.texts import explain_request
from trainbus.client.connection import SOURCE, Connection, StoredEvent
from trainbus.client.errors import TrainbusError
from trainbus.client.nats_import import aiohttp_hidden
from trainbus.client.views import RunView, apply_spec

with aiohttp_hidden():
    import nats.errors
    from nats.js.errors import APIError

#: Seconds for which the scheduler's answer is awaited.
ANSWER_TIMEOUT_S = 1.0
#: Seconds for which the fact is awaited that a request leads to.
REQUEST_TIMEOUT_S = 20.0
SUBJECTS = (subjects.request("train"), subjects.request("restore"))


async def read_requested_runs(connection: Connection) -> dict[str, RunView]:
    """Return the runs whose requests the scheduler has not acknowledged, in the order of the requests.

    One of them may be answered meanwhile: read the facts after this.
    """
    consumer = topology.SCHEDULER_REQUESTS
    start = 1
    try:
        info = await connection.js.consumer_info(consumer.stream, consumer.name)
    except (APIError, nats.errors.Error):
        pass  # no scheduler has ever been there, or this user may not see its consumer
    else:
        if not info.num_pending and not info.num_ack_pending:
            return {}
        start = info.ack_floor.stream_seq + 1 if info.ack_floor else 1
    found = await connection.read(*SUBJECTS, stream=topology.REQUESTS, start_sequence=start)
    return {view.run_id: view for view in map(_view_of, found)}


async def publish_and_wait(connection: Connection, request: Request, answers: str, service: str) -> Any:
    """Publish a request and return the fact that it led to; ``answers`` is the subject of such facts.

    Raises:
        TrainbusError: the service refused it, or does not answer.
    """
    start = await connection.last_sequence(topology.FACTS) + 1
    event_id = await connection.publish_request(request)
    waiting = [
        asyncio.ensure_future(_find_fact(connection, start, answers, event_id)),
        asyncio.ensure_future(find_refusal(connection, start, request, event_id)),
    ]
    try:
        done, _ = await asyncio.wait(waiting, timeout=REQUEST_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each
    if not done:
        raise TrainbusError(
            f"requested, but the {service} has not answered yet: it does so once it runs (`trainbus doctor`)"
        )
    answer = done.pop().result()
    if isinstance(answer, str):
        raise TrainbusError(answer)
    return answer


async def _find_fact(connection: Connection, start: int, subject: str, event_id: str) -> Any:
    async for batch in connection.follow(topology.FACTS, subject, start_sequence=start):
        for message in batch:
            if message.envelope.causation_id == event_id:
                return message.event
    raise AssertionError("following a stream does not end")


async def find_refusal(connection: Connection, start: int, request: Request, event_id: str) -> str:
    """Wait until a request of this client is refused; return why."""
    subject = subjects.refused(request_id_for(SOURCE, request.type, event_id))
    async for batch in connection.follow(topology.FACTS, subject, start_sequence=start):
        for message in batch:
            return str(message.event.reason)
    raise AssertionError("following a stream does not end")


async def has_scheduler(connection: Connection) -> bool:
    """Return whether a scheduler answers."""
    return await connection.query("scheduler", "why", {"run_id": ""}, ANSWER_TIMEOUT_S) is not None


async def explain_requested(connection: Connection) -> str:
    """Return why a run is not accepted yet."""
    return explain_request(scheduler_answers=await has_scheduler(connection))


def _view_of(stored: StoredEvent) -> RunView:
    event = stored.event
    view = RunView(run_id_for(stored.envelope.source, stored.envelope.id), requested_at=stored.time)
    if isinstance(event, TrainRequested):
        apply_spec(view, event.run_spec)
    elif isinstance(event, RestoreRequested):
        point = f"step {event.step}" if event.step is not None else f"epoch {event.epoch}"
        view.name, view.parent_run_id = f"{event.run_id} from {point}", event.run_id
    return view
