"""A stack's gateway, opened for what its answers in JSON do not hold: files, raw data and code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from trainbus.client.address import StackAddress
from trainbus.client.errors import NotFoundError, StackUnreachableError, TrainbusError, UsageError

#: Seconds to connect to the gateway, and without a byte from it: the store may be slow to put a large object together.
CONNECT_S, STALL_S = 3.0, 120.0


@asynccontextmanager
async def open_gateway(address: StackAddress) -> AsyncIterator[httpx.AsyncClient]:
    """Open the HTTP interface of a stack's gateway.

    Raises:
        StackUnreachableError: no gateway is named, or it does not answer.
    """
    url = address.gateway_url
    if not url:
        raise StackUnreachableError("no gateway is named: set TRAINBUS_GATEWAY_URL to its address, http://host:port")
    timeout = httpx.Timeout(STALL_S, connect=CONNECT_S)
    try:
        # The CA certificates take as long to load as a short command runs.
        async with httpx.AsyncClient(base_url=url, timeout=timeout, verify=url.startswith("https:")) as http:
            yield http
    except httpx.TransportError as error:
        raise StackUnreachableError(f"the gateway at {url} does not answer: {error!r} (`trainbus doctor`)") from error


def check_answer(answer: httpx.Response) -> None:
    """Raise the gateway's own words if it has refused.

    Raises:
        NotFoundError: there is no such thing.
        UsageError: what was sent is not valid.
        StackUnreachableError: the object store does not answer.
        TrainbusError: it refuses for another reason.
    """
    if answer.is_success:
        return
    kinds = {404: NotFoundError, 413: UsageError, 415: UsageError, 422: UsageError, 503: StackUnreachableError}
    kind = kinds.get(answer.status_code, TrainbusError)
    raise kind(f"the gateway answers {answer.status_code}: {describe_refusal(answer)}")


def describe_refusal(answer: httpx.Response) -> str:
    """Return why the gateway has refused, in its own words."""
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
