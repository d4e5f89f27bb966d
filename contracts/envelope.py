"""CloudEvents 1.0 <-> NATS messages, pure.

Binary mode: the body is the plain JSON data, the attributes are ``ce-*`` headers. Structured mode
(``application/cloudevents+json``) is accepted on input, and so is a body with no header at all:
``nats pub train.requested '{...}'`` from a shell is enough.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from contracts import subjects
from contracts.base import Event, Fact, Request, check_time
from contracts.earlier_events import model_of, read_data, stored_subject
from contracts.events import BY_NAME
from contracts.problems import FieldProblem, describe_problems, join_problems

SPEC_VERSION = "1.0"
STRUCTURED = "application/cloudevents+json"
MESSAGE_ID_HEADER = "Nats-Msg-Id"
#: What a message without ``ce-source`` is taken to come from.
ANONYMOUS_SOURCE = "nats"
#: The largest body that is read; more belongs in the object store, with a link in the event.
MAX_BODY_BYTES = 1024 * 1024


class EnvelopeError(ValueError):
    """The message is no event that we know; the text says what to change."""


class InvalidData(EnvelopeError):
    """The envelope is sound but the data does not fit its type. ``problems``: what is wrong, by field."""

    def __init__(self, envelope: Envelope, problems: list[FieldProblem]) -> None:
        self.envelope = envelope
        self.problems = problems
        super().__init__(join_problems(problems))


@dataclass(frozen=True, slots=True)
class Envelope:
    """The CloudEvents attributes of one event."""

    id: str
    source: str
    type: str
    time: datetime
    subject: str = ""
    #: The request that everything goes back to.
    correlation_id: str = ""
    #: The event that led to this one.
    causation_id: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class RawMessage:
    """A message as the bus delivers it. ``sequence`` is 0 for one that is in no stream."""

    subject: str
    body: bytes
    headers: Mapping[str, str]
    stream: str = ""
    sequence: int = 0
    stored_at: datetime | None = None


def encode(event: Event, envelope: Envelope) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body that carry ``event`` in binary mode."""
    headers = {
        "ce-specversion": SPEC_VERSION,
        "ce-id": envelope.id,
        "ce-source": envelope.source,
        "ce-type": envelope.type,
        "ce-time": envelope.time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "ce-subject": envelope.subject,
        "ce-correlationid": envelope.correlation_id,
        "ce-causationid": envelope.causation_id,
        "content-type": "application/json",
        "traceparent": envelope.traceparent,
        MESSAGE_ID_HEADER: message_id(event, envelope),
    }
    # Defaults are left out: bodies stay small, and a reader fills them in from the schema.
    body = event.model_dump_json(exclude_defaults=True).encode()
    return {name: value for name, value in headers.items() if value}, body


def message_id(event: Event, envelope: Envelope) -> str:
    """Return what the server tells a repetition by.

    A fact's id names what it is about. Requests come from many systems, each of which counts its own ids, perhaps for
    each kind of request anew: two are the same only if source and type are.
    """
    if isinstance(event, Request):
        return f"{envelope.source}|{envelope.type}|{envelope.id}"
    return envelope.id


def decode(raw: RawMessage) -> tuple[Envelope, Event]:
    """Return the envelope and the typed event of a message.

    One of an earlier version is read as the present event, whose type its envelope then has, too.

    Raises:
        EnvelopeError: the body is too large or no JSON object, the type is unknown, or the event belongs to another
            subject.
        InvalidData: the data does not fit its type.
    """
    envelope, data = open_envelope(raw)
    event = parse(envelope, data)
    check_subject(envelope, event, raw.subject)
    return read_envelope(envelope, event), event


def read_envelope(envelope: Envelope, event: Event) -> Envelope:
    """Return the envelope with the type of the event that its data was read as."""
    return envelope if envelope.type == event.type else replace(envelope, type=event.type)


def check_subject(envelope: Envelope, event: Event, subject: str) -> None:
    """Refuse an event that is not on its own subject: who may write to one run's subject may not write about another.

    Raises:
        EnvelopeError: the event's type or aggregate belongs to another subject.
    """
    own = stored_subject(event, envelope.type)
    if own != subjects.unwrap(subject):
        raise EnvelopeError(f"{envelope.type} about {own} is on another subject, {subject}")


def open_envelope(raw: RawMessage) -> tuple[Envelope, Any]:
    """Return the envelope and the untyped data. Missing attributes are filled in."""
    if len(raw.body) > MAX_BODY_BYTES:
        raise EnvelopeError(
            f"the body has {len(raw.body):,} bytes, more than the {MAX_BODY_BYTES:,} allowed: "
            "put large content into the object store and send its uri"
        )
    # NATS keeps the case of header names, so senders' spellings differ.
    headers = {name.lower(): value for name, value in raw.headers.items()}
    attributes: dict[str, Any] = {n[3:]: v for n, v in headers.items() if n.startswith("ce-")}
    data = read_json(raw.body)
    if headers.get("content-type", "").split(";")[0].strip().lower() == STRUCTURED:
        if not isinstance(data, dict) or "data" not in data:
            raise EnvelopeError("a structured CloudEvent is a JSON object with a 'data' member")
        attributes = {name.lower(): value for name, value in data.items() if name != "data"}
        data = data["data"]
    return _envelope(raw, headers, attributes), data


def identify(raw: RawMessage) -> Envelope:
    """Return what can be told of a request that cannot be read, so that its sender can be answered all the same.

    What a header does not say follows from the subject and the place in the stream.
    """
    try:
        return open_envelope(raw)[0]
    except EnvelopeError:
        pass
    headers = {name.lower(): value for name, value in raw.headers.items()}
    event_id = headers.get("ce-id") or _fallback_id(raw, headers)
    return Envelope(
        id=event_id,
        source=headers.get("ce-source") or ANONYMOUS_SOURCE,
        type=type_for_subject(raw.subject),
        time=raw.stored_at or datetime.now(UTC),
        correlation_id=event_id,
    )


def parse(envelope: Envelope, data: Any) -> Event:
    """Return ``data`` as the event that the envelope's type names, or as the one that has taken its place."""
    model = model_of(envelope.type)
    if model is None:
        raise EnvelopeError(f"unknown event type {envelope.type!r}")
    if not isinstance(data, dict):
        message = f"the body must be a JSON object, not {type(data).__name__}"
        raise InvalidData(envelope, [FieldProblem(field="", message=message)])
    try:
        return read_data(envelope.type, data)
    except ValidationError as error:
        raise InvalidData(envelope, describe_problems(error, data, model)) from error


def type_for_subject(subject: str) -> str:
    """The type of a message that names none: ``run.r1.placed`` is ``trainbus.run.placed.v1``."""
    parts = subject.split(".")
    if parts[0] in ("progress", "log"):
        return f"trainbus.run.{parts[0]}.v1"
    name = f"trainbus.{parts[0]}.{parts[-1]}"
    return BY_NAME[name].type if name in BY_NAME else f"{name}.v1"


def same_trace(one: str, other: str) -> bool:
    """Whether two W3C ``traceparent`` headers name one trace."""
    return bool(one) and one.split("-")[1:2] == other.split("-")[1:2]


def fact_envelope(
    fact: Fact, source: str, time: datetime, cause: Envelope | None = None, traceparent: str = ""
) -> Envelope:
    """The envelope of a fact: its deterministic id, and the chain back to the request."""
    return Envelope(
        id=fact.event_id,
        source=source,
        type=fact.type,
        time=time,
        subject=fact.aggregate_id,
        correlation_id=(cause.correlation_id or cause.id) if cause else "",
        causation_id=cause.id if cause else "",
        traceparent=traceparent,
    )


def _envelope(raw: RawMessage, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> Envelope:
    def text(name: str, default: str = "") -> str:
        value = attributes.get(name, default)
        if not isinstance(value, str):
            raise EnvelopeError(f"CloudEvents attribute {name!r} must be a string")
        return value

    version = text("specversion", SPEC_VERSION)
    if version != SPEC_VERSION:
        raise EnvelopeError(f"CloudEvents specversion {version!r} is not {SPEC_VERSION!r}")
    event_id = text("id") or _fallback_id(raw, headers)
    if not event_id:
        raise EnvelopeError("the event has no id: set ce-id or Nats-Msg-Id")
    time = text("time")
    try:
        when = check_time(datetime.fromisoformat(time)) if time else (raw.stored_at or datetime.now(UTC))
    except ValueError as error:
        raise EnvelopeError(f"ce-time {time!r} is no RFC 3339 time at which an event can be: {error}") from error
    return Envelope(
        id=event_id,
        source=text("source") or ANONYMOUS_SOURCE,
        type=text("type") or type_for_subject(raw.subject),
        time=when if when.tzinfo else when.replace(tzinfo=UTC),
        subject=text("subject"),
        correlation_id=text("correlationid") or event_id,
        causation_id=text("causationid"),
        traceparent=headers.get("traceparent", "") or text("traceparent"),
    )


def _fallback_id(raw: RawMessage, headers: Mapping[str, str]) -> str:
    """Return the id of a message that names none: that of its transport, else where it is stored."""
    return headers.get(MESSAGE_ID_HEADER.lower()) or (f"{raw.stream}:{raw.sequence}" if raw.sequence else "")


def read_json(body: bytes) -> Any:
    """What a body holds.

    Raises:
        EnvelopeError: it is not JSON in UTF-8, or its text could not be written again.
    """
    try:
        data = json.loads(body.decode("utf-8-sig"))
        if b"\\u" in body:
            # "\ud800" is half a character: a service that passes it on fails.
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise EnvelopeError(f"the body is not JSON in UTF-8: {error}") from error
    return data
