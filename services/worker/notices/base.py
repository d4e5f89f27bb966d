"""What a source of notices is, and how machines' metadata are asked."""

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
#: The longest that a server which fails is left alone.
RETRY_MAX_S = 30.0


@dataclass(frozen=True, slots=True)
class Notice:
    """Somebody said that the machine will be taken away (``leave``), or may be."""

    source: str
    kind: str
    #: Seconds that are left; None where nobody says.
    grace_s: float | None = None
    detail: str = ""
    #: False: a recommendation; what runs may go on until there is a better place.
    leave: bool = True
    #: The source's own name for it.
    token: str = ""


class NoticeSource(Protocol):
    """One way in which notices come."""

    @property
    def name(self) -> str: ...

    async def applies(self) -> bool:
        """Whether notices can come this way on this machine; answers within a second or two."""
        ...

    def watch(self) -> AsyncIterator[Notice]:
        """Every notice once, for ever; what goes wrong is tried again."""
        ...

    async def acknowledge(self, notice: Notice) -> None:
        """Say that nothing runs here any more: the machine may go now."""
        ...


class MetadataServer:
    """The metadata server of the machine: at an address that no other machine can have."""

    def __init__(self, session: aiohttp.ClientSession, url: str, interval_s: float) -> None:
        """Remember where to ask.

        Raises:
            ValueError: the address is neither link-local nor loopback.
        """
        host = urlsplit(url).hostname or ""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            address = None
        if address is None or not (address.is_link_local or address.is_loopback):
            raise ValueError(f"{url!r} is no metadata server: give a link-local or loopback address")
        self._session, self._url, self.interval_s = session, url.rstrip("/"), interval_s

    async def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        json: object = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> tuple[int, str, str]:
        """(status, body, ETag).

        Raises:
            aiohttp.ClientError, TimeoutError: there was no answer.
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
    """Longer and longer pauses while a server fails; the first failure is told, not all of them."""

    def __init__(self, name: str, interval_s: float) -> None:
        self._name, self._interval_s, self._failures = name, interval_s, 0

    def worked(self) -> None:
        self._failures = 0

    async def failed(self, error: object) -> None:
        if self._failures == 0:
            log.warning("a source of notices does not answer", source=self._name, error=repr(error))
        self._failures += 1
        await asyncio.sleep(min(self._interval_s * 2**self._failures, RETRY_MAX_S))


async def poll_notices(
    name: str, interval_s: float, look: Callable[[], Awaitable[Iterable[Notice]]]
) -> AsyncIterator[Notice]:
    """Every notice that ``look`` ever finds, once; what it cannot ask or read is tried again later."""
    patience, seen = RetryBackoff(name, interval_s), set[str]()
    while True:
        found: Iterable[Notice] = ()
        try:
            found = await look()
            patience.worked()
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            await patience.failed(error)
        for notice in found:
            if notice.token not in seen:
                seen.add(notice.token)
                yield notice
        await asyncio.sleep(interval_s)
