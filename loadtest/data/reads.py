"""Reads and listings of the object store, beside obstore (the Rust crate object_store) on the same SeaweedFS.

Both hash every byte as it comes and read the version that was listed. They take turns; each figure is the median of
the rounds' ratios, of seconds on the clock and of this process's seconds of processor time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import structlog

from services.kit.concurrency import gather_limited
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.kit.store.files import FileSink
from services.kit.store.objects import ObjectInfo, ObjectStore
from services.kit.store.ranged_download import RANGE_BYTES, RangedDownloader
from trainbus.embedded.servers import S3Server

BUCKET, USER, PASSWORD = "lake", "loadtest", "loadtest-secret"
SMALL_BYTES, LARGE_BYTES = 4096, 16 * 2**20
STREAMS, RANGES = 8, 4

Job = Callable[[], Awaitable[object]]


class Peer:
    """The same reads by obstore."""

    def __init__(self, endpoint: str) -> None:
        import obstore
        from obstore.store import S3Store

        self._obstore: Any = obstore
        self._store = S3Store(
            BUCKET,
            endpoint=endpoint,
            access_key_id=USER,
            secret_access_key=PASSWORD,
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "300s"},
        )
        self._threads = ThreadPoolExecutor(16)

    async def list(self, prefix: str) -> int:
        return sum([len(page) async for page in self._store.list(prefix)])

    async def get(self, info: ObjectInfo) -> None:
        found = await self._obstore.get_async(self._store, info.key, options={"if_match": f'"{info.etag}"'})
        content = await found.bytes_async()
        assert len(content) == info.size_bytes
        hashlib.sha256(content).digest()

    async def hash(self, key: str) -> None:
        def run() -> None:
            digest = hashlib.sha256()
            for chunk in self._obstore.get(self._store, key).stream(min_chunk_size=2**20):
                digest.update(chunk)

        await asyncio.get_running_loop().run_in_executor(self._threads, run)

    async def download(self, key: str, path: Path, size_bytes: int) -> None:
        """Ranges side by side, hashed in order from the file, as ``RangedDownloader`` does."""
        path.write_bytes(b"")
        borders = [*range(0, size_bytes, RANGE_BYTES), size_bytes]
        loop, limit = asyncio.get_running_loop(), asyncio.Semaphore(RANGES)

        def fetch(start: int, stop: int) -> None:
            with FileSink(path, start) as sink:
                options = {"range": (start, stop)}
                for chunk in self._obstore.get(self._store, key, options=options).stream(min_chunk_size=2**20):
                    sink(memoryview(chunk))

        async def fetch_range(start: int, stop: int) -> None:
            async with limit:
                await loop.run_in_executor(self._threads, fetch, start, stop)

        ranges = [asyncio.ensure_future(fetch_range(start, stop)) for start, stop in pairwise(borders)]
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for fetched, (start, stop) in zip(ranges, pairwise(borders), strict=True):
                await fetched
                digest.update(await asyncio.to_thread(file.read, stop - start))


def measure(quick: bool) -> list[tuple[str, str, str, bool]]:
    """The figures, each with its target and whether it is met."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        return [("reads beside obstore", "obstore is not installed", "", True)]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder), rounds=3 if quick else 11, small=500 if quick else 2000))


async def _measure(folder: Path, rounds: int, small: int) -> list[tuple[str, str, str, bool]]:
    async with _filled_store(folder, small) as (objects, peer):
        infos = [info async for info in objects.list(f"s3://{BUCKET}/small/")]
        large = [info.key async for info in objects.list(f"s3://{BUCKET}/large/")]
        huge = await objects.head(f"s3://{BUCKET}/huge")
        sha256 = await objects.hash(huge.uri)
        downloader = RangedDownloader(objects.reader, connections=RANGES)

        async def get(info: ObjectInfo) -> None:
            hashlib.sha256(await objects.get(info.uri, etag=info.etag, size_bytes=info.size_bytes)).digest()

        async def list_all() -> int:
            return len([info async for info in objects.list(f"s3://{BUCKET}/small/")])

        jobs: dict[str, tuple[Job, Job]] = {
            f"list {small:,} objects": (list_all, lambda: peer.list("small/")),
            f"{small:,} objects of 4 KiB": (
                lambda: gather_limited(map(get, infos), limit=32),
                lambda: gather_limited(map(peer.get, infos), limit=32),
            ),
            f"{len(large)} objects of 16 MiB, hashed": (
                lambda: gather_limited((objects.hash(f"s3://{BUCKET}/{key}") for key in large), limit=STREAMS),
                lambda: gather_limited(map(peer.hash, large), limit=STREAMS),
            ),
            f"one object of {huge.size_bytes // 2**20} MiB in ranges, to a file": (
                lambda: downloader.download(huge.uri, folder / "a", size_bytes=huge.size_bytes, sha256=sha256),
                lambda: peer.download(huge.key, folder / "b", huge.size_bytes),
            ),
        }
        return [await _compare(name, *pair, rounds) for name, pair in jobs.items()]


async def _compare(name: str, ours: Job, theirs: Job, rounds: int) -> tuple[str, str, str, bool]:
    await ours(), await theirs()
    wall: list[tuple[float, float]] = []
    cpu: list[tuple[float, float]] = []
    for number in range(rounds):
        taken = {job: await _time(job) for job in ((ours, theirs) if number % 2 else (theirs, ours))}
        wall.append((taken[ours][0], taken[theirs][0]))
        cpu.append((taken[ours][1], taken[theirs][1]))
    speed, economy = (statistics.median(mine / peers for mine, peers in pairs) for pairs in (wall, cpu))
    seconds, peers = (statistics.median(values) for values in zip(*wall, strict=True))
    measured = f"obstore has {speed:.2f} of our speed ({seconds:.3f} s, {peers:.3f} s), {economy:.2f} by processor time"
    return name, measured, "a figure to decide by", True


async def _time(job: Job) -> tuple[float, float]:
    def processor_s() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    begun, used = time.perf_counter(), processor_s()
    await job()
    return time.perf_counter() - begun, processor_s() - used


@asynccontextmanager
async def _filled_store(folder: Path, small: int) -> AsyncIterator[tuple[ObjectStore, Peer]]:
    server = S3Server(folder / "s3", free_ports(1)[0], USER, PASSWORD)
    await asyncio.to_thread(server.start)
    given = {"s3_endpoint": server.endpoint, "s3_access_key": USER, "s3_secret_key": PASSWORD}
    try:
        async with ObjectStore(Settings.model_validate(given)) as objects:
            await objects.ensure_bucket(BUCKET)
            await _fill(objects, folder, "small", [SMALL_BYTES] * small)
            await _fill(objects, folder, "large", [LARGE_BYTES] * 16)
            (folder / "huge").write_bytes(os.urandom(2**20) * 256)
            await objects.upload(folder / "huge", f"s3://{BUCKET}/huge")
            yield objects, Peer(server.endpoint)
    finally:
        await asyncio.to_thread(server.stop)


async def _fill(objects: ObjectStore, folder: Path, prefix: str, sizes: Sequence[int]) -> None:
    puts = (objects.put(f"s3://{BUCKET}/{prefix}/{n:05d}", os.urandom(size)) for n, size in enumerate(sizes))
    await gather_limited(puts, limit=16)
