"""Notices that a machine will be taken away: their sources, and the metadata server that some of them poll."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
import structlog

log = structlog.get_logger(__name__)

PROBE_TIMEOUT_S = 1.0
REQUEST_TIMEOUT_S = 5.0
#: The longest pause between two requests to a server that fails.
RETRY_MAX_S = 30.0


@dataclass(frozen=True, slots=True)
class Notice:
    """The machine will be taken away (``leave``), or may be."""

    source: str
    kind: str
    #: Seconds until then; None if the source gives none.
    grace_s: float | None = None
    detail: str = ""
    #: False: a recommendation; runs go on until there is a better place.
    leave: bool = True
    #: The source's own id of the notice.
    token: str = ""


class NoticeSource(Protocol):
    """One origin of notices."""

    @property
    def name(self) -> str: ...

    async def applies(self) -> bool:
        """Whether this source exists on this machine; takes a second or two at most."""
        ...

    def watch(self) -> AsyncIterator[Notice]:
        """Yield every notice once, for ever; errors are retried."""
        ...

    async def acknowledge(self, notice: Notice) -> None:
        """Tell the source that no run is left on the machine."""
        ...


class MetadataServer:
    """The metadata server of the machine, at a link-local or loopback address."""

    def __init__(self, session: aiohttp.ClientSession, url: str, interval_s: float) -> None:
        """Check the address.

        Raises:
            ValueError: the address is neither link-local nor loopback.
        """
        host = urlsplit(url).hostname or ""
        try:
            address = ipaddress.ip_address(host)
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


async def poll_notices(
    name: str, interval_s: float, fetch: Callable[[], Awaitable[Iterable[Notice]]]
) -> AsyncIterator[Notice]:
    """Yield every notice that ``fetch`` ever returns, once; its errors are retried."""
    backoff, seen = RetryBackoff(name, interval_s), set[str]()
    while True:
        found: Iterable[Notice] = ()
        try:
            found = await fetch()
            backoff.reset()
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            await backoff.pause(error)
        for notice in found:
            if notice.token not in seen:
                seen.add(notice.token)
                yield notice
        await asyncio.sleep(interval_s)
