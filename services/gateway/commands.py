"""What clients want, onto the bus as requests."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any, TypeVar

import nats.errors

from contracts import subjects, topology
from contracts.base import Request, request_id_for
from contracts.envelope import Envelope, EnvelopeError, InvalidData, parse, read_json
from contracts.events.train import TrainRequested
from contracts.problems import FieldProblem
from contracts.run_states import TERMINAL_STATES
from contracts.scheduling import Policy
from contracts.texts import explain_request
from services.gateway.core.fold import request_hash
from services.gateway.queries import Row
from services.gateway.views import AcceptedEvent
from services.kit import telemetry
from services.kit.bus import Bus, PublishAck, TransientError

#: How long a client waits for the bus before it must retry.
PUBLISH_TIMEOUT_S = 10.0
WHY_TIMEOUT_S = 2.0
DIFF_TIMEOUT_S = 40.0


R = TypeVar("R", bound=Request)
A = TypeVar("A", bound=AcceptedEvent)


class BusUnavailable(Exception):
    """The bus does not answer; the same request may be sent again under the same key."""


class KeyReused(Exception):
    """The idempotency key was used for another request."""

    def __init__(self, key: str) -> None:
        super().__init__(f"Idempotency-Key {key!r} was used for another request: use a new one")


class Commands:
    """Publishes requests, and asks the scheduler."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def parse(self, kind: type[R], body: bytes, key: str, **fields: str) -> tuple[R, Envelope]:
        """The request in ``body``; ``fields`` are those that the address holds.

        Raises:
            InvalidData: with the problem of each field, as the contract states it.
        """
        envelope = self.envelope(kind, key)
        try:
            data = read_json(body)
        except EnvelopeError as error:
            raise InvalidData(envelope, [FieldProblem(field="", message=str(error))]) from error
        if fields and isinstance(data, dict):
            data = {**data, **fields}
        request = parse(envelope, data)
        if not isinstance(request, kind):
            wrong = FieldProblem(field="", message=f"the body must be a {kind.verb} request")
            raise InvalidData(envelope, [wrong])
        return request, envelope

    def envelope(self, request: type[Request], key: str) -> Envelope:
        """The envelope that carries ``key`` as the event's id: the same key is the same request."""
        event_id = key or uuid.uuid4().hex
        return Envelope(
            id=event_id,
            source=self._bus.source,
            type=request.type,
            time=self._bus.clock.now(),
            correlation_id=event_id,
            traceparent=telemetry.current_traceparent(),
        )

    async def publish(self, answer: type[A], request: Request, envelope: Envelope, **fields: Any) -> A:
        """Publish, wait until it is stored, and return the answer; ``fields`` are those besides what the bus returns.

        Raises as ``store`` does.
        """
        ack = await self.store(request, envelope)
        refusal = subjects.refused(request_id_for(envelope.source, envelope.type, envelope.id))
        return answer(request_id=envelope.id, refusal=refusal, duplicate=ack.duplicate, sequence=ack.sequence, **fields)

    async def store(self, request: Request, envelope: Envelope) -> PublishAck:
        """Publish and wait until it is stored.

        Raises:
            KeyReused: another request has this event's id.
            BusUnavailable: NATS does not answer.
        """
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                ack = await self._bus.publish_event(request, request.subject, envelope)
                if ack.duplicate and not await self._is_stored(request, ack.sequence):
                    raise KeyReused(envelope.id)
                return ack
        except (TimeoutError, TransientError) as error:
            raise BusUnavailable(
                "NATS does not answer: send the request again, with the same Idempotency-Key"
            ) from error

    async def _is_stored(self, request: Request, sequence: int) -> bool:
        """Whether the message that the server took a request for a repetition of holds this very request."""
        stored = await self._bus.get_message(sequence, topology.REQUESTS.name)
        return stored is None or stored.event == request

    async def diff_policy(self, policy: Policy) -> dict[str, Any] | None:
        """Return what a policy would change, as the scheduler simulates it; None if it does not answer."""
        subject, body = subjects.service("scheduler", "policy_diff"), policy.model_dump_json().encode()
        try:
            reply = await self._bus.nc.request(subject, body, timeout=DIFF_TIMEOUT_S)
            return dict(json.loads(reply.data))
        except (nats.errors.Error, TimeoutError, ValueError):
            return None

    async def ask_scheduler(self, row: Row) -> dict[str, Any] | None:
        """Why a run is where it is, in the scheduler's words; None if it does not answer."""
        question = json.dumps({"run_id": row["run_id"]}).encode()
        try:
            reply = await self._bus.nc.request(subjects.service("scheduler", "why"), question, timeout=WHY_TIMEOUT_S)
            answer = json.loads(reply.data)
        except (nats.errors.Error, TimeoutError, ValueError):
            return None
        if not isinstance(answer, dict):
            answer = {"message": str(answer)}
        if row["state"] == "requested" and answer.get("state") == "unknown":
            answer["message"] = explain_request(scheduler_answers=True)
        message = str(answer.get("message") or answer.get("reason") or f"the run is {row['state']}")
        return {
            "run_id": row["run_id"],
            "state": row["state"],
            "message": message,
            "answered_by": "scheduler",
            "answer": answer,
        }


def recorded_why(row: Row) -> dict[str, Any]:
    """Return why a run is where it is by its facts."""
    message = row["waiting_message"] or row["reason"] or f"the run is {row['state']}"
    if row["state"] == "requested":
        message = explain_request(scheduler_answers=False)
    elif row["state"] not in TERMINAL_STATES:
        message += " (recorded earlier: the scheduler does not answer)"
    return {"run_id": row["run_id"], "state": row["state"], "message": message, "answered_by": "read model"}


def same_request(row: Row, request: TrainRequested) -> bool:
    """Whether a run that exists was asked for by this very request."""
    return row["request_hash"] is None or row["request_hash"] == request_hash(request)
