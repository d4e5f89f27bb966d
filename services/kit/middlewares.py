"""FastStream middlewares of every handler: metrics, acknowledgement and tracing, in this order from outside.

FastStream's default acknowledgement terminates a message on any exception (the event is lost), and its nack
redelivers at once. Here ``PoisonMessage`` goes to DEAD_LETTERS and is terminated; ``TransientError`` and anything
unexpected is redelivered with a growing delay, and goes to DEAD_LETTERS after the consumer's ``max_deliver``. A request
that cannot be done is its sender's mistake: it is answered, and is no dead letter.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any, cast

import nats.errors
import structlog
from faststream import BaseMiddleware
from faststream.exceptions import SubscriberNotFound
from faststream.message import StreamMessage
from faststream.nats import NatsMessage
from nats.aio.msg import Msg
from opentelemetry.trace import SpanKind
from prometheus_client import Counter, Histogram

from contracts import topology
from contracts.base import Event
from contracts.envelope import Envelope, EnvelopeError, InvalidData, RawMessage, decode, identify
from contracts.problems import FieldProblem
from services.kit import metrics, telemetry
from services.kit.clock import Clock
from services.kit.dead_letters import DeadLetter, DeadLetterLimit
from services.kit.messages import Message, PoisonMessage, TransientError, raw_of

log = structlog.get_logger(__name__)

#: Answers a request that does not fit its schema; returns whether it did.
InvalidHandler = Callable[[RawMessage, InvalidData], Awaitable[bool]]
#: Publishes that a request is refused.
RefuseRequest = Callable[[InvalidData], Awaitable[None]]
#: Stores a message of a consumer in DEAD_LETTERS, with the reason.
StoreDeadLetter = Callable[[topology.Consumer, RawMessage, str], Awaitable[None]]

#: Seconds before the n-th redelivery; the last one repeats.
RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
OUTCOMES = ("ok", "retried", "dead", "failed", "refused", "invalid")
#: Name of the message's ``Delivery`` in FastStream's context.
DELIVERY = "delivery"


class AckDeadlines:
    """Messages that this instance holds: it extends their deadlines until each is acknowledged."""

    def __init__(self) -> None:
        self._held: dict[int, Msg] = {}
        self._due: set[int] = set()

    def add(self, msg: Msg) -> None:
        self._held[id(msg)] = msg

    def remove(self, msg: Msg) -> None:
        self._held.pop(id(msg), None)

    def __len__(self) -> int:
        return len(self._held)

    async def extend(self) -> None:
        """Extend the deadline of every message that was already held at the last call."""
        for key in self._due & self._held.keys():
            if (msg := self._held.get(key)) is not None:
                await _send(msg.in_progress())
        self._due = set(self._held)


@dataclass(slots=True)
class HandlerGroup:
    """The handlers of one consumer, and what their middlewares share."""

    consumer: topology.Consumer
    service: str
    clock: Clock
    dead_letter: StoreDeadLetter
    limit: DeadLetterLimit
    #: Fault injection: every message is handled a second time.
    duplicate: bool = False
    handlers: dict[str, Callable[[Message[Any]], Awaitable[None]]] = field(default_factory=dict)
    on_invalid: InvalidHandler | None = None
    #: Tells the sender of a request that it is not done.
    refuse: RefuseRequest | None = None
    deadlines: AckDeadlines = field(default_factory=AckDeadlines)


@dataclass(slots=True)
class Delivery:
    """The outcome of one message."""

    type: str = "undecoded"
    outcome: str = "ok"
    started_s: float = field(default_factory=time.monotonic)


class EventMessage(NatsMessage):
    """A message whose body is decoded as one of our events."""

    raw: RawMessage
    deliveries: int
    pending: int


async def parse_message(msg: Msg) -> EventMessage:
    """FastStream's parser: a message with its place in the stream, not decoded yet."""
    headers = msg.headers or {}
    # A correlation id of its own would cost FastStream a random number for each message.
    message = EventMessage(msg, msg.data, headers=headers, correlation_id=headers.get("ce-correlationid") or "none")
    message.raw = raw_of(msg)
    message.deliveries, message.pending = _counts(msg)
    return message


async def decode_event(message: StreamMessage[Any]) -> Message[Any]:
    """FastStream's decoder: the typed event that handlers get.

    Raises:
        EnvelopeError: the message is no event of ours.
    """
    assert isinstance(message, EventMessage)
    raw = message.raw
    envelope, event = decode(raw)
    return Message(
        event, envelope, raw.subject, raw.stream, raw.sequence, message.pending, message.deliveries, raw.stored_at
    )


class GroupMiddleware(BaseMiddleware):
    """A middleware that knows whose message it handles."""

    __slots__ = ("group",)

    msg: Msg

    def __init__(self, group: HandlerGroup, msg: Any, /, *, context: Any) -> None:
        super().__init__(msg, context=context)
        self.group = group

    @property
    def delivery(self) -> Delivery:
        found: Delivery = self.context.get_local(DELIVERY)
        return found


class MetricsMiddleware(GroupMiddleware):
    """Counts and times every message, handled or not."""

    __slots__ = ("_delivery",)

    async def on_receive(self) -> None:
        self._delivery = Delivery()
        self.context.set_local(DELIVERY, self._delivery)

    async def consume_scope(self, call_next: Any, msg: StreamMessage[Any]) -> Any:
        event: Message[Any] = await msg.decode()  # type: ignore[assignment]
        self._delivery.type = event.envelope.type
        if event.stored_at is not None:
            lag_s = (self.group.clock.now() - event.stored_at).total_seconds()
            _lag_of(self.group.consumer.name).observe(max(lag_s, 0))
        return await call_next(msg)

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool:
        if exc_val is not None and not isinstance(exc_val, Exception):
            return False  # shutting down: the message stays unacknowledged, another instance gets it
        delivery, consumer = self._delivery, self.group.consumer.name
        if exc_val is not None:
            # Neither acknowledged nor stored as a dead letter: the server delivers it again after ack_wait.
            delivery.outcome = "failed"
            log.error("message neither handled nor stored", consumer=consumer, error=repr(exc_val))
        count, seconds = _series(consumer, delivery.type, delivery.outcome)
        count.inc()
        seconds.observe(time.monotonic() - delivery.started_s)
        return exc_val is not None


class AcknowledgementMiddleware(GroupMiddleware):
    """Acknowledges what was handled; retries or dead-letters what was not. Nothing is dropped."""

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool:
        if exc_val is None:
            self.group.limit.record_handled()
            once_more = self.group.duplicate and _counts(self.msg)[0] == 1
            await _send(self.msg.nak() if once_more else self.msg.ack())
            return True
        if not isinstance(exc_val, Exception):
            return False
        delivery = self.delivery
        if isinstance(exc_val, SubscriberNotFound):
            # A newer version of the service may: during an upgrade the message waits for it.
            reason = f"service {self.group.service} does not handle {self.msg.subject!r}"
            delivery.outcome = await self._dead_letter(reason, counts=True)
        elif isinstance(exc_val, EnvelopeError | PoisonMessage):
            if self.group.refuse is not None and self.group.consumer.stream == topology.REQUESTS.name:
                # Its sender's mistake: no sign of a fault, and nothing for an operator to mend.
                delivery.outcome = await self._refuse(self.group.refuse, exc_val)
            else:
                # No sign of a bad deploy: anybody may publish what makes no sense, in a service's name, too.
                delivery.outcome = await self._dead_letter(str(exc_val), counts=False)
        else:
            delivery.outcome = await self._retry_or_dead_letter(exc_val)
        return True

    async def _refuse(self, refuse: RefuseRequest, error: EnvelopeError | PoisonMessage) -> str:
        """Answer the sender of a request that cannot be done, and take it off the consumer."""
        raw = raw_of(self.msg)
        whole = FieldProblem(field="", message=str(error))
        invalid = error if isinstance(error, InvalidData) else InvalidData(identify(raw), [whole])
        try:
            is_answered = False
            if isinstance(error, EnvelopeError) and self.group.on_invalid is not None:
                is_answered = await self.group.on_invalid(raw, invalid)
            if not is_answered:
                await refuse(invalid)
        except Exception as failure:
            return await self._retry_or_dead_letter(failure)
        log.info("request refused", subject=raw.subject, sequence=raw.sequence, reason=str(error))
        if isinstance(self.msg, RetriedMessage):
            self.msg.reason = str(error)
        await _send(self.msg.term())
        return "invalid"

    async def _retry_or_dead_letter(self, error: Exception) -> str:
        consumer, deliveries = self.group.consumer, _counts(self.msg)[0]
        if 0 < consumer.max_deliver <= deliveries:
            return await self._dead_letter(f"given up after {deliveries} deliveries: {error!r}", counts=True)
        delay_s = RETRY_DELAYS_S[min(deliveries, len(RETRY_DELAYS_S)) - 1]
        if isinstance(self.msg, RetriedMessage):
            self.msg.reason = repr(error)
        details = {"subject": self.msg.subject, "delay_s": delay_s, "error": repr(error)}
        if isinstance(error, TransientError):
            log.info("handler failed, message is retried", **details)
        else:
            log.error("handler failed, message is retried", **details, exc_info=error)
        await _send(self.msg.nak(delay=delay_s))
        return "retried"

    async def _dead_letter(self, reason: str, *, counts: bool) -> str:
        """Store the message in DEAD_LETTERS, then take it off the consumer. In this order."""
        consumer, raw = self.group.consumer, raw_of(self.msg)
        if counts and not isinstance(self.msg, RetriedMessage) and not self.group.limit.allows_dead_letter():
            log.error("dead-letter limit reached, consumer stops", consumer=consumer.name, reason=reason)
            await _send(self.msg.nak())
            return "refused"
        log.error("dead letter", subject=raw.subject, sequence=raw.sequence, consumer=consumer.name, reason=reason)
        if isinstance(self.msg, RetriedMessage):
            self.msg.reason = reason
        else:
            await self.group.dead_letter(consumer, raw, reason)
        await _send(self.msg.term())
        return "dead"


class TracingMiddleware(GroupMiddleware):
    """Runs the handler in a span of the event's trace, with the event's ids on every log line."""

    async def consume_scope(self, call_next: Any, msg: StreamMessage[Any]) -> Any:
        event: Message[Any] = await msg.decode()  # type: ignore[assignment]
        envelope, consumer = event.envelope, self.group.consumer.name
        with (
            telemetry.start_span(f"handle {envelope.type}", SpanKind.CONSUMER, envelope.traceparent, consumer=consumer),
            telemetry.bind_log_context(_ids(event.event, envelope)),
        ):
            return await call_next(msg)


#: Outermost first.
MIDDLEWARES = (MetricsMiddleware, AcknowledgementMiddleware, TracingMiddleware)


class RetriedMessage(Msg):
    """A dead letter that an operator retries: delivered by us, so nothing is acknowledged to the server.

    It is neither retried nor stored again by itself: it still is a dead letter, and the operator gets the reason.
    """

    outcome = ""
    reason = ""

    async def ack(self) -> None:
        self.outcome = "ok"

    async def nak(self, delay: float | None = None) -> None:
        self.outcome = self.outcome or "retried"

    async def term(self) -> None:
        self.outcome = self.outcome or "dead"

    async def in_progress(self) -> None: ...

    @classmethod
    def of(cls, letter: DeadLetter) -> RetriedMessage:
        """Return the message that a dead letter was, at its place in its stream."""
        raw, stored_ns = letter.message, int((letter.at.timestamp() if letter.at else 0) * 1e9)
        reply = f"$JS.ACK.{raw.stream}.{letter.consumer}.1.{raw.sequence}.0.{stored_ns}.0"
        return cls(cast(Any, None), raw.subject, reply, raw.body, dict(raw.headers))


@cache
def _series(consumer: str, event_type: str, outcome: str) -> tuple[Counter, Histogram]:
    """Return a message's metrics. Looking them up by their labels costs as much as a small handler."""
    return metrics.HANDLED.labels(consumer, event_type, outcome), metrics.HANDLING_SECONDS.labels(consumer, event_type)


_lag_of = cache(metrics.DELIVERY_LAG_SECONDS.labels)


def _counts(msg: Msg) -> tuple[int, int]:
    """Return how often the message was delivered, and how many of the consumer follow it."""
    if not msg.reply:
        return 1, 0
    metadata = msg.metadata
    return metadata.num_delivered, metadata.num_pending


async def _send(acknowledgement: Awaitable[Any]) -> None:
    """Send an acknowledgement. If it gets lost the message comes again, which handlers can bear."""
    try:
        await acknowledgement
    except (TimeoutError, nats.errors.Error) as error:
        log.warning("acknowledgement lost, expect a redelivery", error=repr(error))


def _ids(event: Event, envelope: Envelope) -> dict[str, str]:
    ids = {"event_id": envelope.id, "correlation_id": envelope.correlation_id}
    if run_id := getattr(event, "run_id", None):
        ids["run_id"] = run_id
    return ids
