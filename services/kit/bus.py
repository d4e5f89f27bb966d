"""The bus, once: publishing that is idempotent, ordered following, and handlers (``handlers.py``) that lose nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

import nats.errors
import structlog
from faststream.middlewares import AckPolicy
from faststream.nats import NatsBroker
from faststream.security import SASLPlaintext
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, BadRequestError, KeyNotFoundError, NotFoundError
from nats.js.kv import KeyValue
from opentelemetry.trace import SpanKind

import services.kit.nats_wire  # noqa: F401 - it changes the client
from contracts import subjects, topology
from contracts.base import Event, Fact, request_id_for
from contracts.envelope import Envelope, EnvelopeError, InvalidData, RawMessage, fact_envelope
from contracts.events.request import RequestRefused
from services.kit import metrics, telemetry
from services.kit.clock import Clock, SystemClock
from services.kit.concurrency import cancel_and_wait
from services.kit.dead_letters import REASON_CHARACTERS, RETRY_ENDPOINT, build_dead_letter, read_dead_letter
from services.kit.follow import follow
from services.kit.handlers import Handler, Handlers
from services.kit.messages import (
    WRONG_LAST_SEQUENCE,
    BucketEntry,
    Conflict,
    ConnectionLost,
    E,
    ExpectedSequence,
    Message,
    OutgoingMessage,
    PoisonMessage,
    PublishAck,
    TransientError,
    UndecodableEvent,
    bucket_entry_of,
    decode_followed,
    decode_stored,
    encode_message,
    raw_of_stored,
)
from services.kit.middlewares import InvalidHandler, RetriedMessage
from services.kit.pull_subscriber import PullSubscriber
from services.kit.reconcile import reconcile
from services.kit.settings import Settings

log = structlog.get_logger(__name__)

PUBLISH_TIMEOUT_S = 2.0
#: Seconds to keep trying to publish while the server is away. The ids make trying again safe.
PUBLISH_PATIENCE_S = 120.0
#: Times to open a connection again that the server has closed.
REOPEN_ATTEMPTS = 10
REOPEN_INTERVAL_S = 0.5
#: Stored messages that cannot be decoded of which a process remembers that it has said so: at most 20 MB.
REMEMBERED_WARNINGS = 100_000


class Bus:
    """One connection to NATS for one service instance."""

    def __init__(self, service: str, settings: Settings, clock: Clock | None = None) -> None:
        self.service = service
        self.settings = settings
        self.clock: Clock = clock or SystemClock()
        self.source = f"trainbus/{service}"
        self._handlers = Handlers(service, settings, self.clock, self._dead_letter, self._refuse)
        self._connection: Client | None = None
        #: Set when nats-py has closed the connection.
        self._closed = asyncio.Event()
        self._last_error = ""
        self._keeping_open: asyncio.Task[None] | None = None
        self._warned: set[tuple[str, int, datetime | None]] = set()
        self._endpoints: dict[str, tuple[str, Callable[[Msg], Awaitable[None]]]] = {}
        self._endpoint_subscriptions: dict[str, Subscription] = {}
        password = settings.nats_password.get_secret_value() if settings.nats_password else ""
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
            closed_cb=self._on_closed,
            error_cb=self._on_error,
            security=SASLPlaintext(settings.nats_user, password) if settings.nats_user else None,
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
        # FastStream's raises at some errors, also where nats-py is connecting again, which that would end.
        self._connection._error_cb = self._on_error
        metrics.CONNECTED.set(1)
        if self._keeping_open is None:
            self._keeping_open = asyncio.create_task(self._keep_open(self._connection))
        if reconcile_topology:
            await self._retry_while_away(
                lambda: reconcile(self.js, topology.Topology(), replicas=self.settings.nats_replicas)
            )

    async def start(self) -> None:
        """Start every handler registered with ``subscriber``. Call ``connect`` first."""
        self._handlers.include_in(self.broker)
        for name, subscriber in self._handlers.subscribers.items():
            await self._add_retry_endpoint(name, subscriber)
        await self.broker.start()

    async def stop(self) -> None:
        """Take no more messages, and let running handlers finish. What they need must last until then."""
        await asyncio.gather(*(subscriber.stop() for subscriber in self.broker.subscribers))
        if self.connected:
            with suppress(nats.errors.Error, TimeoutError):
                await self.nc.flush(timeout=2)  # acknowledgements are sent without waiting for an answer

    async def close(self) -> None:
        """Stop if that is not done yet, flush and disconnect. Ends also while the server is away."""
        connection, self._connection = self._connection, None
        if self._keeping_open is not None:
            await cancel_and_wait(self._keeping_open)
            self._keeping_open = None
        # What is still to be sent may meet a connection that is lost just now.
        with suppress(nats.errors.Error, OSError):
            await self.broker.stop()
        if connection is not None and not connection.is_closed:
            # Not drain: it has just failed.
            with suppress(nats.errors.Error, OSError):
                await connection.close()
        metrics.CONNECTED.set(0)

    async def wait_until_lost(self) -> None:
        """Wait until the connection is closed for good. Call ``connect`` first.

        Raises:
            ConnectionLost: it is.
        """
        if self._keeping_open is None:
            raise RuntimeError("the bus is not connected: await connect() first")
        await asyncio.shield(self._keeping_open)

    @property
    def consumers(self) -> dict[str, str]:
        """The consumers that this service handles, and their streams."""
        return self._handlers.streams

    @property
    def stopped_consumers(self) -> list[str]:
        """Names of the consumers that the dead-letter limit has stopped."""
        return self._handlers.stopped

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
        expected: ExpectedSequence | None = None,
    ) -> PublishAck:
        """Publish a fact and wait until the server has stored it. Safe to repeat.

        Raises:
            Conflict: ``expected`` does not hold, and what is there is not this fact.
            TransientError: the server did not answer for PUBLISH_PATIENCE_S.
            PoisonMessage: the fact is larger than the server takes or readers decode.
        """
        parent = telemetry.select_parent(cause.traceparent) if cause else ""
        with telemetry.start_span(f"publish {fact.type}", SpanKind.PRODUCER, parent):
            traceparent = telemetry.current_traceparent(parent)
            return await self.send(self.build_message(fact, cause, expected=expected, traceparent=traceparent))

    async def publish_event(
        self, event: Event, subject: str, envelope: Envelope, *, expected: ExpectedSequence | None = None
    ) -> PublishAck:
        """Publish any event under an envelope of the caller's making."""
        topology.require_producer(self.service, type(event))
        return await self.send(encode_message(event, subject, envelope, expected))

    def build_message(
        self,
        fact: Fact,
        cause: Envelope | None = None,
        *,
        expected: ExpectedSequence | None = None,
        traceparent: str = "",
    ) -> OutgoingMessage:
        """Return the message that a fact is published as, for ``send`` or a batch."""
        if not traceparent and cause and cause.traceparent:
            traceparent = telemetry.select_parent(cause.traceparent)
        topology.require_producer(self.service, type(fact))
        envelope = fact_envelope(fact, self.source, self.clock.now(), cause, traceparent)
        return encode_message(fact, fact.subject, envelope, expected)

    async def send(self, message: OutgoingMessage) -> PublishAck:
        """Publish a message and wait until the server has stored it; see ``publish``."""
        subject, headers, body = message.subject, message.headers, message.body
        if problem := message.find_size_problem(self.nc.max_payload):
            # The server answers what it does not take by closing the connection, and trying again would never end. What
            # no reader decodes would be stored for ever, and never have happened.
            raise PoisonMessage(problem)
        deadline = time.monotonic() + PUBLISH_PATIENCE_S
        for attempt in range(1_000_000):
            try:
                ack = await self.js.publish(subject, body, headers=headers, timeout=PUBLISH_TIMEOUT_S)
            except BadRequestError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    raise
                return await self._find_own_publish(subject, message.id, error)
            except (TimeoutError, nats.errors.Error, APIError) as error:
                if time.monotonic() > deadline:
                    raise TransientError(f"NATS did not take {message.type}: {error!r}") from error
                metrics.PUBLISH_RETRIES.labels(message.type).inc()
                await asyncio.sleep(min(0.1 * 2**attempt, 2.0))
                continue
            metrics.PUBLISHED.labels(message.type).inc()
            if self.settings.inject_duplicates:
                with suppress(nats.errors.Error, TimeoutError):
                    await self.js.publish(subject, body, headers=headers, timeout=PUBLISH_TIMEOUT_S)
            return PublishAck(ack.seq, bool(ack.duplicate))
        raise AssertionError("unreachable")

    async def _find_own_publish(self, subject: str, event_id: str, error: Exception) -> PublishAck:
        """Return the ack of a refused publish that is ours: an earlier try stored it, and its answer was lost."""
        last = await self.get_last_message(subject)
        if last is not None and last.envelope.id == event_id:
            return PublishAck(last.sequence, True)
        raise Conflict(str(error)) from error

    # -- reading ------------------------------------------------------------

    async def get_last_message(self, subject: str, stream: str = topology.FACTS.name) -> Message[Any] | None:
        """Return the newest event on ``subject`` (wildcards allowed), or None.

        A message that cannot be decoded is skipped, but ``sequence`` is always
        that of the last message, readable or not: it is what an ``ExpectedSequence`` is compared with.
        """
        message = await self._last_message(subject, stream)
        if message is None:
            return None
        with suppress(EnvelopeError):
            return decode_stored(message, stream)
        readable = await self.read_history(subject, stream=stream)
        return replace(readable[-1], sequence=message.seq or 0) if readable else None

    async def get_message(self, sequence: int, stream: str = topology.FACTS.name) -> Message[Any] | None:
        """Return the event at a place of a stream; None if nothing, or no event, is there."""
        try:
            message = await self._retry_while_away(lambda: self.js.get_msg(stream, sequence))
            return decode_stored(cast(RawStreamMsg, message), stream)
        except (NotFoundError, EnvelopeError):
            return None

    async def get_last_sequence(self, subject: str, stream: str = topology.FACTS.name) -> int:
        """Return the sequence of the last message on ``subject`` (wildcards allowed), decodable or not; 0 if none."""
        message = await self._last_message(subject, stream)
        return (message.seq or 0) if message is not None else 0

    async def _last_message(self, subject: str, stream: str) -> RawStreamMsg | None:
        try:
            found = await self._retry_while_away(
                lambda: self.js.get_last_msg(stream, subject, direct=not set("*>") & set(subject))
            )
        except NotFoundError:
            return None
        return cast(RawStreamMsg, found)

    async def read_history(
        self, *filters: str, stream: str = topology.FACTS.name, start_sequence: int = 1
    ) -> list[Message[Any]]:
        """Return the events now stored on ``filters``, oldest first. Only for bounded subjects."""
        found: list[Message[Any]] = []
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
        include_undecodable: bool = False,
    ) -> AsyncGenerator[list[Message[Any]], None]:
        """Yield batches of events in stream order, each exactly once, from ``start_sequence`` on.

        An empty batch comes every ``idle_s`` while nothing happens: time to look at the clock.
        ``batch[-1].pending == 0`` means that the reader has caught up. Survives server restarts.
        A message that cannot be decoded is skipped with a warning, one for each message. With ``include_undecodable``
        it is yielded as an ``UndecodableEvent``, for readers who must know each place in the stream.
        """
        followed = follow(
            lambda: self.nc, stream, filters, start_sequence, idle_s=idle_s, until_caught_up=until_caught_up
        )
        async with aclosing(followed) as messages:
            async for raw_batch in messages:
                batch = [decode_followed(raw, stream) for raw in raw_batch]
                self._warn_of_undecodable(batch)
                if not include_undecodable:
                    batch = [message for message in batch if not isinstance(message.event, UndecodableEvent)]
                if raw_batch:
                    metrics.FOLLOW_SEQUENCE.labels(stream).set(raw_batch[-1].metadata.sequence.stream)
                    if not batch:
                        continue
                yield batch

    def _warn_of_undecodable(self, batch: list[Message[Any]]) -> None:
        """Say of each message that cannot be decoded that it was skipped, once: a history is read many times."""
        for message in batch:
            if not isinstance(message.event, UndecodableEvent):
                continue
            place = (message.stream, message.sequence, message.stored_at)
            if place in self._warned:
                continue
            if len(self._warned) < REMEMBERED_WARNINGS:
                self._warned.add(place)
            problem, sequence = message.event.problem, message.sequence
            log.warning("skipped what cannot be decoded", subject=message.subject, sequence=sequence, error=problem)

    async def open_bucket(self, bucket: topology.Bucket) -> KeyValue:
        """Open a key-value bucket of the topology."""
        return cast(KeyValue, await self._retry_while_away(lambda: self.js.key_value(bucket.name)))

    async def put_in_bucket(self, bucket: topology.Bucket, key: str, value: bytes) -> None:
        """Write the value of a key.

        Raises:
            TransientError: the server does not answer.
        """
        opened = await self.open_bucket(bucket)
        await self._retry_while_away(lambda: opened.put(key, value))

    async def follow_bucket(
        self, bucket: topology.Bucket, pattern: str, *, idle_s: float, until_caught_up: bool = False
    ) -> AsyncIterator[list[BucketEntry]]:
        """Every key on ``pattern`` as it is, then each change, in order. For buckets that keep no history.

        One subscription that stays open, so that waiting costs the server nothing. Empty batches and
        server restarts are as in ``follow``.
        """
        prefix = f"$KV.{bucket.name}."
        followed = follow(
            lambda: self.nc, f"KV_{bucket.name}", (prefix + pattern,), 1, idle_s=idle_s, until_caught_up=until_caught_up
        )
        async with aclosing(followed) as messages:
            async for batch in messages:
                yield [bucket_entry_of(msg, prefix) for msg in batch]

    async def _retry_while_away(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Try ``call`` again while the server does not answer."""
        deadline = time.monotonic() + PUBLISH_PATIENCE_S
        while True:
            try:
                return await call()
            except (NotFoundError, BadRequestError, KeyNotFoundError):
                raise
            except (TimeoutError, nats.errors.Error, APIError) as error:
                if time.monotonic() > deadline:
                    raise TransientError(f"NATS does not answer: {error!r}") from error
                await asyncio.sleep(0.2)

    # -- handling -----------------------------------------------------------

    def subscriber(
        self, consumer: topology.Consumer, event: type[E], *, on_invalid: InvalidHandler | None = None
    ) -> Callable[[Handler[E]], Handler[E]]:
        """Register a handler for one event type of a consumer.

        The message is acknowledged when the handler returns. ``on_invalid`` gets messages whose
        data does not fit their type, before they go to DEAD_LETTERS.
        """
        return self._handlers.add(consumer, event, on_invalid=on_invalid)

    async def _dead_letter(self, consumer: topology.Consumer, raw: RawMessage, reason: str) -> None:
        """Store what cannot be handled in DEAD_LETTERS."""
        subject, headers, body = build_dead_letter(consumer, raw, reason, self.nc.max_payload)
        await self._retry_while_away(lambda: self.js.publish(subject, body, headers=headers))

    async def _refuse(self, error: InvalidData) -> None:
        """Publish why a request is not done."""
        envelope = error.envelope
        fact = RequestRefused(
            request_id=request_id_for(envelope.source, envelope.type, envelope.id),
            source=envelope.source,
            request_type=envelope.type,
            ce_id=envelope.id,
            reason=str(error)[:REASON_CHARACTERS],
            problems=tuple(each for each in error.problems if each.field),
        )
        await self.publish(fact, envelope)

    async def add_endpoint(self, subject: str, queue: str, answer: Callable[[Msg], Awaitable[None]]) -> None:
        """Answer questions on ``subject`` (core NATS), one instance of ``queue`` each; also on a new connection."""
        self._endpoints[subject] = (queue, answer)
        await self._subscribe_endpoint(subject)

    async def remove_endpoint(self, subject: str) -> None:
        """Answer no more questions on ``subject``."""
        self._endpoints.pop(subject, None)
        subscription = self._endpoint_subscriptions.pop(subject, None)
        if subscription is not None and self.connected:
            await subscription.unsubscribe()

    async def _subscribe_endpoint(self, subject: str) -> None:
        queue, answer = self._endpoints[subject]
        self._endpoint_subscriptions[subject] = await self.nc.subscribe(subject, queue=queue, cb=answer)

    async def _add_retry_endpoint(self, consumer: str, subscriber: PullSubscriber) -> None:
        """Answer ``trainbus dead-letters retry``: handle one dead letter of the consumer, in turn with its messages."""

        async def retry(message: Msg) -> None:
            try:
                sequence = int(json.loads(message.data)["sequence"])
            except (ValueError, KeyError, TypeError):
                answer = {"outcome": "refused", "reason": 'ask with a body like {"sequence": 1}'}
            else:
                answer = await self._retry_dead_letter(consumer, subscriber, sequence)
            await message.respond(json.dumps(answer).encode())

        await self.add_endpoint(subjects.service(consumer, RETRY_ENDPOINT), consumer, retry)

    async def _retry_dead_letter(self, consumer: str, subscriber: PullSubscriber, sequence: int) -> dict[str, str]:
        try:
            stored = await self.js.get_msg(topology.DEAD_LETTERS.name, sequence)
        except NotFoundError:
            return {"outcome": "missing", "reason": f"there is no dead letter {sequence}"}
        letter = read_dead_letter(raw_of_stored(stored, topology.DEAD_LETTERS.name))
        if letter.consumer != consumer or letter.is_cut:
            return {"outcome": "refused", "reason": "it belongs to another consumer, or was cut when it was stored"}
        message = RetriedMessage.of(letter)
        outcome = await subscriber.retry(message)
        if outcome == "ok":
            await self.js.delete_msg(topology.DEAD_LETTERS.name, sequence)
            subscriber.resume()
        return {"outcome": outcome or "failed", "reason": message.reason}

    # -- connection events --------------------------------------------------

    async def _on_reconnected(self) -> None:
        metrics.CONNECTED.set(1)
        metrics.RECONNECTS.inc()
        self._last_error = ""
        log.info("reconnected to NATS")

    async def _on_disconnected(self) -> None:
        metrics.CONNECTED.set(0)
        log.warning("disconnected from NATS")

    async def _on_closed(self) -> None:
        self._closed.set()

    async def _keep_open(self, connection: Client) -> None:
        """Open the connection again each time that it is closed, as nats-py does at any error of the server.

        That may also happen while it is being opened.

        Raises:
            ConnectionLost: the server is there and refuses it.
        """
        while True:
            await self._closed.wait()
            self._closed.clear()
            if not connection.is_closed:
                continue  # it has been opened again since
            metrics.CONNECTED.set(0)
            log.error("NATS closed the connection", error=repr(connection.last_error))
            await self._reopen(connection)

    async def _reopen(self, connection: Client) -> None:
        for attempt in range(1, REOPEN_ATTEMPTS + 1):
            await asyncio.sleep(REOPEN_INTERVAL_S)
            try:
                # It may hold the beginning of a message that the end of the connection has cut off.
                connection._ps.reset()
                await connection.connect(**self.broker._connection_kwargs)
                connection._error_cb = self._on_error
                # A request made meanwhile has named its inbox and could not subscribe to it: none would be answered.
                connection._resp_sub_prefix = None
                for subject in self._endpoints:
                    await self._subscribe_endpoint(subject)
            except (OSError, nats.errors.Error) as error:
                log.error("cannot connect to NATS again", attempt=attempt, error=repr(error))
            else:
                await self._on_reconnected()
                return
        log.critical("connection to NATS lost for good", error=repr(connection.last_error))
        raise ConnectionLost(f"NATS closed the connection and refuses a new one: {connection.last_error!r}")

    async def _on_error(self, error: Exception) -> None:
        text = repr(error)
        if text != self._last_error:  # one for each try to connect again
            log.warning("NATS client error", error=text)
        self._last_error = text


__all__ = [
    "BucketEntry",
    "Bus",
    "Conflict",
    "ConnectionLost",
    "ExpectedSequence",
    "Message",
    "OutgoingMessage",
    "PoisonMessage",
    "PublishAck",
    "TransientError",
    "UndecodableEvent",
]
