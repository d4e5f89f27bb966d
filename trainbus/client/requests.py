"""Requests that the scheduler has not answered yet: runs that are published and neither accepted nor rejected."""

from __future__ import annotations

from contracts import subjects, topology
from contracts.base import Request, request_id_for, run_id_for
from contracts.events.train import RestoreRequested, TrainRequested
from contracts.texts import explain_request
from trainbus.client.connection import SOURCE, Connection, StoredEvent
from trainbus.client.nats_import import aiohttp_hidden
from trainbus.client.views import RunView, apply_spec

with aiohttp_hidden():
    import nats.errors
    from nats.js.errors import APIError

#: Seconds for which the scheduler's answer is awaited.
ANSWER_TIMEOUT_S = 1.0
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
