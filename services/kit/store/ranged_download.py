"""Downloads of large objects: several ranges at a time, hashed in order while later ranges still come."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path

import xxhash

from services.kit.concurrency import cancel_and_wait, run_in_thread
from services.kit.store.errors import ObjectChanged, ObjectCorrupted
from services.kit.store.files import READ_BYTES, FileSink
from services.kit.store.reader import PATIENCE_S, ObjectReader

#: Bytes of a request: large enough to hide its latency.
RANGE_BYTES = 8 * 2**20
#: Seconds without a byte after which another connection is tried.
STALL_S = 2.0


async def _return_at_once() -> None:
    return


class RangedDownloader:
    """Downloads large objects, each with ``connections`` ranges at a time."""

    def __init__(
        self,
        reader: ObjectReader,
        *,
        connections: int = 4,
        range_bytes: int = RANGE_BYTES,
        stall_s: float = STALL_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._reader, self._connections, self._range_bytes = reader, connections, range_bytes
        self._stall_s, self._patience_s = stall_s, patience_s

    async def download(
        self,
        uri: str,
        path: Path,
        *,
        size_bytes: int,
        sha256: str,
        before_range: Callable[[], Awaitable[None]] = _return_at_once,
    ) -> str:
        """Fetch an object into ``path``, which no one else may use; return its xxh3 (128 bits, hex).

        Args:
            before_range: awaited before each range, to give way to more urgent downloads.

        Raises:
            ObjectNotFound: there is no such object.
            ObjectCorrupted: its size or hash is another, or it changed during the download.
            StoreRefused: no permission, or a request that the store does not support.
            TransientError: no byte came for ``patience_s``.
            OSError: the file cannot be written.
        """
        borders = [*range(0, size_bytes, self._range_bytes), size_bytes]
        path.write_bytes(b"")
        limit = asyncio.Semaphore(self._connections)
        etag = ""

        async def fetch_range(start: int, stop: int) -> None:
            nonlocal etag
            async with limit:
                await before_range()
                with FileSink(path, start) as sink:
                    found = await self._reader.read(
                        uri,
                        sink,
                        start=start,
                        stop=stop,
                        etag=etag,
                        size_bytes=size_bytes,
                        stall_s=self._stall_s,
                        patience_s=self._patience_s,
                    )
                if found != (etag := etag or found):
                    raise ObjectCorrupted(f"{uri} changed during the download")

        ranges = [asyncio.ensure_future(fetch_range(start, stop)) for start, stop in pairwise(borders)]
        hashing = asyncio.ensure_future(_hash_in_order(path, ranges, borders))
        try:
            await asyncio.gather(*ranges, hashing)
        except ObjectChanged as error:
            raise ObjectCorrupted(str(error)) from error
        finally:
            await cancel_and_wait(*ranges, hashing)
        digest, fast_digest = hashing.result()
        if digest != sha256:
            raise ObjectCorrupted(f"{uri} has hash {digest}, expected {sha256}")
        return fast_digest


async def _hash_in_order(path: Path, ranges: Sequence[asyncio.Future[None]], borders: Sequence[int]) -> tuple[str, str]:
    """Hash each range as soon as all before it are there; return (SHA-256, xxh3)."""
    digest, fast_digest = hashlib.sha256(), xxhash.xxh3_128()

    def hash_range(start: int, stop: int) -> None:
        while start < stop:
            content = os.pread(file.fileno(), min(READ_BYTES, stop - start), start)
            if not content:
                raise OSError(f"{path} was cut short during the download")
            digest.update(content)
            fast_digest.update(content)
            start += len(content)

    with path.open("rb") as file:
        for fetched, (start, stop) in zip(ranges, pairwise(borders), strict=True):
            await asyncio.wait([fetched])
            if fetched.cancelled() or fetched.exception() is not None:
                break  # the caller raises it
            await run_in_thread(hash_range, start, stop)
    return digest.hexdigest(), fast_digest.hexdigest()
