"""A gateway as a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path

import httpx

from services.gateway.settings import GatewaySettings


@asynccontextmanager
async def spawn_gateway(settings: GatewaySettings, port: int, log: Path | None = None) -> AsyncIterator[Process]:
    """Run a gateway and yield its process once its read model has caught up; ``log`` is the file that it logs into."""
    variables = {
        "TRAINBUS_NATS_URL": settings.nats_url,
        "TRAINBUS_DATA_DIR": str(settings.data_dir),
        "TRAINBUS_GATEWAY_PORT": str(port),
        "TRAINBUS_GATEWAY_DATABASE_URL": settings.database_url,
        "TRAINBUS_S3_ENDPOINT": settings.s3_endpoint or "",
    }
    command = (sys.executable, "-m", "services.gateway")
    with nullcontext() if log is None else log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **variables}, stderr=stderr)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            while True:
                with suppress(httpx.TransportError):
                    if (await http.get("/ready")).status_code == 200:
                        break
                assert process.returncode is None
                await asyncio.sleep(0.05)
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
