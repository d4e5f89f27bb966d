"""The gateway service: the projection of the streams, and the HTTP interface in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import structlog
import uvicorn

from contracts import topology
from services.gateway.api import build_api
from services.gateway.files import RunFiles
from services.gateway.gauges import watch_read_model, watch_server
from services.gateway.projection import STREAMS, Projection
from services.gateway.settings import GatewaySettings
from services.gateway.store import Store
from services.kit.listener import open_listener
from services.kit.service import Service
from services.kit.settings import Settings

log = structlog.get_logger(__name__)

#: How often old points are pruned.
PRUNE_EVERY_S = 3600.0
#: How long open requests may take to end when the service stops.
GRACE_S = 3


class Gateway(Service):
    """A service with an HTTP interface of its own; ``gateway_port`` is where it listens once it is ready."""

    gateway_port: int | None = None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The service's frame handles signals.
        yield


def build(settings: Settings) -> Gateway:
    """The gateway, ready to run."""
    own = GatewaySettings.of(settings)
    service = Gateway("gateway", own)
    store = service.add_resource(Store(own.database_url))
    projection = Projection(service.bus, store)
    files = service.add_resource(RunFiles(own))
    service.add_readiness_check("projection", lambda: projection.ready)

    async def project() -> None:
        await projection.adopt()
        async with asyncio.TaskGroup() as group:
            for stream in STREAMS:
                group.create_task(projection.run(stream), name=f"project {stream}")

    service.add_background_task(project)
    service.add_background_task(lambda: watch_read_model(store))
    service.add_background_task(lambda: watch_server(service.bus))
    service.add_background_task(lambda: _prune(store))
    _serve(service, own, projection, files)
    return service


def _serve(service: Gateway, settings: GatewaySettings, projection: Projection, files: RunFiles) -> None:
    config = uvicorn.Config(
        build_api(service, projection, files, settings),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
    )
    server = _Server(config)
    ended = asyncio.Event()

    async def serve() -> None:
        # The service opens the socket, so that a port in use ends it with an error that names the port.
        listener = open_listener(settings.gateway_host, settings.gateway_port)
        service.gateway_port = listener.getsockname()[1]
        log.info("gateway listens", url=f"http://{settings.gateway_host}:{service.gateway_port}")
        try:
            await server.serve(sockets=[listener])
        finally:
            listener.close()
            service.gateway_port = None
            ended.set()

    async def stop() -> None:
        server.should_exit = True
        if service.gateway_port is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), GRACE_S + 2)

    service.add_background_task(serve)
    service.add_stop_action(stop)


async def _prune(store: Store) -> None:
    """Drop points that the stream no longer holds either, so that the read model stays bounded."""
    keep_s = topology.PROGRESS.max_age_s or float("inf")
    while True:
        deleted = await store.prune_points(time.time() - keep_s)
        if deleted:
            log.info("points pruned", deleted=deleted)
        await asyncio.sleep(PRUNE_EVERY_S)
