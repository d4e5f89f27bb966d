"""Notices of the clouds EC2, Compute Engine and Azure, from the metadata server that each gives its machines."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import structlog

from services.kit.concurrency import cancel_and_wait
from services.worker.notices.notice import Notice, NoticeSource

log = structlog.get_logger(__name__)

PROBE_TIMEOUT_S = 1.0
REQUEST_TIMEOUT_S = 5.0
#: The longest pause between two requests to a server that fails.
RETRY_MAX_S = 30.0

EC2_TOKEN_TTL_S = 21_600
EC2_ACTION = "/latest/meta-data/spot/instance-action"
EC2_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

GCP_HEADERS = {"Metadata-Flavor": "Google"}
GCP_INSTANCE = "/computeMetadata/v1/instance/"
#: Kind and least seconds of what a changed value announces; other values (NONE, FALSE, live migrations) end nothing.
GCP_NOTICES = {
    "TRUE": ("preempted", 30.0, ""),
    "TERMINATE_ON_HOST_MAINTENANCE": ("maintenance", 60.0, "the host is maintained"),
}
#: Seconds that the server holds a request for a change.
GCP_HELD_S = 60

AZURE_HEADERS = {"Metadata": "true"}
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
#: Events that end the runs on the machine. A freeze of seconds does not.
AZURE_ENDING = {"Preempt", "Terminate", "Reboot", "Redeploy"}


class MetadataServer:
    """The metadata server of the machine, at a link-local or loopback address."""

    def __init__(self, session: aiohttp.ClientSession, url: str, interval_s: float) -> None:
        """Check the address.

        Raises:
            ValueError: the address is neither link-local nor loopback.
        """
        try:
            address = ipaddress.ip_address(urlsplit(url).hostname or "")
        except ValueError:
            address = None
        if address is None or not (address.is_link_local or address.is_loopback):
            raise ValueError(f"{url!r} is not a metadata server: give a link-local or loopback address")
        self._session, self._url, self.interval_s = session, url.rstrip("/"), interval_s

    async def request(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        json: object = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> tuple[int, str, str]:
        """Send a request; return (status, body, ETag).

        Raises:
            aiohttp.ClientError, TimeoutError: the server does not answer.
        """
        async with self._session.request(
            method,
            self._url + path,
            headers=dict(headers),
            json=json,
            timeout=aiohttp.ClientTimeout(timeout_s),
            allow_redirects=False,
        ) as answer:
            return answer.status, await answer.text(), answer.headers.get("ETag", "")


class RetryBackoff:
    """Exponential pauses while a server fails; only the first failure is logged."""

    def __init__(self, name: str, interval_s: float) -> None:
        self._name, self._interval_s, self._failures = name, interval_s, 0

    def reset(self) -> None:
        """Note that the server has answered."""
        self._failures = 0

    async def pause(self, error: object) -> None:
        """Pause after a failure, longer each time."""
        if self._failures == 0:
            log.warning("a source of notices does not answer", source=self._name, error=repr(error))
        self._failures += 1
        await asyncio.sleep(min(self._interval_s * 2**self._failures, RETRY_MAX_S))


class CloudSource(NoticeSource):
    """A cloud whose metadata server is polled."""

    def __init__(self, metadata: MetadataServer) -> None:
        self._metadata = metadata

    async def applies(self) -> bool:
        try:
            return await self._probe()
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def watch(self) -> AsyncIterator[Notice]:
        backoff, seen = RetryBackoff(self.name, self._metadata.interval_s), set[str]()
        while True:
            found: Iterable[Notice] = ()
            try:
                found = await self._fetch()
                backoff.reset()
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
                await backoff.pause(error)
            for notice in found:
                if notice.token not in seen:
                    seen.add(notice.token)
                    yield notice
            await asyncio.sleep(self._metadata.interval_s)

    @abstractmethod
    async def _probe(self) -> bool:
        """Return whether the server is this cloud's."""

    async def _fetch(self) -> Iterable[Notice]:
        """Return the notices that the server has now."""
        return ()


class Ec2Source(CloudSource):
    """EC2: spot interruptions and rebalance recommendations, from the instance metadata service (IMDSv2).

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
    .../rebalance-recommendations.html
    """

    name = "ec2"
    _token = ""

    async def _probe(self) -> bool:
        await self._renew_token(PROBE_TIMEOUT_S)
        return bool(self._token)

    async def _fetch(self) -> list[Notice]:
        found = []
        if body := await self._get(EC2_ACTION):
            action = json.loads(body)
            grace_s = max(datetime.fromisoformat(action["time"]).timestamp() - time.time(), 0.0)
            found.append(Notice(self.name, action["action"], grace_s, f"at {action['time']}", token=body))
        if await self._get(EC2_REBALANCE):
            detail = "an interruption is likely"
            found.append(Notice(self.name, "rebalance", None, detail, leave=False, token="rebalance"))
        return found

    async def _get(self, path: str) -> str:
        """Return the document; '' while there is none."""
        for _ in range(2):
            status, body, _ = await self._metadata.request(path, {"X-aws-ec2-metadata-token": self._token})
            if status == 401:  # the token has expired
                await self._renew_token()
                continue
            if status not in (200, 404):
                raise ValueError(f"{path} returned status {status}")
            return body if status == 200 else ""
        raise ValueError("the metadata service accepts no token")

    async def _renew_token(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(EC2_TOKEN_TTL_S)}
        status, body, _ = await self._metadata.request("/latest/api/token", headers, method="PUT", timeout_s=timeout_s)
        self._token = body if status == 200 else ""


class GcpSource(CloudSource):
    """Google Compute Engine: preemption and host maintenance, from the metadata server, which holds requests.

    https://cloud.google.com/compute/docs/instances/create-use-preemptible#determine_if_an_instance_was_preempted and
    https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
    """

    name = "gcp"

    async def _probe(self) -> bool:
        path = GCP_INSTANCE + "preempted"
        return (await self._metadata.request(path, GCP_HEADERS, timeout_s=PROBE_TIMEOUT_S))[0] == 200

    async def watch(self) -> AsyncIterator[Notice]:
        found: asyncio.Queue[Notice] = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(name, found)) for name in ("preempted", "maintenance-event")]
        try:
            while True:
                yield await found.get()
        finally:
            await cancel_and_wait(*tasks)

    async def _follow(self, name: str, found: asyncio.Queue[Notice]) -> None:
        """Queue a notice each time that the value changes to one that ends the machine."""
        backoff, etag, before = RetryBackoff(self.name, self._metadata.interval_s), "", ""
        while True:
            wait = f"?wait_for_change=true&timeout_sec={GCP_HELD_S}&last_etag={etag}" if etag else ""
            try:
                status, body, etag = await self._metadata.request(
                    GCP_INSTANCE + name + wait, GCP_HEADERS, timeout_s=GCP_HELD_S + REQUEST_TIMEOUT_S
                )
            except (aiohttp.ClientError, TimeoutError) as error:
                await backoff.pause(error)
                continue
            if status != 200:
                await backoff.pause(f"{name} returned status {status}")
                continue
            backoff.reset()
            if body != before and (notice := GCP_NOTICES.get(body.strip())) is not None:
                found.put_nowait(Notice(self.name, *notice))
            before = body
            if not etag:
                await asyncio.sleep(self._metadata.interval_s)


class AzureSource(CloudSource):
    """Azure: Scheduled Events, from the instance metadata service; an event that is acknowledged begins at once.

    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """

    name = "azure"
    _machine = ""

    async def _probe(self) -> bool:
        status, body, _ = await self._metadata.request(AZURE_NAME, AZURE_HEADERS, timeout_s=PROBE_TIMEOUT_S)
        self._machine = body.strip() if status == 200 else ""
        return status == 200

    async def _fetch(self) -> list[Notice]:
        status, body, _ = await self._metadata.request(AZURE_EVENTS, AZURE_HEADERS)
        if status != 200:
            raise ValueError(f"scheduled events returned status {status}")
        return [self._notice(event) for event in json.loads(body)["Events"] if self._ends_machine(event)]

    async def acknowledge(self, notice: Notice) -> None:
        """Start the event at once."""
        request = {"StartRequests": [{"EventId": notice.token}]}
        try:
            await self._metadata.request(AZURE_EVENTS, AZURE_HEADERS, method="POST", json=request)
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("a scheduled event could not be acknowledged", event_id=notice.token, error=repr(error))

    def _ends_machine(self, event: dict[str, Any]) -> bool:
        # Each machine of a scale set gets the events of all of them.
        return event["EventType"] in AZURE_ENDING and (not self._machine or self._machine in event["Resources"])

    def _notice(self, event: dict[str, Any]) -> Notice:
        not_before = event.get("NotBefore") or ""  # empty once it has begun
        grace_s = max(parsedate_to_datetime(not_before).timestamp() - time.time(), 0.0) if not_before else 0.0
        return Notice(
            self.name, event["EventType"].lower(), grace_s, event.get("Description", ""), token=event["EventId"]
        )
