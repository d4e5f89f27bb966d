"""The handlers of a service on FastStream: one router a consumer, with the middlewares of ``middlewares.py``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

from faststream.message import StreamMessage
from faststream.nats import NatsBroker, NatsRouter

from contracts import topology
from services.kit import metrics
from services.kit.clock import Clock
from services.kit.dead_letters import DeadLetterLimit
from services.kit.messages import E, Message
from services.kit.middlewares import (
    MIDDLEWARES,
    OUTCOMES,
    HandlerGroup,
    InvalidHandler,
    RefuseRequest,
    StoreDeadLetter,
)
from services.kit.pull_subscriber import PullSubscriber, add_pull_subscriber
from services.kit.settings import Settings

Handler: TypeAlias = Callable[[Message[E]], Awaitable[None]]


class Handlers:
    """The handlers of one service instance."""

    def __init__(
        self,
        service: str,
        settings: Settings,
        clock: Clock,
        dead_letter: StoreDeadLetter,
        refuse: RefuseRequest | None = None,
    ) -> None:
        self._service, self._settings, self._clock = service, settings, clock
        self._dead_letter, self._refuse = dead_letter, refuse
        self._groups: dict[str, HandlerGroup] = {}
        self.subscribers: dict[str, PullSubscriber] = {}

    def add(
        self, consumer: topology.Consumer, event: type[E], *, on_invalid: InvalidHandler | None = None
    ) -> Callable[[Handler[E]], Handler[E]]:
        """See ``Bus.subscriber``."""
        if event not in consumer.events:
            raise ValueError(
                f"consumer {consumer.name} does not carry {event.__name__}: add it to contracts/topology.py"
            )
        if consumer.name not in self._groups:
            self._groups[consumer.name] = self._build_group(consumer)
        group = self._groups[consumer.name]
        if on_invalid is not None:
            group.on_invalid = on_invalid

        def register(handler: Handler[E]) -> Handler[E]:
            group.handlers[event.type] = handler
            return handler

        return register

    def include_in(self, broker: NatsBroker) -> None:
        """Register every handler with the broker, which delivers to them once it is started."""
        for group in self._groups.values():
            if group.consumer.name in self.subscribers:
                continue
            metrics.initialize_series(metrics.HANDLED, [group.consumer.name], group.handlers, OUTCOMES)
            metrics.CONSUMER_STOPPED.labels(group.consumer.name).set(0)
            router = NatsRouter(middlewares=[partial(middleware, group) for middleware in MIDDLEWARES])
            subscriber = add_pull_subscriber(router, group)
            for event_type, handler in group.handlers.items():
                subscriber(handler, filter=_is_of_type(event_type))
            broker.include_router(router)
            self.subscribers[group.consumer.name] = subscriber

    @property
    def streams(self) -> dict[str, str]:
        """Consumer -> its stream."""
        return {name: group.consumer.stream for name, group in self._groups.items()}

    @property
    def stopped(self) -> list[str]:
        """Names of the consumers that the dead-letter limit has stopped."""
        return [name for name, group in self._groups.items() if group.limit.is_reached]

    def _build_group(self, consumer: topology.Consumer) -> HandlerGroup:
        settings = self._settings
        limit = DeadLetterLimit(
            settings.dead_letter_max_consecutive, settings.dead_letter_max_share, settings.dead_letter_window
        )
        return HandlerGroup(
            consumer,
            self._service,
            self._clock,
            self._dead_letter,
            limit,
            duplicate=settings.inject_duplicates,
            refuse=self._refuse,
        )


def _is_of_type(event_type: str) -> Callable[[StreamMessage[Any]], Awaitable[bool]]:
    async def is_of_type(message: StreamMessage[Any]) -> bool:
        event: Message[Any] = await message.decode()  # type: ignore[assignment]
        return event.envelope.type == event_type

    return is_of_type
