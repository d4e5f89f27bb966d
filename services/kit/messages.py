"""What goes over the bus: an event as it leaves and as it arrives, and what a handler or publisher may say of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from contracts.base import Event
from contracts.envelope import MAX_BODY_BYTES, Envelope, EnvelopeError, RawMessage, decode, encode

# A client reads the object store with modules that import this one, and has no nats-py.
if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js.api import RawStreamMsg

E = TypeVar("E", bound=Event)

#: JetStream refuses a message with more; a sender's long id comes back as headers of each fact that it leads to.
MAX_HEADER_BYTES = 64 * 1024
#: What the server answers when an expectation does not hold.
WRONG_LAST_SEQUENCE = (10071, 10164)
EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"


class PoisonMessage(Exception):
    """This message can never be handled: it goes to DEAD_LETTERS with this text and is not retried."""


class TransientError(Exception):
    """This message cannot be handled now: the server delivers it again, each time after a longer delay."""


class ConnectionLost(Exception):
    """The connection to NATS was closed for good: the process ends, and its supervisor starts it again."""


class Conflict(Exception):
    """Another publisher was first: the expected last sequence is not the last one."""


@dataclass(frozen=True, slots=True)
class ExpectedSequence:
    """A condition on publishing: ``sequence`` is the last one stored on ``subject`` (0: none yet).

    ``subject`` may hold wildcards, and may be another than the one published to: a checkpoint is
    committed only if its generation is still the last one placed. Empty: the event's own subject.
    """

    sequence: int
    subject: str = ""


@dataclass(frozen=True, slots=True)
class UndecodableEvent:
    """A stored message that cannot be decoded, in the place of its event."""

    problem: str


@dataclass(frozen=True, slots=True)
class Message(Generic[E]):
    """An event as it arrived, with its place in the stream."""

    event: E
    envelope: Envelope
    subject: str
    stream: str = ""
    sequence: int = 0
    #: Messages of the stream behind this one that the reader has not been sent yet.
    pending: int = 0
    deliveries: int = 1
    #: When the server stored it: one clock for every publisher's events.
    stored_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A key of a bucket as it has become: its revision, and its value or None where it was deleted."""

    key: str
    revision: int
    value: bytes | None


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """An event as it will stand on the wire."""

    id: str
    type: str
    subject: str
    headers: dict[str, str]
    body: bytes

    @property
    def size(self) -> int:
        """Return the approximate number of bytes."""
        return len(self.body) + 64 * len(self.headers)

    @property
    def wire_bytes(self) -> int:
        """Bytes that count against the server's ``max_payload``, which nats-py compares with the body alone."""
        return len(self.body) + sum(len(f"{name}: {value}\r\n".encode()) for name, value in self.headers.items()) + 12

    def find_size_problem(self, max_payload: int) -> str:
        """Return why no server would store the message, or no reader read it; '' if it is small enough."""
        body, headers = len(self.body), self.wire_bytes - len(self.body)
        size = f"{self.type} on {self.subject} has {body:,} bytes and {headers:,} of headers"
        if body > MAX_BODY_BYTES:
            return (
                f"{size}, more than the {MAX_BODY_BYTES:,} that readers decode: put large content into the object "
                "store and name it in the event"
            )
        if self.wire_bytes > max_payload or headers > MAX_HEADER_BYTES:
            return (
                f"{size}, more than the server takes: raise max_payload in its configuration, or publish less at once"
            )
        return ""

    def with_expected(self, expected: ExpectedSequence) -> OutgoingMessage:
        """Return a copy that is stored only if ``expected`` holds."""
        return replace(self, headers={**self.headers, **_expected_headers(expected)})


@dataclass(frozen=True, slots=True)
class PublishAck:
    """The server stored the event at this sequence; ``duplicate`` if it had stored it before."""

    sequence: int
    duplicate: bool


def encode_message(
    event: Event, subject: str, envelope: Envelope, expected: ExpectedSequence | None
) -> OutgoingMessage:
    """Return the message that an event is published as."""
    headers, body = encode(event, envelope)
    if expected is not None:
        headers |= _expected_headers(expected)
    return OutgoingMessage(envelope.id, envelope.type, subject, headers, body)


def _expected_headers(expected: ExpectedSequence) -> dict[str, str]:
    found = {EXPECTED_LAST: str(expected.sequence)}
    return {**found, EXPECTED_LAST_SUBJECT: expected.subject} if expected.subject else found


def raw_of(msg: Msg) -> RawMessage:
    """Return a message undecoded, with its place in its stream if it has one."""
    headers = msg.headers or {}
    if not msg.reply:
        return RawMessage(msg.subject, msg.data, headers)
    metadata = msg.metadata
    return RawMessage(msg.subject, msg.data, headers, metadata.stream, metadata.sequence.stream, metadata.timestamp)


def bucket_entry_of(msg: Msg, prefix: str) -> BucketEntry:
    """Return the entry of a message of a bucket's stream; ``prefix`` is what its subjects begin with."""
    deleted = (msg.headers or {}).get("KV-Operation") in ("DEL", "PURGE")
    return BucketEntry(msg.subject.removeprefix(prefix), msg.metadata.sequence.stream, None if deleted else msg.data)


def raw_of_stored(message: RawStreamMsg, stream: str) -> RawMessage:
    """Return a single requested message, undecoded."""
    return RawMessage(
        message.subject or "", message.data or b"", message.headers or {}, stream, message.seq or 0, message.time
    )


def decode_stored(message: RawStreamMsg, stream: str) -> Message[Any]:
    """Return a single requested message, decoded. Raises ``EnvelopeError`` if it cannot be."""
    raw = raw_of_stored(message, stream)
    envelope, event = decode(raw)
    return Message(event, envelope, raw.subject, stream, raw.sequence, stored_at=raw.stored_at)


def decode_followed(msg: Msg, stream: str) -> Message[Any]:
    """Decode a followed message; its event is an ``UndecodableEvent`` if it cannot be decoded."""
    raw = raw_of(msg)
    event: Event | UndecodableEvent
    try:
        envelope, event = decode(raw)
    except EnvelopeError as error:
        envelope = Envelope(id="", source="", type="", time=msg.metadata.timestamp)
        event = UndecodableEvent(str(error))
    return Message(
        event, envelope, raw.subject, stream, raw.sequence, msg.metadata.num_pending, stored_at=raw.stored_at
    )
