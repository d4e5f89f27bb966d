"""The bus, once: publishing that is idempotent, handlers that lose nothing, and ordered following.

FastStream carries the handlers; this module pins down what its defaults get wrong. Its default
acknowledgement policy terminates a message on any exception (the event is lost), its nack policy
redelivers at once. Here: ``Poison`` goes to DEAD_LETTERS and is terminated; ``Transient`` and
anything unexpected is redelivered with a growing delay, and goes to DEAD_LETTERS after the
consumer's ``max_deliver``. Nothing is ever dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Generic, TypeVar, cast

import nats.errors
import structlog
from faststream.middlewares import AckPolicy
from faststream.nats import JStream, NatsBroker, NatsMessage, PullSub
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, BadRequestError, KeyNotFoundError, NotFoundError
from nats.js.kv import KeyValue
from opentelemetry.trace import SpanKind

from contracts import subjects, topology
from contracts.base import Event, Fact
from contracts.envelope import (
    Envelope,
    EnvelopeError,
    InvalidData,
    RawMessage,
    decode,
    encode,
    fact_envelope,
)
from services.kit import metrics, telemetry
from services.kit.clock import Clock, SystemClock
from services.kit.follow import follow
from services.kit.reconcile import reconcile
from services.kit.settings import Settings

log = structlog.get_logger(__name__)

E = TypeVar("E", bound=Event)
Handler = Callable[["Received[Any]"], Awaitable[None]]
InvalidHandler = Callable[["RawMessage", InvalidData], Awaitable[None]]

#: Seconds before the n-th redelivery; the last one repeats.
RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
#: How often a long handler tells the server that it is still at work, as a share of ack_wait.
HEARTBEAT_SHARE = 0.3
#: Seconds a pull request stays open; also the longest a message waits after the server restarted.
PULL_TIMEOUT_S = 1.0
PUBLISH_TIMEOUT_S = 2.0
#: Seconds to keep trying to publish while the server is away. The ids make trying again safe.
PUBLISH_PATIENCE_S = 120.0
#: Kept free in a dead letter for its headers; a body that leaves less room is cut.
DEAD_HEADERS_BYTES = 64 * 1024
WRONG_LAST_SEQUENCE = (10071, 10164)
EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"


class Poison(Exception):
    """This message can never be handled: it goes to DEAD_LETTERS with this text and is not retried."""


class Transient(Exception):
    """This message cannot be handled now: it is delivered again, later and later."""


class Conflict(Exception):
    """Somebody published first: the expected last sequence was not the last."""


@dataclass(frozen=True, slots=True)
class Expect:
    """A condition on publishing: ``sequence`` is the last one stored on ``subject`` (0: none yet).

    ``subject`` may hold wildcards, and may be another than the one published to: a checkpoint is
    committed only if its generation is still the last one placed. Empty: the event's own subject.
    """

    sequence: int
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """In the place of an event: a message that somebody published and nobody can decode."""

    problem: str


@dataclass(frozen=True, slots=True)
class Received(Generic[E]):
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
class Entry:
    """A key of a bucket as it has become: its revision, and its value or None where it was deleted."""

    key: str
    revision: int
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An event as it will stand on the wire."""

    id: str
    type: str
    subject: str
    headers: dict[str, str]
    body: bytes

    @property
    def size(self) -> int:
        """Bytes, about."""
        return len(self.body) + 64 * len(self.headers)

    def expecting(self, expect: Expect) -> Outgoing:
        """The same, to be stored only if ``expect`` holds."""
        return replace(self, headers={**self.headers, **_expected(expect)})


@dataclass(frozen=True, slots=True)
class Ack:
    """The server has it: at this sequence; ``duplicate`` if it had it already."""

    sequence: int
    duplicate: bool


@dataclass(slots=True)
class _Subscription:
    consumer: topology.Consumer
    handlers: dict[str, Handler] = field(default_factory=dict)
    on_invalid: InvalidHandler | None = None


class Bus:
    """One connection to NATS for one service instance."""

    def __init__(self, service: str, settings: Settings, clock: Clock | None = None) -> None:
        self.service = service
        self.settings = settings
        self.clock: Clock = clock or SystemClock()
        self.source = f"trainbus/{service}"
        self._subscriptions: dict[str, _Subscription] = {}
        self._connection: Client | None = None
        password = settings.nats_password.get_secret_value() if settings.nats_password else None
        self.broker = NatsBroker(
            settings.nats_servers,
            name=f"trainbus-{service}-{settings.instance}",
            apply_types=False,
            logger=None,
            ack_policy=AckPolicy.MANUAL,
            graceful_timeout=10.0,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=cast(int, 0.2),
            connect_timeout=5,
            ping_interval=5,
            max_outstanding_pings=2,
            drain_timeout=5,
            reconnected_cb=self._on_reconnected,
            disconnected_cb=self._on_disconnected,
            error_cb=self._on_error,
            security=_security(settings.nats_user, password),
        )

    # -- life ---------------------------------------------------------------

    async def connect(self, *, reconcile_topology: bool = True) -> None:
        """Connect, waiting for the server as long as it takes, and make its streams match."""
        while self._connection is None:
            try:
                self._connection = await self.broker.connect()
            except (OSError, nats.errors.Error) as error:
                log.warning("waiting for NATS", servers=self.settings.nats_servers, error=str(error))
                await asyncio.sleep(0.3)
        metrics.CONNECTED.set(1)
        if reconcile_topology:
            await self._patiently(lambda: reconcile(self.js, topology.Topology(), replicas=self.settings.nats_replicas))

    async def start(self) -> None:
        """Start every handler registered with ``on``. Call ``connect`` first."""
        for subscription in self._subscriptions.values():
            self._subscribe(subscription)
        await self.broker.start()

    async def close(self) -> None:
        """Stop taking messages, let running handlers finish, flush and disconnect."""
        await self.broker.stop()
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed:
            with suppress(nats.errors.Error, asyncio.TimeoutError):
                await connection.drain()
        metrics.CONNECTED.set(0)

    @property
    def nc(self) -> Client:
        """The plain nats-py connection, for what this class does not wrap."""
        if self._connection is None:
            raise RuntimeError("the bus is not connected: await connect() first")
        return self._connection

    @property
    def js(self) -> JetStreamContext:
        return self.nc.jetstream(timeout=5)

    @property
    def connected(self) -> bool:
        return self._connection is not None and self._connection.is_connected

    # -- publishing ---------------------------------------------------------

    async def publish(
        self,
        fact: Fact,
        cause: Envelope | None = None,
        *,
        expect: Expect | None = None,
    ) -> Ack:
        """Publish a fact and wait until the server has stored it. Safe to repeat.

        Raises:
            Conflict: ``expect`` does not hold, and what is there is not this fact.
            Transient: the server did not answer for PUBLISH_PATIENCE_S.
            Poison: the fact is larger than the server takes.
        """
        parent = telemetry.within(cause.traceparent) if cause else ""
        with telemetry.span(f"publish {fact.type}", SpanKind.PRODUCER, parent):
            return await self.send(self._outgoing_fact(fact, cause, expect, telemetry.current_traceparent(parent)))

    async def publish_event(
        self, event: Event, subject: str, envelope: Envelope, *, expect: Expect | None = None
    ) -> Ack:
        """Publish any event under an envelope of the caller's making."""
        return await self.send(_outgoing(event, subject, envelope, expect))

    def outgoing(self, fact: Fact, cause: Envelope | None = None, *, expect: Expect | None = None) -> Outgoing:
        """The message that a fact is published as, for ``send`` or a batch."""
        traceparent = telemetry.within(cause.traceparent) if cause and cause.traceparent else ""
        return self._outgoing_fact(fact, cause, expect, traceparent)

    def _outgoing_fact(self, fact: Fact, cause: Envelope | None, expect: Expect | None, traceparent: str) -> Outgoing:
        envelope = fact_envelope(fact, self.source, self.clock.now(), cause, traceparent)
        return _outgoing(fact, fact.subject, envelope, expect)

    async def send(self, message: Outgoing) -> Ack:
        """Publish a message and wait until the server has stored it; see ``publish``."""
        subject, headers, body = message.subject, message.headers, message.body
        deadline = time.monotonic() + PUBLISH_PATIENCE_S
        for attempt in range(1_000_000):
            try:
                ack = await self.js.publish(subject, body, headers=headers, timeout=PUBLISH_TIMEOUT_S)
            except BadRequestError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    raise
                return await self._already_there(subject, message.id, error)
            except nats.errors.MaxPayloadError as error:
                # Trying again, which is what publishers do, would never end.
                raise Poison(
                    f"{message.type} has {len(body):,} bytes, more than the server takes: raise max_payload in its "
                    "configuration, or publish less at once"
                ) from error
            except (TimeoutError, nats.errors.Error, APIError) as error:
                if time.monotonic() > deadline:
                    raise Transient(f"NATS did not take {message.type}: {error!r}") from error
                metrics.PUBLISH_RETRIES.labels(message.type).inc()
                await asyncio.sleep(min(0.1 * 2**attempt, 2.0))
                continue
            metrics.PUBLISHED.labels(message.type).inc()
            if self.settings.chaos_twice:
                with suppress(APIError):
                    await self.js.publish(subject, body, headers=headers, timeout=PUBLISH_TIMEOUT_S)
            return Ack(ack.seq, bool(ack.duplicate))
        raise AssertionError("unreachable")

    async def _already_there(self, subject: str, event_id: str, error: Exception) -> Ack:
        """A refused publish that was in fact ours, stored by an earlier try whose answer was lost."""
        last = await self.last(subject)
        if last is not None and last.envelope.id == event_id:
            return Ack(last.sequence, True)
        raise Conflict(str(error)) from error

    # -- reading ------------------------------------------------------------

    async def last(self, subject: str, stream: str = topology.FACTS.name) -> Received[Any] | None:
        """The newest event on ``subject`` (wildcards allowed), or None.

        What somebody published there and cannot be decoded is passed over, but ``sequence`` is always
        that of the last message, readable or not: it is what an ``Expect`` is compared with.
        """
        message = await self._last_message(subject, stream)
        if message is None:
            return None
        try:
            return _from_stored(message, stream)
        except EnvelopeError as error:
            log.warning("passed over what cannot be decoded", subject=message.subject, error=str(error))
        readable = await self.history(subject, stream=stream)
        return replace(readable[-1], sequence=message.seq or 0) if readable else None

    async def last_sequence(self, subject: str, stream: str = topology.FACTS.name) -> int:
        """The sequence of the last message on ``subject`` (wildcards allowed), readable or not; 0 if none."""
        message = await self._last_message(subject, stream)
        return (message.seq or 0) if message is not None else 0

    async def _last_message(self, subject: str, stream: str) -> RawStreamMsg | None:
        try:
            found = await self._patiently(lambda: self.js.get_last_msg(stream, subject, direct="*" not in subject))
        except NotFoundError:
            return None
        return cast(RawStreamMsg, found)

    async def history(
        self, *filters: str, stream: str = topology.FACTS.name, start_sequence: int = 1
    ) -> list[Received[Any]]:
        """Every event on ``filters`` that is stored now, oldest first. For bounded subjects alone."""
        found: list[Received[Any]] = []
        async for batch in self.follow(stream, filters, start_sequence, until_caught_up=True):
            found += batch
        return found

    async def follow(
        self,
        stream: str,
        filters: tuple[str, ...] = (),
        start_sequence: int = 1,
        *,
        idle_s: float = 0.25,
        until_caught_up: bool = False,
        unreadable: bool = False,
    ) -> AsyncIterator[list[Received[Any]]]:
        """Yield batches of events in stream order, each exactly once, from ``start_sequence`` on.

        An empty batch comes every ``idle_s`` while nothing happens: time to look at the clock.
        ``batch[-1].pending == 0`` means that the reader has caught up. Survives server restarts.
        What cannot be decoded is skipped with a warning: facts are read leniently. With ``unreadable``
        it is yielded as an ``Unreadable``, for readers who must know each place in the stream.
        """
        messages = follow(
            lambda: self.nc, stream, filters, start_sequence, idle_s=idle_s, until_caught_up=until_caught_up
        )
        try:
            async for raw_batch in messages:
                batch = [_decoded(raw, stream) for raw in raw_batch]
                if not unreadable:
                    batch = [received for received in batch if not isinstance(received.event, Unreadable)]
                if raw_batch:
                    metrics.FOLLOW_SEQUENCE.labels(stream).set(raw_batch[-1].metadata.sequence.stream)
                    if not batch:
                        continue
                yield batch
        finally:
            await messages.aclose()

    async def bucket(self, bucket: topology.Bucket) -> KeyValue:
        """A key-value bucket of the topology."""
        return cast(KeyValue, await self._patiently(lambda: self.js.key_value(bucket.name)))

    async def entries(
        self, bucket: topology.Bucket, pattern: str, *, idle_s: float, until_caught_up: bool = False
    ) -> AsyncIterator[list[Entry]]:
        """Every key on ``pattern`` as it is, then each change, in order. For buckets that keep no history.

        One subscription that stays open, so that waiting costs the server nothing. Empty batches and
        server restarts are as in ``follow``.
        """
        prefix = f"$KV.{bucket.name}."
        messages = follow(
            lambda: self.nc, f"KV_{bucket.name}", (prefix + pattern,), 1, idle_s=idle_s, until_caught_up=until_caught_up
        )
        try:
            async for batch in messages:
                yield [_entry(msg, prefix) for msg in batch]
        finally:
            await messages.aclose()

    async def _patiently(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Try ``call`` again while the server does not answer."""
        deadline = time.monotonic() + PUBLISH_PATIENCE_S
        while True:
            try:
                return await call()
            except (NotFoundError, BadRequestError, KeyNotFoundError):
                raise
            except (TimeoutError, nats.errors.Error, APIError) as error:
                if time.monotonic() > deadline:
                    raise Transient(f"NATS does not answer: {error!r}") from error
                await asyncio.sleep(0.2)

    # -- handling -----------------------------------------------------------

    def on(
        self, consumer: topology.Consumer, event: type[E], *, on_invalid: InvalidHandler | None = None
    ) -> Callable[[Callable[[Received[E]], Awaitable[None]]], Callable[[Received[E]], Awaitable[None]]]:
        """Register a handler for one event type of a consumer.

        The message is acknowledged when the handler returns. ``on_invalid`` gets messages whose
        data does not fit their type, before they go to DEAD_LETTERS.
        """
        if event not in consumer.events:
            raise ValueError(
                f"consumer {consumer.name} does not carry {event.__name__}: add it to contracts/topology.py"
            )
        subscription = self._subscriptions.setdefault(consumer.name, _Subscription(consumer))
        if on_invalid is not None:
            subscription.on_invalid = on_invalid

        def register(handler: Callable[[Received[E]], Awaitable[None]]) -> Callable[[Received[E]], Awaitable[None]]:
            subscription.handlers[event.type] = handler
            return handler

        return register

    def _subscribe(self, subscription: _Subscription) -> None:
        consumer = subscription.consumer

        async def handle(message: NatsMessage) -> None:
            await self._deliver(subscription, message)

        async def undecoded(message: NatsMessage, _original: Any) -> NatsMessage:
            return message

        several: dict[str, Any] = {"max_workers": consumer.concurrency} if consumer.concurrency > 1 else {}
        subscriber = self.broker.subscriber(
            subject=subjects.ANY,
            stream=JStream(consumer.stream, declare=False),
            durable=consumer.name,
            pull_sub=PullSub(batch_size=1, timeout=PULL_TIMEOUT_S),
            decoder=undecoded,
            no_reply=True,
            title=consumer.name,
            description=consumer.doc,
            **several,
        )
        subscriber(handle)

    async def _deliver(self, subscription: _Subscription, message: NatsMessage) -> None:
        consumer, msg = subscription.consumer, message.raw_message
        raw = _raw(msg, consumer.stream)
        kind = "undecoded"
        started = time.monotonic()
        try:
            envelope, event = decode(raw)
            kind = envelope.type
            handler = subscription.handlers.get(kind)
            if handler is None:
                raise Poison(f"service {self.service} does not handle {kind!r} on {raw.subject!r}")
            if raw.stored_at is not None:
                lag_s = (self.clock.now() - raw.stored_at).total_seconds()
                metrics.DELIVERY_LAG_SECONDS.labels(consumer.name).observe(max(lag_s, 0))
            metadata = msg.metadata
            received = Received(
                event,
                envelope,
                raw.subject,
                consumer.stream,
                raw.sequence,
                metadata.num_pending,
                metadata.num_delivered,
                raw.stored_at,
            )
            with (
                telemetry.span(f"handle {kind}", SpanKind.CONSUMER, envelope.traceparent, consumer=consumer.name),
                telemetry.bound(_ids(event, envelope)),
            ):
                await self._with_heartbeat(handler(received), msg, consumer.ack_wait_s)
            outcome = "ok"
            once_more = self.settings.chaos_twice and metadata.num_delivered == 1
            await self._settle(msg.nak() if once_more else msg.ack_sync())
        except InvalidData as error:
            outcome = await self._invalid(subscription, msg, raw, error)
        except (EnvelopeError, Poison) as error:
            outcome = await self._bury(consumer, msg, raw, str(error))
        except asyncio.CancelledError:
            # Shutting down: leave it unacknowledged, another instance gets it.
            raise
        except Exception as error:
            outcome = await self._retry_or_bury(consumer, msg, raw, error)
        metrics.HANDLED.labels(consumer.name, kind, outcome).inc()
        metrics.HANDLING_SECONDS.labels(consumer.name, kind).observe(time.monotonic() - started)

    async def _invalid(self, subscription: _Subscription, msg: Msg, raw: RawMessage, error: InvalidData) -> str:
        if subscription.on_invalid is not None:
            try:
                await subscription.on_invalid(raw, error)
            except Exception as failure:
                return await self._retry_or_bury(subscription.consumer, msg, raw, failure)
        return await self._bury(subscription.consumer, msg, raw, str(error))

    async def _retry_or_bury(self, consumer: topology.Consumer, msg: Msg, raw: RawMessage, error: Exception) -> str:
        deliveries = msg.metadata.num_delivered
        if 0 < consumer.max_deliver <= deliveries:
            return await self._bury(consumer, msg, raw, f"given up after {deliveries} deliveries: {error!r}")
        delay_s = RETRY_DELAYS_S[min(deliveries, len(RETRY_DELAYS_S)) - 1]
        level = log.info if isinstance(error, Transient) else log.exception
        level("handler failed, will be tried again", subject=raw.subject, delay_s=delay_s, error=repr(error))
        await self._settle(msg.nak(delay=delay_s))
        return "retried"

    async def _bury(self, consumer: topology.Consumer, msg: Msg, raw: RawMessage, reason: str) -> str:
        """Keep the message in DEAD_LETTERS, then take it off the consumer. In this order."""
        log.error("dead letter", subject=raw.subject, sequence=raw.sequence, consumer=consumer.name, reason=reason)
        headers = {
            **raw.headers,
            "Nats-Msg-Id": f"{consumer.name}/{raw.stream}/{raw.sequence}",
            "trainbus-dead-reason": " ".join(reason.split())[:2000],
            "trainbus-dead-subject": raw.subject,
            "trainbus-dead-stream": raw.stream,
            "trainbus-dead-sequence": str(raw.sequence),
            "trainbus-dead-consumer": consumer.name,
        }
        for name in (EXPECTED_LAST, EXPECTED_LAST_SUBJECT):
            headers.pop(name, None)
        # What fits the server by itself need not fit with these headers.
        room = self.nc.max_payload - DEAD_HEADERS_BYTES
        if len(raw.body) > room:
            headers["trainbus-dead-bytes"] = str(len(raw.body))
        body = raw.body[:room]
        await self._patiently(lambda: self.js.publish(subjects.dead(consumer.name, raw.subject), body, headers=headers))
        await self._settle(msg.term())
        return "dead"

    async def _settle(self, answer: Awaitable[Any]) -> None:
        """Send an acknowledgement. If it gets lost the message comes again, which handlers can bear."""
        try:
            await answer
        except (TimeoutError, nats.errors.Error) as error:
            log.warning("acknowledgement lost, expect a redelivery", error=repr(error))

    async def _with_heartbeat(self, work: Awaitable[None], msg: Msg, ack_wait_s: float) -> None:
        """Run a handler, telling the server while it lasts that it is still at work."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=ack_wait_s * HEARTBEAT_SHARE)
                if done:
                    return await task
                await self._settle(msg.in_progress())
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    # -- connection events --------------------------------------------------

    async def _on_reconnected(self) -> None:
        metrics.CONNECTED.set(1)
        metrics.RECONNECTS.inc()
        log.info("reconnected to NATS")

    async def _on_disconnected(self) -> None:
        metrics.CONNECTED.set(0)
        log.warning("disconnected from NATS")

    async def _on_error(self, error: Exception) -> None:
        log.debug("NATS client error", error=repr(error))


def _security(user: str | None, password: str | None) -> Any:
    if user is None:
        return None
    from faststream.security import SASLPlaintext

    return SASLPlaintext(username=user, password=password or "")


def _outgoing(event: Event, subject: str, envelope: Envelope, expect: Expect | None) -> Outgoing:
    headers, body = encode(event, envelope)
    if expect is not None:
        headers |= _expected(expect)
    return Outgoing(envelope.id, envelope.type, subject, headers, body)


def _expected(expect: Expect) -> dict[str, str]:
    found = {EXPECTED_LAST: str(expect.sequence)}
    return {**found, EXPECTED_LAST_SUBJECT: expect.subject} if expect.subject else found


def _raw(msg: Msg, stream: str) -> RawMessage:
    metadata = msg.metadata
    return RawMessage(msg.subject, msg.data, msg.headers or {}, stream, metadata.sequence.stream, metadata.timestamp)


def _entry(msg: Msg, prefix: str) -> Entry:
    deleted = (msg.headers or {}).get("KV-Operation") in ("DEL", "PURGE")
    return Entry(msg.subject.removeprefix(prefix), msg.metadata.sequence.stream, None if deleted else msg.data)


def _from_stored(message: RawStreamMsg, stream: str) -> Received[Any] | None:
    raw = RawMessage(
        message.subject or "", message.data or b"", message.headers or {}, stream, message.seq or 0, message.time
    )
    envelope, event = decode(raw)
    return Received(event, envelope, raw.subject, stream, raw.sequence, stored_at=raw.stored_at)


def _decoded(msg: Msg, stream: str) -> Received[Any]:
    raw = _raw(msg, stream)
    event: Event | Unreadable
    try:
        envelope, event = decode(raw)
    except EnvelopeError as error:
        log.warning("skipped what cannot be decoded", subject=raw.subject, sequence=raw.sequence, error=str(error))
        envelope = Envelope(id="", source="", type="", time=msg.metadata.timestamp)
        event = Unreadable(str(error))
    return Received(
        event, envelope, raw.subject, stream, raw.sequence, msg.metadata.num_pending, stored_at=raw.stored_at
    )


def _ids(event: Event, envelope: Envelope) -> dict[str, str]:
    ids = {"event_id": envelope.id, "correlation_id": envelope.correlation_id}
    if run_id := getattr(event, "run_id", None):
        ids["run_id"] = run_id
    return ids


__all__ = [
    "Ack",
    "Bus",
    "Conflict",
    "Entry",
    "Expect",
    "Outgoing",
    "Poison",
    "Received",
    "Transient",
    "Unreadable",
]
