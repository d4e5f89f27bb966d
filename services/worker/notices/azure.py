"""Azure: Scheduled Events, from the instance metadata service; an event that is acknowledged begins at once.

https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import structlog

from services.worker.notices.base import PROBE_TIMEOUT_S, MetadataServer, Notice, poll_notices

log = structlog.get_logger(__name__)

HEADERS = {"Metadata": "true"}
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
#: Events that end the runs on the machine. A freeze of seconds does not.
ENDING = {"Preempt", "Terminate", "Reboot", "Redeploy"}


class AzureSource:
    name = "azure"

    def __init__(self, metadata: MetadataServer) -> None:
        self._metadata = metadata
        self._machine = ""

    async def applies(self) -> bool:
        try:
            status, body, _ = await self._metadata.request(NAME, HEADERS, timeout_s=PROBE_TIMEOUT_S)
        except (aiohttp.ClientError, TimeoutError):
            return False
        self._machine = body.strip() if status == 200 else ""
        return status == 200

    def watch(self) -> AsyncIterator[Notice]:
        return poll_notices(self.name, self._metadata.interval_s, self._fetch)

    async def _fetch(self) -> list[Notice]:
        status, body, _ = await self._metadata.request(EVENTS, HEADERS)
        if status != 200:
            raise ValueError(f"scheduled events returned status {status}")
        return [self._notice(event) for event in json.loads(body)["Events"] if self._ends_machine(event)]

    async def acknowledge(self, notice: Notice) -> None:
        """Let the event begin at once."""
        request = {"StartRequests": [{"EventId": notice.token}]}
        try:
            await self._metadata.request(EVENTS, HEADERS, method="POST", json=request)
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("a scheduled event could not be acknowledged", event_id=notice.token, error=repr(error))

    def _ends_machine(self, event: dict[str, Any]) -> bool:
        # Each machine of a scale set gets the events of all of them.
        return event["EventType"] in ENDING and (not self._machine or self._machine in event["Resources"])

    def _notice(self, event: dict[str, Any]) -> Notice:
        not_before = event.get("NotBefore") or ""  # empty once it has begun
        grace_s = max(parsedate_to_datetime(not_before).timestamp() - time.time(), 0.0) if not_before else 0.0
        return Notice(
            self.name, event["EventType"].lower(), grace_s, event.get("Description", ""), token=event["EventId"]
        )
