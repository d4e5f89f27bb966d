"""The serving service: follows promotions, deploys models, and answers requests for predictions."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.metadata
import os
from typing import Any

import structlog

from contracts import topology
from contracts.events.run import RunAccepted
from contracts.ranks import INHERITED
from services.kit.bus import Message
from services.kit.concurrency import cancel_and_wait
from services.kit.http_server import serve_http
from services.kit.packages.package_environment import PackageEnvironments
from services.kit.service import Service
from services.kit.settings import Settings
from services.kit.socket_files import socket_path
from services.kit.store.objects import ObjectStore
from services.kit.warm_server import WarmServer
from services.serving.admission import ServerLoad
from services.serving.api import build_api
from services.serving.core.versions import FOLDED
from services.serving.deployer import DeploymentParts, ModelDeployer
from services.serving.devices import DevicePool
from services.serving.early_refusal import AdmissionMiddleware, RefusingProtocol
from services.serving.environments import ModelEnvironments
from services.serving.fetcher import ModelFetcher
from services.serving.instance_id import load_instance_id
from services.serving.process import PYTHON_ROOT
from services.serving.router import Router
from services.serving.settings import ServingSettings
from services.serving.version_start import VersionStart

log = structlog.get_logger(__name__)

#: How long open requests may take to end when the service stops.
GRACE_S = 5
#: Objects, and collections of each younger generation, until the next one.
GC_THRESHOLDS = (50_000, 20, 50)


class ServingService(Service):
    """A service with an HTTP interface of its own; ``serving_port`` is where it listens once it is ready."""

    serving_port: int | None = None


class Deployments:
    """A deployer for each model, and the facts that they need."""

    def __init__(self, service: Service, parts: DeploymentParts) -> None:
        self._bus, self._parts = service.bus, parts
        self._deployers: dict[str, ModelDeployer] = {}
        self._helpers: list[asyncio.Task[None]] = []
        self.is_folded = False

    async def run(self) -> None:
        """Fold the facts about models as they come, and deploy, until cancelled."""
        # Facts that come while the history is read are folded twice, which changes nothing.
        start = await self._bus.get_last_sequence(">") + 1
        history = await self._bus.read_history(*(event.subject_filter() for event in FOLDED))
        try:
            async with asyncio.TaskGroup() as group:
                for message in history:
                    self._apply(message)
                for deployer in self._deployers.values():
                    group.create_task(deployer.run())
                self.is_folded = True
                filters = (*(event.subject_filter() for event in FOLDED), RunAccepted.subject_filter())
                async for batch in self._bus.follow(topology.FACTS.name, filters, start):
                    for message in batch:
                        if (deployer_of_new := self._apply(message)) is not None:
                            group.create_task(deployer_of_new.run())
        finally:
            await cancel_and_wait(*self._helpers)
            await self._parts.start.warm_server.close()

    def _apply(self, message: Message[Any]) -> ModelDeployer | None:
        """Fold a fact; return the deployer of a model that is new."""
        event = message.event
        if isinstance(event, RunAccepted):
            # Who trains for a model will want it served: by then these are ready.
            if event.spec.model is not None and self._is_wanted(event.spec.model):
                self._start_helpers()
            return None
        if not self._is_wanted(event.model):
            return None
        self._start_helpers()
        known = self._deployers.get(event.model)
        deployer = known or ModelDeployer(event.model, self._parts)
        self._deployers[event.model] = deployer
        deployer.apply(message)
        return None if known else deployer

    def _is_wanted(self, model: str) -> bool:
        wanted = self._parts.settings.serving_models
        return not wanted or model in wanted

    def _start_helpers(self) -> None:
        """Start the processes that fetch models and fork theirs, once some model is to be served."""
        if not self._helpers:
            start = self._parts.start
            start.warm_server.expect()
            self._helpers = [asyncio.create_task(each.run()) for each in (start.fetcher, start.warm_server)]


def build(settings: Settings) -> ServingService:
    """Return the service, ready to run."""
    own = ServingSettings.of(settings)
    service = ServingService("serving", own)
    objects = service.add_object_store(ObjectStore(own))
    router = Router(own.serving_timeout_s, ServerLoad(own.serving_max_queue, own.serving_max_wait_s))
    parts = DeploymentParts(
        settings=own,
        router=router,
        start=VersionStart(
            own, ModelFetcher(own), _environments(own, objects), _warm_server(own), DevicePool(own.devices)
        ),
        clock=service.bus.clock,
        publish=service.bus.publish,
        instance=load_instance_id(own.data_dir.resolve()),
    )
    deployments = Deployments(service, parts)
    service.add_readiness_check("folded", lambda: deployments.is_folded)
    service.add_background_task(deployments.run)
    _serve(service, own, router, deployments)
    return service


def _environments(settings: ServingSettings, objects: ObjectStore) -> ModelEnvironments:
    folder = settings.data_dir.resolve()
    packages = PackageEnvironments(
        folder / "packages",
        folder / "models",
        objects,
        settings.bucket_code,
        max_bytes=settings.serving_packages_max_bytes,
        timeout_s=settings.serving_packages_timeout_s,
        may_build=settings.serving_packages_build,
    )
    return ModelEnvironments(packages)


def _warm_server(settings: ServingSettings) -> WarmServer:
    folder = settings.data_dir.resolve()
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environment |= {"PYTHONPATH": str(PYTHON_ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return WarmServer(socket_path(folder, "warm.sock"), folder / "warm.log", environment)


def _serve(service: ServingService, settings: ServingSettings, router: Router, deployments: Deployments) -> None:
    def report_port(port: int | None) -> None:
        service.serving_port = port
        if port is not None:
            # What is here now stays: a collection that walks through it would hold up requests.
            gc.collect()
            gc.freeze()
            # Of what comes later most are open requests. With the default, which walks through them for every 70,000
            # objects that are made, half of the server's time goes there once some hundred requests wait.
            gc.set_threshold(*GC_THRESHOLDS)

    version, max_body_bytes = importlib.metadata.version("trainbus"), settings.serving_max_body_bytes
    api = build_api(router, version, max_body_bytes, lambda: deployments.is_folded)
    serve_http(
        service,
        AdmissionMiddleware(api, router),
        settings.serving_host,
        settings.serving_port,
        grace_s=GRACE_S,
        report_port=report_port,
        protocol=functools.partial(RefusingProtocol, router=router),
    )
