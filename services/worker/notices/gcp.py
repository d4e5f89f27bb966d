"""Google Compute Engine: preemption and host maintenance, from the metadata server, which holds requests.

https://cloud.google.com/compute/docs/instances/create-use-preemptible#determine_if_an_instance_was_preempted and
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp

from services.kit.concurrency import cancel_and_wait
from services.worker.notices.base import PROBE_TIMEOUT_S, MetadataServer, Notice, RetryBackoff

HEADERS = {"Metadata-Flavor": "Google"}
INSTANCE = "/computeMetadata/v1/instance/"
#: Seconds that a preempted machine has.
PREEMPTION_GRACE_S = 30.0
#: Seconds that a machine which cannot be migrated has before maintenance, at the least.
MAINTENANCE_GRACE_S = 60.0
#: Seconds that the server holds a request for a change.
HELD_S = 60


class GcpSource:
    name = "gcp"

    def __init__(self, metadata: MetadataServer) -> None:
        self._metadata = metadata

    async def applies(self) -> bool:
        try:
            status, _, _ = await self._metadata.request(INSTANCE + "preempted", HEADERS, timeout_s=PROBE_TIMEOUT_S)
        except (aiohttp.ClientError, TimeoutError):
            return False
        return status == 200

    async def watch(self) -> AsyncIterator[Notice]:
        found: asyncio.Queue[Notice] = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(name, found)) for name in ("preempted", "maintenance-event")]
        try:
            while True:
                yield await found.get()
        finally:
            await cancel_and_wait(*tasks)

    async def acknowledge(self, notice: Notice) -> None:
        """Compute Engine expects no acknowledgement."""

    async def _follow(self, name: str, found: asyncio.Queue[Notice]) -> None:
        """Queue a notice each time that the value changes to one that ends the machine."""
        backoff, etag, before = RetryBackoff(self.name, self._metadata.interval_s), "", ""
        while True:
            wait = f"?wait_for_change=true&timeout_sec={HELD_S}&last_etag={etag}" if etag else ""
            try:
                status, body, etag = await self._metadata.request(
                    INSTANCE + name + wait, HEADERS, timeout_s=HELD_S + PROBE_TIMEOUT_S * 5
                )
            except (aiohttp.ClientError, TimeoutError) as error:
                await backoff.pause(error)
                continue
            if status != 200:
                await backoff.pause(f"{name} returned status {status}")
                continue
            backoff.reset()
            if body != before and (notice := self._to_notice(body.strip())) is not None:
                found.put_nowait(notice)
            before = body
            if not etag:
                await asyncio.sleep(self._metadata.interval_s)

    def _to_notice(self, value: str) -> Notice | None:
        match value:
            case "TRUE":
                return Notice(self.name, "preempted", PREEMPTION_GRACE_S)
            case "TERMINATE_ON_HOST_MAINTENANCE":
                return Notice(self.name, "maintenance", MAINTENANCE_GRACE_S, "the host is maintained")
            case _:  # NONE, FALSE, and live migrations
                return None
