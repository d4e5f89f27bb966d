"""The address of a stack for clients: a gateway on a test's own NATS and S3."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest import mock

from services.gateway.settings import GatewaySettings
from services.kit.settings import Settings
from tests.gateway.conftest import running
from trainbus.client import connection
from trainbus.client.address import StackAddress


@asynccontextmanager
async def serve_clients(settings: Settings) -> AsyncIterator[StackAddress]:
    """Run a gateway and yield the address of its stack. On a slow machine, too, a client is patient with it."""
    patience = mock.patch.multiple(connection, PATIENCE_S=60.0, CONNECT_S=60.0)
    with patience:
        async with running(GatewaySettings(**{**settings.model_dump(), "gateway_port": 0})) as up:
            yield StackAddress(
                nats_url=settings.nats_url,
                gateway_url=f"http://127.0.0.1:{up.service.gateway_port}",
                data_dir=settings.data_dir,
            )
