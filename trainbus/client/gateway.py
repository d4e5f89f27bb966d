"""A stack's gateway, opened for what its answers in JSON do not hold: files, raw data and code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from trainbus.client import connection
from trainbus.client.address import StackAddress
from trainbus.client.connection import check_answer, describe_absence, gateway_url
from trainbus.client.errors import StackUnreachableError

#: Seconds without a byte more after which a download is given up, the gateway may be restarting; and between attempts.
PATIENCE_S, RETRY_S = 20.0, 0.2
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


async def download(http: httpx.AsyncClient, path: str, target: Path) -> None:
    """Write what the gateway sends; a connection that breaks is made again and goes on where it was.

    Raises:
        TrainbusError: the gateway refuses, as ``check_answer`` says.
        StackUnreachableError: it sends nothing more.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    deadline, etag = time.monotonic() + PATIENCE_S, ""
    with target.open("wb") as file:
        while True:
            begin = file.tell()
            headers = {"Range": f"bytes={begin}-"} if begin else {}
            try:
                async with http.stream("GET", path, headers=headers) as response:
                    if response.status_code >= 400:
                        await response.aread()
                        check_answer(response)
                    if begin and (response.status_code != 206 or response.headers.get("ETag", "") != etag):
                        file.seek(0)
                        file.truncate()
                    etag = response.headers.get("ETag", "")
                    async for block in response.aiter_bytes():
                        await asyncio.to_thread(file.write, block)
                return
            except httpx.TransportError as error:
                if file.tell() > begin:
                    deadline = time.monotonic() + PATIENCE_S
                elif time.monotonic() > deadline:
                    raise StackUnreachableError(
                        f"the gateway at {http.base_url} breaks off while it sends {path}: {error!r}"
                    ) from error
                await asyncio.sleep(RETRY_S)
