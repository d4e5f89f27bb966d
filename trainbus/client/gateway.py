"""A stack's gateway, opened for what its answers in JSON do not hold: files, raw data and code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from trainbus.client import connection
from trainbus.client.address import StackAddress
from trainbus.client.connection import describe_absence, gateway_url
from trainbus.client.errors import NotFoundError, StackUnreachableError, TrainbusError, UsageError

#: Seconds without a byte from the gateway: the store may be slow to put a large object together.
STALL_S = 120.0


@asynccontextmanager
async def open_gateway(address: StackAddress) -> AsyncIterator[httpx.AsyncClient]:
    """Open the HTTP interface of a stack's gateway.

    Raises:
        StackUnreachableError: no gateway is named, or it does not answer.
    """
    url = gateway_url(address)
    timeout = httpx.Timeout(STALL_S, connect=connection.CONNECT_S)
    try:
        # The CA certificates take as long to load as a short command runs.
        async with httpx.AsyncClient(base_url=url, timeout=timeout, verify=url.startswith("https:")) as http:
            yield http
    except httpx.TransportError as error:
        raise StackUnreachableError(describe_absence(httpx.URL(url), error)) from error


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
