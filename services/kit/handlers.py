"""Handlers that lose nothing, on FastStream.

FastStream carries them; this module pins down what its defaults get wrong. Its default
acknowledgement policy terminates a message on any exception (the event is lost), its nack policy
redelivers at once. Here: ``PoisonMessage`` goes to DEAD_LETTERS and is terminated; ``TransientError`` and
anything unexpected is redelivered with a growing delay, and goes to DEAD_LETTERS after the
consumer's ``max_deliver``. Nothing is ever dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import nats.errors
import structlog
from faststream.nats import JStream, NatsBroker, NatsMessage, PullSub
from nats.aio.msg import Msg
from opentelemetry.trace import SpanKind

from contracts import subjects, topology
from contracts.base import Event
from contracts.envelope import Envelope, EnvelopeError, InvalidData, RawMessage, decode
from services.kit import metrics, telemetry
from services.kit.clock import Clock
from services.kit.messages import E, Message, PoisonMessage, TransientError, raw_of

log = structlog.get_logger(__name__)

Handler = Callable[[Message[Any]], Awaitable[None]]
InvalidHandler = Callable[[RawMessage, InvalidData], Awaitable[None]]
#: Stores a message of a consumer in DEAD_LETTERS, with the reason.
DeadLetter = Callable[[topology.Consumer, RawMessage, str], Awaitable[None]]

#: Seconds before the n-th redelivery; the last one repeats.
RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
#: How often a long handler tells the server that it is still at work, as a share of ack_wait.
HEARTBEAT_SHARE = 0.3
#: Seconds a pull request stays open; also the longest a message waits after the server restarted.
PULL_TIMEOUT_S = 1.0


@dataclass(slots=True)
class _Subscription:
    consumer: topology.Consumer
    handlers: dict[str, Handler] = field(default_factory=dict)
    on_invalid: InvalidHandler | None = None


class Handlers:
    """The handlers of one service instance, and what becomes of each message that they get."""

    def __init__(self, service: str, clock: Clock, dead_letter: DeadLetter, *, twice: bool) -> None:
        self._service, self._clock, self._dead_letter = service, clock, dead_letter
        #: Fault injection: every message is handled a second time.
        self._twice = twice
        self._subscriptions: dict[str, _Subscription] = {}

    def subscribe(self, broker: NatsBroker) -> None:
        """Have the broker deliver to every handler registered with ``add``, once it is started."""
        for subscription in self._subscriptions.values():
            self._subscribe(broker, subscription)

    def add(
        self, consumer: topology.Consumer, event: type[E], *, on_invalid: InvalidHandler | None = None
    ) -> Callable[[Callable[[Message[E]], Awaitable[None]]], Callable[[Message[E]], Awaitable[None]]]:
        """See ``Bus.subscriber``."""
        if event not in consumer.events:
            raise ValueError(
                f"consumer {consumer.name} does not carry {event.__name__}: add it to contracts/topology.py"
            )
        subscription = self._subscriptions.setdefault(consumer.name, _Subscription(consumer))
        if on_invalid is not None:
            subscription.on_invalid = on_invalid

        def register(handler: Callable[[Message[E]], Awaitable[None]]) -> Callable[[Message[E]], Awaitable[None]]:
            subscription.handlers[event.type] = handler
            return handler

        return register

    def _subscribe(self, broker: NatsBroker, subscription: _Subscription) -> None:
        consumer = subscription.consumer
        metrics.initialize_series(metrics.HANDLED, [consumer.name], subscription.handlers, ("ok", "retried", "dead"))

        async def handle(message: NatsMessage) -> None:
            await self._deliver(subscription, message)

        async def raw_decoder(message: NatsMessage, _original: Any) -> NatsMessage:
            return message

        several: dict[str, Any] = {"max_workers": consumer.concurrency} if consumer.concurrency > 1 else {}
        subscriber = broker.subscriber(
            subject=subjects.WILDCARD,
            stream=JStream(consumer.stream, declare=False),
            durable=consumer.name,
            pull_sub=PullSub(batch_size=1, timeout=PULL_TIMEOUT_S),
            decoder=raw_decoder,
            no_reply=True,
            title=consumer.name,
            description=consumer.doc,
            **several,
        )
        subscriber(handle)

    async def _deliver(self, subscription: _Subscription, message: NatsMessage) -> None:
        consumer, msg = subscription.consumer, message.raw_message
        raw = raw_of(msg, consumer.stream)
        kind = "undecoded"
        started = time.monotonic()
        try:
            envelope, event = decode(raw)
            kind = envelope.type
            handler = subscription.handlers.get(kind)
            if handler is None:
                raise PoisonMessage(f"service {self._service} does not handle {kind!r} on {raw.subject!r}")
            if raw.stored_at is not None:
                lag_s = (self._clock.now() - raw.stored_at).total_seconds()
                metrics.DELIVERY_LAG_SECONDS.labels(consumer.name).observe(max(lag_s, 0))
            metadata = msg.metadata
            message_of = Message(
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
                telemetry.start_span(f"handle {kind}", SpanKind.CONSUMER, envelope.traceparent, consumer=consumer.name),
                telemetry.bind_log_context(_ids(event, envelope)),
            ):
                await self._with_heartbeat(handler(message_of), msg, consumer.ack_wait_s)
            outcome = "ok"
            once_more = self._twice and metadata.num_delivered == 1
            await self._acknowledge(msg.nak() if once_more else msg.ack_sync())
        except InvalidData as error:
            outcome = await self._invalid(subscription, msg, raw, error)
        except (EnvelopeError, PoisonMessage) as error:
            outcome = await self._terminate(consumer, msg, raw, str(error))
        except asyncio.CancelledError:
            # Shutting down: leave it unacknowledged, another instance gets it.
            raise
        except Exception as error:
            outcome = await self._retry_or_dead_letter(consumer, msg, raw, error)
        metrics.HANDLED.labels(consumer.name, kind, outcome).inc()
        metrics.HANDLING_SECONDS.labels(consumer.name, kind).observe(time.monotonic() - started)

    async def _invalid(self, subscription: _Subscription, msg: Msg, raw: RawMessage, error: InvalidData) -> str:
        if subscription.on_invalid is not None:
            try:
                await subscription.on_invalid(raw, error)
            except Exception as failure:
                return await self._retry_or_dead_letter(subscription.consumer, msg, raw, failure)
        return await self._terminate(subscription.consumer, msg, raw, str(error))

    async def _retry_or_dead_letter(
        self, consumer: topology.Consumer, msg: Msg, raw: RawMessage, error: Exception
    ) -> str:
        deliveries = msg.metadata.num_delivered
        if 0 < consumer.max_deliver <= deliveries:
            return await self._terminate(consumer, msg, raw, f"given up after {deliveries} deliveries: {error!r}")
        delay_s = RETRY_DELAYS_S[min(deliveries, len(RETRY_DELAYS_S)) - 1]
        level = log.info if isinstance(error, TransientError) else log.exception
        level("handler failed, will be tried again", subject=raw.subject, delay_s=delay_s, error=repr(error))
        await self._acknowledge(msg.nak(delay=delay_s))
        return "retried"

    async def _terminate(self, consumer: topology.Consumer, msg: Msg, raw: RawMessage, reason: str) -> str:
        """Keep the message in DEAD_LETTERS, then take it off the consumer. In this order."""
        log.error("dead letter", subject=raw.subject, sequence=raw.sequence, consumer=consumer.name, reason=reason)
        await self._dead_letter(consumer, raw, reason)
        await self._acknowledge(msg.term())
        return "dead"

    async def _acknowledge(self, answer: Awaitable[Any]) -> None:
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
                await self._acknowledge(msg.in_progress())
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


def _ids(event: Event, envelope: Envelope) -> dict[str, str]:
    ids = {"event_id": envelope.id, "correlation_id": envelope.correlation_id}
    if run_id := getattr(event, "run_id", None):
        ids["run_id"] = run_id
    return ids
