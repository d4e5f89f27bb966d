"""The gateway service: the projection of the streams, and the HTTP interface in front of it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import structlog

from contracts import topology
from services.gateway.api import build_api
from services.gateway.files import RunFiles
from services.gateway.gauges import watch_nats_store, watch_read_model, watch_server
from services.gateway.projection import STREAMS, Projection
from services.gateway.settings import GatewaySettings
from services.gateway.store import ForeignSchema, Store
from services.kit.http_server import serve_http
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
    if (monitor_url := own.nats_monitor_url) is not None:
        service.add_background_task(lambda: watch_nats_store(monitor_url))
    service.add_background_task(lambda: _prune(store))
    _serve(service, own, projection, files)
    return service


def _serve(service: Gateway, settings: GatewaySettings, projection: Projection, files: RunFiles) -> None:
    def report_port(port: int | None) -> None:
        service.gateway_port = port

    api = build_api(service, projection, files, settings)
    serve_http(service, api, settings.gateway_host, settings.gateway_port, grace_s=GRACE_S, report_port=report_port)


async def _prune(store: Store) -> None:
    """Drop points that the stream no longer holds either, so that the read model stays bounded."""
    keep_s = topology.PROGRESS.max_age_s or float("inf")
    while True:
        deleted = 0
        with suppress(ForeignSchema):
            deleted = await store.prune_points(time.time() - keep_s)
        if deleted:
            log.info("points pruned", deleted=deleted)
        await asyncio.sleep(PRUNE_EVERY_S)
