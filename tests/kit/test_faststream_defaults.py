"""What FastStream's defaults get wrong, each shown to fail with them and to hold with the kit.

Every scenario runs twice: with a plain FastStream subscriber, where it must fail (a strict xfail,
so that we notice when FastStream changes), and with the kit's Bus.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import pytest_asyncio
from faststream.middlewares import AckPolicy
from faststream.nats import JStream, NatsBroker, PullSub
from faststream.nats.prometheus import NatsPrometheusMiddleware
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from contracts.events.run import RunCancelled
from services.kit import pull_subscriber
from services.kit.bus import Bus, Message, PoisonMessage
from services.kit.middlewares import RETRY_DELAYS_S
from services.kit.reconcile import reconcile
from services.kit.settings import Settings
from tests.kit.support import CONSUMER, OFTEN, TOPOLOGY, until
from trainbus.embedded.servers import NatsServer

Handle = Callable[[], Awaitable[None]]
BODY = b'{"run_id":"r1","reason":"x"}'
SUBJECT = RunCancelled(run_id="r1", reason="x").subject

fails_by_default = pytest.mark.parametrize(
    "side", [pytest.param("faststream", marks=pytest.mark.xfail(strict=True, reason="FastStream's default")), "kit"]
)
#: How long to wait for what FastStream's defaults never do, and for what the kit does sooner or later.
PATIENCE_S = {"faststream": 1.5, "kit": 60.0}


class World:
    """One server with the test's topology, and a handler registered the one way or the other."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bus = Bus("test", settings)
        self.brokers: list[NatsBroker] = []
        self.registry = CollectorRegistry()

    async def subscribe(self, side: str, handle: Handle, *, ack_policy: AckPolicy | None = None) -> None:
        if side == "kit":

            @self.bus.subscriber(CONSUMER, RunCancelled)
            async def on_cancelled(_: object) -> None:
                await handle()

            await self.bus.start()
            return
        broker = NatsBroker(
            self.settings.nats_servers, logger=None, middlewares=[NatsPrometheusMiddleware(registry=self.registry)]
        )
        policy = {} if ack_policy is None else {"ack_policy": ack_policy}

        @broker.subscriber(
            "run.*.*",
            stream=JStream("TEST", declare=False),
            durable=CONSUMER.name,
            pull_sub=PullSub(batch_size=1, timeout=1.0),
            **policy,
        )
        async def on_message(_: dict[str, str]) -> None:
            await handle()

        self.brokers.append(broker)
        await broker.start()


@pytest_asyncio.fixture
async def world(settings: Settings) -> AsyncIterator[World]:
    made = World(settings)
    await made.bus.connect(reconcile_topology=False)
    await reconcile(made.bus.js, TOPOLOGY)
    yield made
    for broker in made.brokers:
        await broker.stop()
    await made.bus.close()


@fails_by_default
async def test_an_exception_does_not_lose_the_event(world: World, side: str) -> None:
    calls = 0

    async def handle() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a passing trouble")

    await world.subscribe(side, handle)
    await world.bus.js.publish(SUBJECT, BODY)
    await until(lambda: calls == 2, "a second delivery", PATIENCE_S[side])


@fails_by_default
async def test_a_bad_message_is_not_redelivered_at_once(world: World, side: str) -> None:
    at_s: list[float] = []

    async def handle() -> None:
        at_s.append(time.monotonic())
        raise RuntimeError("always")

    await world.subscribe(side, handle, ack_policy=AckPolicy.NACK_ON_ERROR)
    await world.bus.js.publish(SUBJECT, BODY)
    await until(lambda: len(at_s) >= 3, "three deliveries", PATIENCE_S[side])
    # The server keeps each back for its delay, however slow the machine is.
    assert at_s[1] - at_s[0] > 0.9 * RETRY_DELAYS_S[0]
    assert at_s[2] - at_s[1] > 0.9 * RETRY_DELAYS_S[1]


@fails_by_default
async def test_what_cannot_be_handled_is_kept_with_its_reason(world: World, side: str) -> None:
    async def handle() -> None:
        raise PoisonMessage("no such run: check run_id")

    await world.subscribe(side, handle)
    await world.bus.js.publish(SUBJECT, BODY)

    async def kept() -> bool:
        return (await world.bus.js.stream_info("DEAD_LETTERS")).state.messages == 1

    await until(kept, "a dead letter", PATIENCE_S[side])
    letter = await world.bus.js.get_last_msg("DEAD_LETTERS", "dead.>")
    assert letter.data == BODY
    assert letter.headers["trainbus-dead-reason"] == "no such run: check run_id"
    assert letter.headers["trainbus-dead-subject"] == SUBJECT


@fails_by_default
async def test_a_body_that_is_no_json_is_kept_with_its_reason(world: World, side: str) -> None:
    async def handle() -> None:
        raise AssertionError("must not be called")

    await world.subscribe(side, handle)
    await world.bus.js.publish(SUBJECT, b"{nonsense")

    async def kept() -> bool:
        return (await world.bus.js.stream_info("DEAD_LETTERS")).state.messages == 1

    await until(kept, "a dead letter", PATIENCE_S[side])


@fails_by_default
async def test_a_long_handler_keeps_its_message(world: World, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_subscriber, "EXTEND_SHARE", OFTEN)
    calls = 0
    release = asyncio.Event()

    async def handle() -> None:
        nonlocal calls
        calls += 1
        await release.wait()

    await world.subscribe(side, handle)
    await world.bus.js.publish(SUBJECT, BODY)
    await until(lambda: calls == 1, "the first delivery")
    # A second subscriber would get the message as soon as the server takes the first one for dead.
    other = await world.bus.js.pull_subscribe_bind(consumer=CONSUMER.name, stream="TEST")
    stolen = []
    with suppress(TimeoutError):
        stolen = await other.fetch(1, timeout=CONSUMER.ack_wait_s * 2)
    await other.unsubscribe()
    release.set()
    assert stolen == []


@fails_by_default
async def test_an_operators_limits_are_kept(world: World, side: str) -> None:
    have = (await world.bus.js.stream_info("TEST")).config
    await world.bus.js.update_stream(replace(have, max_bytes=5_000_000, max_age=3600.0))
    if side == "kit":
        await reconcile(world.bus.js, TOPOLOGY)
    else:
        broker = NatsBroker(world.settings.nats_servers, logger=None)
        broker.subscriber("run.*.*", stream=JStream("TEST", subjects=["run.*.*"]), durable="other", pull_sub=PullSub())(
            lambda _: None
        )
        world.brokers.append(broker)
        await broker.start()
    now = (await world.bus.js.stream_info("TEST")).config
    assert (now.max_bytes, now.max_age) == (5_000_000, 3600.0)


@fails_by_default
async def test_metric_labels_are_bounded(world: World, side: str) -> None:
    calls = 0

    async def handle() -> None:
        nonlocal calls
        calls += 1

    await world.subscribe(side, handle)
    for number in range(30):
        await world.bus.js.publish(f"run.m{number}.cancelled", BODY.replace(b"r1", b"m%d" % number))
    await until(lambda: calls == 30, "all messages")
    registry = REGISTRY if side == "kit" else world.registry
    assert b"m29" not in generate_latest(registry)


@fails_by_default
async def test_the_client_never_stops_reconnecting(world: World, side: str) -> None:
    broker = world.bus.broker if side == "kit" else NatsBroker(world.settings.nats_servers, logger=None)
    if side == "faststream":
        world.brokers.append(broker)
    connection = await broker.connect()
    assert connection.options["max_reconnect_attempts"] < 0


async def test_a_restart_of_the_server_loses_nothing(world: World, nats_server: NatsServer) -> None:
    seen: list[str] = []

    @world.bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(message: object) -> None:
        seen.append(message.event.run_id)  # type: ignore[attr-defined]

    await world.bus.start()
    await world.bus.publish(RunCancelled(run_id="before", reason="x"))
    await until(lambda: seen == ["before"], "the first event")
    nats_server.kill()
    publishing = asyncio.create_task(world.bus.publish(RunCancelled(run_id="during", reason="x")))
    nats_server.start()
    await publishing
    await world.bus.publish(RunCancelled(run_id="after", reason="x"))
    await until(lambda: set(seen) == {"before", "during", "after"}, "all events")


async def test_shutting_down_lets_a_running_handler_finish(world: World) -> None:
    entered, release, finished = asyncio.Event(), asyncio.Event(), []

    @world.bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(_: object) -> None:
        entered.set()
        await release.wait()
        finished.append(1)

    await world.bus.start()
    await world.bus.publish(RunCancelled(run_id="r1", reason="x"))
    await entered.wait()
    asyncio.get_running_loop().call_soon(release.set)  # while the bus closes
    await world.bus.close()
    assert finished == [1]


async def test_given_up_after_max_deliver(world: World) -> None:
    @world.bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(_: object) -> None:
        raise RuntimeError("always")

    await world.bus.start()
    await world.bus.publish(RunCancelled(run_id="r1", reason="x"))

    async def kept() -> bool:
        return (await world.bus.js.stream_info("DEAD_LETTERS")).state.messages == 1

    await until(kept, "a dead letter")
    letter = await world.bus.js.get_last_msg("DEAD_LETTERS", "dead.>")
    given_up = re.search(r"given up after (\d+) deliveries", letter.headers["trainbus-dead-reason"])
    assert given_up is not None
    # A process that stands still for longer than ack_wait is sent a message once more than it tries it.
    assert int(given_up[1]) >= CONSUMER.max_deliver


async def test_the_fault_that_delivers_everything_twice_does(world: World) -> None:
    """The end-to-end tests rely on this fault injection: here it is seen to work."""
    bus = Bus("twice", world.settings.model_copy(update={"inject_duplicates": True}))
    await bus.connect(reconcile_topology=False)
    seen: list[int] = []

    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(message: Message[RunCancelled]) -> None:
        seen.append(message.deliveries)

    await bus.start()
    await bus.publish(RunCancelled(run_id="r1", reason="x"))
    await until(lambda: seen == [1, 2], "both deliveries")
    assert (await bus.js.stream_info("TEST")).state.messages == 1, "the server stores one of the two"
    await bus.close()
