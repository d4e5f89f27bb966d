"""A service process: settings, bus, health endpoints, signals and orderly shutdown."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web
from nats.aio.msg import Msg
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from contracts import subjects
from services.kit import metrics, telemetry
from services.kit.backlog import BacklogWatch
from services.kit.bus import Bus
from services.kit.clock import Clock
from services.kit.concurrency import cancel_and_wait
from services.kit.settings import Settings

if TYPE_CHECKING:
    from services.kit.store.objects import ObjectStore

log = structlog.get_logger(__name__)

#: Seconds between two measurements of the event loop's delay, and the delay that is logged.
LAG_INTERVAL_S = 0.5
LAG_WARNING_S = 1.0


class Service:
    """One service instance: a bus, background tasks, and the endpoints an operator looks at.

    ``/health`` says that the process works (liveness), ``/ready`` that it can do its job (connected,
    started, and the conditions that ``add_readiness_check`` adds), ``/metrics`` is for Prometheus.
    """

    def __init__(self, name: str, settings: Settings, clock: Clock | None = None) -> None:
        self.name = name
        self.settings = settings
        self.bus = Bus(name, settings, clock)
        self.http_port: int | None = None
        self.stopping = asyncio.Event()
        self._backlog = BacklogWatch(self.bus)
        self._background: list[Callable[[], Coroutine[Any, Any, None]]] = [self._backlog.run]
        self._resources: list[Any] = []
        self._checks: dict[str, Callable[[], bool]] = {
            "bus": lambda: self.bus.connected,
            "consumers": lambda: not self.bus.stopped_consumers,
            "backlog": lambda: not self._backlog.stuck,
        }
        self._on_stop: list[Callable[[], Awaitable[None]]] = []
        self._on_early_stop: list[Callable[[], Awaitable[None]]] = []
        self._started = False

    # -- wiring -------------------------------------------------------------

    def add_background_task(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``task`` beside the handlers. If it ends with an error the service ends with it."""
        self._background.append(task)

    def add_resource(self, manager: Any) -> Any:
        """Enter an async context manager before the handlers start and leave it after they end."""
        self._resources.append(manager)
        return manager

    def add_object_store(self, objects: ObjectStore) -> ObjectStore:
        """Use an object store: it is opened before the handlers start, and /ready says whether it answers."""
        self.add_resource(objects)
        self.add_background_task(objects.watch)
        self.add_readiness_check("object_store", lambda: objects.answers)
        return objects

    def add_readiness_check(self, name: str, check: Callable[[], bool]) -> None:
        """Add a condition to /ready."""
        self._checks[name] = check

    def add_stop_action(
        self, action: Callable[[], Awaitable[None]], *, before_start: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Run ``action`` when the service is asked to stop, while the bus still works.

        ``before_start`` is run instead if it is asked to stop before it has started, for want of a bus perhaps.
        """
        self._on_stop.append(action)
        if before_start is not None:
            self._on_early_stop.append(before_start)

    # -- life ---------------------------------------------------------------

    def main(self) -> None:
        """Run until SIGTERM or SIGINT. For ``trainbus service NAME``."""
        telemetry.set_up(self.name, self.settings)
        # What is loaded by now stays: a full collection walks through it for 0.1 s, in which no request is answered.
        gc.collect()
        gc.freeze()
        asyncio.run(self._main())

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        await self.run()

    async def run(self) -> None:
        """Run until ``stopping`` is set or a background task fails."""
        async with AsyncExitStack() as stack:
            lag = asyncio.create_task(measure_lag())
            stack.push_async_callback(cancel_and_wait, lag)
            await self._serve_http(stack)
            stop = asyncio.create_task(self.stopping.wait())
            stack.push_async_callback(cancel_and_wait, stop)
            starting = asyncio.create_task(self._start(stack))
            await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                # The server or the store is away, perhaps for hours: that must not keep the service from ending.
                await cancel_and_wait(starting)
                for action in self._on_early_stop:
                    await action()
                return
            await starting
            tasks = [
                asyncio.create_task(task(), name=getattr(task, "__name__", "task"))
                for task in [*self._background, self.bus.wait_until_lost]
            ]
            self._started = True
            log.info("service started", http_port=self.http_port)
            try:
                await self._watch(tasks, stop)
            finally:
                self._started = False
                try:
                    for action in self._on_stop:
                        await action()
                finally:
                    await cancel_and_wait(*tasks)
                log.info("service stopped")

    async def _start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.bus.close)
        await self.bus.connect()
        # Every instance answers: no queue.
        await self.bus.add_endpoint(subjects.service(self.name, subjects.PRESENCE), "", self._answer_presence)
        for resource in self._resources:
            await stack.enter_async_context(resource)
        stack.push_async_callback(self.bus.stop)
        await self.bus.start()

    async def _watch(self, tasks: list[asyncio.Task[Any]], stop: asyncio.Task[Any]) -> None:
        while not stop.done():
            done, _ = await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()  # raises what ended it
                tasks.remove(task)

    async def _answer_presence(self, message: Msg) -> None:
        """Answer ``trainbus doctor`` on the bus, as /ready does over HTTP."""
        checks = self.check_readiness()
        answer = {"instance": self.settings.instance, "ready": all(checks.values()), "checks": checks}
        await message.respond(json.dumps(answer).encode())

    # -- http ---------------------------------------------------------------

    async def _serve_http(self, stack: AsyncExitStack) -> None:
        if self.settings.http_port < 0:
            return
        app = web.Application()
        for path, answer in {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}.items():
            app.router.add_get(path, answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, self.settings.http_host, self.settings.http_port)
        await site.start()
        self.http_port = runner.addresses[0][1]

    def check_readiness(self) -> dict[str, bool]:
        """Check each condition for being ready."""
        return {"started": self._started, **{name: check() for name, check in self._checks.items()}}

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"service": self.name, "status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        checks = self.check_readiness()
        ready = all(checks.values())
        return web.json_response({"service": self.name, "ready": ready, "checks": checks}, status=200 if ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def measure_lag() -> None:
    """Measure the event loop's delay until cancelled. A delayed loop renews no lease and answers no request."""
    loop = asyncio.get_running_loop()
    while True:
        due_s, busy_s = loop.time() + LAG_INTERVAL_S, time.thread_time()
        await asyncio.sleep(LAG_INTERVAL_S)
        late_s = loop.time() - due_s
        metrics.LOOP_LAG_SECONDS.observe(late_s)
        if late_s > LAG_WARNING_S:
            # Little computing means that a call waited (most likely for a disk) or that the processors were busy.
            computed_s = round(time.thread_time() - busy_s, 3)
            log.warning("the event loop was held up", late_s=round(late_s, 3), computed_s=computed_s)
