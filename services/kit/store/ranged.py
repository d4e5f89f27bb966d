"""Large objects into files: ranges side by side, each taken up where it broke, hashed as they come.

A connection on which nothing comes for ``STALL_S`` is given up and what is left of its range is asked for on another
one. Every range is of one version of the object (If-Match), and the whole is what its hash says.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import aiohttp
import structlog
import xxhash

from services.kit.bus import TransientError
from services.kit.concurrency import run_in_thread
from services.kit.store.errors import ObjectChanged, ObjectCorrupted
from services.kit.store.objects import PATIENCE_S, READ_BYTES, write_at
from services.kit.store.reader import ObjectReader

log = structlog.get_logger(__name__)

#: Bytes asked for at a time: large enough that a request's latency is little beside them.
RANGE_BYTES = 8 * 2**20
#: Bytes written at a time, in a thread: a disk that is busy makes whoever writes wait.
WRITE_BYTES = 2**20
#: Seconds without a byte after which another connection is tried.
STALL_S = 2.0
RETRY_S = 0.05
RETRY_MAX_S = 1.0


async def _at_once() -> None:
    """Nobody has to be let by."""


class Ranged:
    """Downloads large objects, each with so many ranges at a time."""

    def __init__(
        self,
        reader: ObjectReader,
        *,
        connections: int = 4,
        range_bytes: int = RANGE_BYTES,
        stall_s: float = STALL_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._reader, self._range_bytes = reader, range_bytes
        self._stall_s, self._patience_s = stall_s, patience_s
        self._connections = connections

    async def download(
        self,
        uri: str,
        path: Path,
        *,
        size_bytes: int,
        sha256: str,
        turn: Callable[[], Awaitable[None]] = _at_once,
    ) -> str:
        """Fetch an object into ``path``, which must be nobody else's; return its xxh3 (128 bits, hex).

        Args:
            turn: awaited before each range, so that what is more urgent can be let by.

        Raises:
            ObjectNotFound: there is no such object.
            ObjectCorrupted: it is not of this size, or its hash is another.
            StoreRefused: the store will not answer.
            TransientError: the store gave no byte for ``patience_s``.
        """
        borders = [*range(0, size_bytes, self._range_bytes), size_bytes]
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        version: list[str] = []
        gate = asyncio.Semaphore(self._connections)

        async def range_of(start: int, stop: int) -> None:
            async with gate:
                await turn()
                await self._range(uri, handle, start, stop, version)

        ranges = [asyncio.ensure_future(range_of(start, stop)) for start, stop in pairwise(borders)]
        try:
            digest, fast = await self._hashed(handle, ranges, borders)
        except ObjectChanged as error:
            raise ObjectCorrupted(f"{uri} has not {size_bytes} bytes, or changed while it was read: {error}") from error
        finally:
            for each in ranges:
                each.cancel()
            await asyncio.gather(*ranges, return_exceptions=True)
            os.close(handle)
        if digest != sha256:
            raise ObjectCorrupted(f"{uri} has hash {digest}, expected {sha256}")
        return fast

    async def _hashed(
        self, handle: int, ranges: Sequence[asyncio.Future[None]], borders: Sequence[int]
    ) -> tuple[str, str]:
        """Hash the ranges in their order, each as soon as those before it are there: (SHA-256, xxh3)."""
        digest, fast = hashlib.sha256(), xxhash.xxh3_128()

        def take(start: int, stop: int) -> None:
            while start < stop:
                content = os.pread(handle, min(READ_BYTES, stop - start), start)
                if not content:
                    raise OSError("the file that is downloaded into is cut short")
                digest.update(content)
                fast.update(content)
                start += len(content)

        failing = asyncio.ensure_future(_first_failure(ranges))
        try:
            for task, start, stop in zip(ranges, borders[:-1], borders[1:], strict=True):
                # A later range that fails ends the wait for an earlier one.
                await asyncio.wait({task, failing}, return_when=asyncio.FIRST_COMPLETED)
                if failing.done():
                    failing.result()
                await task
                hashing = asyncio.ensure_future(asyncio.to_thread(take, start, stop))
                try:
                    await asyncio.shield(hashing)
                except asyncio.CancelledError:
                    # The thread goes on with the handle, which is closed behind us.
                    await asyncio.wait({hashing})
                    raise
        finally:
            failing.cancel()
        return digest.hexdigest(), fast.hexdigest()

    async def _range(self, uri: str, handle: int, start: int, stop: int, version: list[str]) -> None:
        """Write one range, however often its connection breaks."""
        loop = asyncio.get_running_loop()
        deadline, delay_s = loop.time() + self._patience_s, RETRY_S
        while start < stop:
            before = start
            try:
                start = await self._piece(uri, handle, start, stop, version)
                continue
            except _Broken as error:
                start, problem = error.at, error.problem
            if start > before:
                deadline, delay_s = loop.time() + self._patience_s, RETRY_S
            if loop.time() > deadline:
                raise TransientError(f"object store: {uri}: {problem!r}") from problem
            log.info("a download broke, going on where it did", what=uri, at=start, error=repr(problem))
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RETRY_MAX_S)

    async def _piece(self, uri: str, handle: int, start: int, stop: int, version: list[str]) -> int:
        """Write from ``start`` on for as long as the connection lasts; return where it ended in good order."""
        etag = version[0] if version else ""
        portion: list[bytes] = []
        try:
            async with aclosing(self._reader.stream(uri, start, stop, etag=etag, stall_s=self._stall_s)) as chunks:
                async for found, chunk in chunks:
                    if not version and found:
                        version.append(found)
                    elif version and found != version[0]:
                        raise ObjectChanged(f"{uri} has ETag {found}, not {version[0]} as before")
                    portion.append(chunk)
                    if sum(map(len, portion)) >= WRITE_BYTES:
                        start = await run_in_thread(_write, handle, portion, start)
                        portion = []
            return await run_in_thread(_write, handle, portion, start)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            # What has come is not asked for again.
            raise _Broken(await run_in_thread(_write, handle, portion, start), error) from error


def _write(handle: int, chunks: Sequence[bytes], start: int) -> int:
    """Write chunks one after the other; return where they end."""
    for chunk in chunks:
        write_at(handle, chunk, start)
        start += len(chunk)
    return start


class _Broken(Exception):
    """A connection ended early."""

    def __init__(self, at: int, problem: Exception) -> None:
        super().__init__(str(problem))
        self.at, self.problem = at, problem


async def _first_failure(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Raise the first error of any of them."""
    if tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    await asyncio.Event().wait()
