"""A FastStream subscriber on one durable pull consumer, under a loop that survives every failure of the connection.

FastStream's own loop asks ``fetch`` for one batch after the other: a round trip for each, and without end when
nats-py is closed, since ``fetch`` then fails without yielding to the event loop.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, cast

import nats.errors
import structlog
from faststream._internal.broker.registrator import Registrator
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream.middlewares import AckPolicy
from faststream.nats import JStream, NatsRouter, PullSub
from faststream.nats.configs import NatsBrokerConfig
from faststream.nats.subscriber.config import NatsSubscriberConfig, NatsSubscriberSpecificationConfig
from faststream.nats.subscriber.specification import NatsSubscriberSpecification
from faststream.nats.subscriber.usecases import PullStreamSubscriber
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig
from nats.js.errors import APIError

from services.kit import metrics
from services.kit.middlewares import HandlerGroup, RetriedMessage, decode_event, parse_message
from services.kit.pull import PullBroken, PullSubscription

log = structlog.get_logger(__name__)

#: Messages that an instance holds or has requested, for each that it works on at a time: enough to hide a round trip.
PREFETCH = 16
#: How often the deadlines of held messages are extended, as a share of ack_wait.
EXTEND_SHARE = 0.3
#: Seconds after which the loop looks at its subscription though nothing has arrived.
CHECK_INTERVAL_S = 1.0
#: Seconds before a broken subscription is opened again.
REOPEN_DELAY_S = 0.2


class PullSubscriber(PullStreamSubscriber):
    """Pulls ahead of ``concurrency`` workers, each of which takes one message after the other."""

    def __init__(self, group: HandlerGroup, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.group = group
        self._queue: asyncio.Queue[Msg] = asyncio.Queue()
        self._retries: dict[int, asyncio.Event] = {}
        self._pull_subscription: PullSubscription | None = None
        self._limit = PREFETCH + group.consumer.concurrency

    async def _create_subscription(self) -> None:
        for _ in range(self.group.consumer.concurrency):
            self.add_task(self._work)
        self.add_task(self._pull)
        self.add_task(self._extend_deadlines)

    async def stop(self) -> None:
        await super().stop()
        while not self._queue.empty():
            with suppress(nats.errors.Error):
                await self._queue.get_nowait().nak()
        self.tasks.clear()

    def get_log_context(self, message: Any) -> dict[str, str]:
        """Return nothing: FastStream logs nothing here, and building its context costs a tenth of a message."""
        return {}

    async def retry(self, message: RetriedMessage) -> str:
        """Handle a dead letter once more, in turn with the consumer's messages; return the outcome."""
        settled = self._retries[id(message)] = asyncio.Event()
        self._queue.put_nowait(message)
        await settled.wait()
        return message.outcome

    def resume(self) -> None:
        """Go on after the dead-letter limit has stopped the consumer."""
        self.group.limit.reset()
        metrics.CONSUMER_STOPPED.labels(self.group.consumer.name).set(0)

    async def _work(self) -> None:
        while True:
            msg = await self._queue.get()
            if not self.running and not isinstance(msg, RetriedMessage):
                self._queue.put_nowait(msg)  # ``stop`` returns it to the server
                return
            try:
                if self.group.limit.is_reached and not isinstance(msg, RetriedMessage):
                    with suppress(nats.errors.Error):
                        await msg.nak()
                else:
                    await self.consume(msg)
            finally:
                self.group.deadlines.remove(msg)
                if self._retries and (settled := self._retries.pop(id(msg), None)):
                    settled.set()
                if self._pull_subscription is not None and self._credit() >= self._limit // 2:
                    self._pull_subscription.activity.set()

    async def _pull(self) -> None:
        """Keep messages requested, for as long as the subscriber runs; open a broken subscription again."""
        consumer = self.group.consumer
        while True:
            pull = PullSubscription(self.connection, consumer.stream, consumer.name, self._accept)
            try:
                await pull.open()
                self._pull_subscription = pull
                while True:
                    await self._request_messages(pull)
                    await pull.wait_for_activity(CHECK_INTERVAL_S)
            except (PullBroken, TimeoutError, nats.errors.Error, APIError, OSError) as error:
                log.info("pulling again", consumer=consumer.name, reason=repr(error))
            finally:
                self._pull_subscription = None
                await pull.unsubscribe()
            await asyncio.sleep(REOPEN_DELAY_S)

    async def _request_messages(self, pull: PullSubscription) -> None:
        if self.group.limit.is_reached:
            metrics.CONSUMER_STOPPED.labels(self.group.consumer.name).set(1)
            return
        credit = self._credit()
        if self.running and credit >= self._limit // 2:
            await pull.request(credit)

    def _credit(self) -> int:
        """Return how many more messages may be requested."""
        outstanding = self._pull_subscription.outstanding if self._pull_subscription is not None else 0
        return self._limit - len(self.group.deadlines) - outstanding

    def _accept(self, msg: Msg) -> None:
        self.group.deadlines.add(msg)
        self._queue.put_nowait(msg)

    async def _extend_deadlines(self) -> None:
        period_s = self.group.consumer.ack_wait_s * EXTEND_SHARE
        while True:
            started_s = time.monotonic()
            await self.group.deadlines.extend()
            await asyncio.sleep(max(period_s - (time.monotonic() - started_s), 0))


def add_pull_subscriber(router: NatsRouter, group: HandlerGroup) -> PullSubscriber:
    """Register a subscriber for ``group`` on a router, as ``router.subscriber`` does for FastStream's own kinds."""
    consumer, outer, filters = group.consumer, cast(NatsBrokerConfig, router.config), list(group.consumer.filters)
    calls: CallsCollection[Any] = CallsCollection()
    description = NatsSubscriberSpecificationConfig(
        subject="", queue=None, filter_subjects=filters, title_=consumer.name, description_=consumer.doc
    )
    config = NatsSubscriberConfig(
        subject="",
        sub_config=ConsumerConfig(durable_name=consumer.name, filter_subjects=filters),
        extra_options={},
        no_reply=True,
        _outer_config=outer,
        _ack_policy=AckPolicy.MANUAL,
    )
    subscriber = PullSubscriber(
        group,
        config,
        NatsSubscriberSpecification(_outer_config=outer, calls=calls, specification_config=description),
        calls,
        queue="",
        pull_sub=PullSub(batch_size=PREFETCH),
        stream=JStream(consumer.stream, declare=False),
    )
    Registrator.subscriber(router, subscriber)
    subscriber.add_call(parser_=parse_message, decoder_=decode_event, dependencies_=())
    return subscriber
