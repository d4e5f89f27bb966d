"""Where MLflow's pages are served."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

from services.gateway.settings import GatewaySettings

#: Seconds that a server on this machine gets to accept a connection.
PROBE_TIMEOUT_S = 1.0


async def find_mlflow_url(settings: GatewaySettings) -> str | None:
    """Return where browsers reach MLflow's pages, or None if nobody serves them."""
    if settings.mlflow_url is not None:
        return settings.mlflow_url.rstrip("/")
    try:
        url = settings.mlflow_url_file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    # A `trainbus ui` that was killed leaves its file behind.
    return url if await _is_served(url) else None


async def _is_served(url: str) -> bool:
    try:
        address = urlsplit(url)
        if address.scheme != "http" or address.hostname is None or address.port is None:
            return False
        _, writer = await asyncio.wait_for(asyncio.open_connection(address.hostname, address.port), PROBE_TIMEOUT_S)
    except (OSError, ValueError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
