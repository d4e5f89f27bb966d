"""Checkpoints of up to a terabyte: the time and the memory of each stage must grow no faster than the pieces.

    python -m loadtest.checkpoint_size [--gigabytes 10 100 1000] [--nodes 8] [--history 10000]

What is real: the event server and all facts, the checkpoint service's committer, scrubber and garbage collection, the
node's cache with its restore, the listings and the manifests, their hashes, and the files that are restored, which are
sparse. What is not: the pieces. A stand-in for the store makes up the hash of each and answers for it, so that no byte
of a piece is sent, hashed or written; what a store and a network take comes on top (``loadtest.checkpoints upload``).
Each size runs in a process of its own. ``--history`` measures how the parts of one step are found among many others.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import psutil

from contracts.events.checkpoint import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointFile,
    CheckpointStaged,
    Chunk,
    FileListing,
)
from contracts.events.run import Member, RunAccepted, RunPlaced, RunQueued
from contracts.events.train import ScrubRequested
from contracts.manifest import encode_listing, files_of
from contracts.ranks import RangeRequestLine
from contracts.spec.run import RunSpec
from loadtest.common import report
from services.checkpoint.app import Committer
from services.checkpoint.garbage_collection import collect_garbage
from services.checkpoint.ledger_store import LEDGER_KEY
from services.checkpoint.scrubber import Scrubber
from services.checkpoint.settings import CheckpointSettings
from services.checkpoint.staged_steps import StagedStepsReader
from services.kit.bus import Bus, Message
from services.kit.ports import free_ports
from services.kit.store.errors import ObjectExists, ObjectNotFound
from services.kit.store.objects import ObjectInfo, ObjectPage, ObjectStore
from services.kit.store.uris import blob_key, blob_sha256, split_uri
from services.worker.cache.file_cache import FileCache
from services.worker.cache.node_cache import NodeCache
from services.worker.core.checkpoint_chunks import CHUNK_BYTES
from trainbus.embedded.servers import NatsServer

GB, MIB = 10**9, 2**20
RUN = "rlarge"
#: A stage may take this much more for a piece of the larger checkpoint than for one of the smaller.
MAX_GROWTH = 1.5
#: Stages that are over sooner are not compared: what they take does not depend on the pieces.
MIN_COMPARED_S, MIN_COMPARED_MIB = 0.2, 30.0
SAMPLE_S = 0.01


class StandInStore:
    """Answers for pieces that were never stored; other objects are in memory."""

    def __init__(self) -> None:
        self.stored_at = datetime.now(UTC)
        self.pieces: dict[str, int] = {}
        self.objects: dict[str, bytes] = {}
        #: How many pieces were read.
        self.pieces_read = 0
        #: All names, until something is put.
        self._sorted: list[str] | None = None
        self.reader = self

    async def head(self, uri: str) -> ObjectInfo:
        await asyncio.sleep(0)
        return self._info(uri)

    def _info(self, uri: str) -> ObjectInfo:
        size = self.pieces.get(uri)
        if size is None:
            size = len(self._content(uri))
        return ObjectInfo(*split_uri(uri), size, "1", self.stored_at, blob_sha256(uri))

    def _content(self, uri: str) -> bytes:
        if uri not in self.objects:
            raise ObjectNotFound(uri)
        return self.objects[uri]

    async def get(self, uri: str, **_: Any) -> bytes:
        return self._content(uri)

    async def read(self, uri: str, sink: Callable[[memoryview], object], **_: Any) -> None:
        sink(memoryview(self._content(uri)))

    async def put(self, uri: str, body: bytes, *, if_absent: bool = False, content_type: str = "") -> None:
        if if_absent and uri in self.objects:
            raise ObjectExists(uri)
        self.objects[uri] = body
        self._sorted = None

    async def delete(self, uri: str, *, if_match: str = "") -> None:
        await asyncio.sleep(0)
        self.pieces.pop(uri, None)
        self.objects.pop(uri, None)

    async def hash(self, uri: str) -> str:
        return blob_sha256(self._info(uri).uri)

    async def read_into(self, uri: str, path: Path, offset: int, size_bytes: int, hasher: Any) -> str:
        """Write nothing, and return the hash that the piece claims to have."""
        await asyncio.sleep(0)
        self.pieces_read += 1
        assert self.pieces[uri] == size_bytes
        assert path.stat().st_size >= offset + size_bytes
        return blob_sha256(uri)[::-1]

    async def list(self, uri: str) -> AsyncIterator[ObjectInfo]:
        async for page in self.list_pages(uri):
            for info in page.objects:
                yield info

    async def list_pages(self, uri: str, *, by_folder: bool = False) -> AsyncIterator[ObjectPage]:
        """One page of all below a prefix, or of its folders."""
        if self._sorted is None:
            self._sorted = sorted((*self.pieces, *self.objects))
        names = self._sorted[bisect_left(self._sorted, uri) : bisect_left(self._sorted, f"{uri}\U0010ffff")]
        if by_folder:
            keys = (split_uri(name)[1] for name in names)
            depth = uri.count("/") - 2
            yield ObjectPage((), tuple(sorted({"/".join(key.split("/")[:depth]) + "/" for key in keys})))
        else:
            yield ObjectPage(tuple(self._info(name) for name in names if name in self.pieces or name in self.objects))


class LaterClock:
    """A clock that can be put forward."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Figures:
    """Seconds, those of the processor, and peak memory of each stage. Only the first depend on other programs."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        process, ended = psutil.Process(), threading.Event()
        before = peak = process.memory_info().rss

        def sample() -> None:
            nonlocal peak
            while not ended.wait(SAMPLE_S):
                peak = max(peak, process.memory_info().rss)

        sampler = threading.Thread(target=sample)
        sampler.start()
        begun, cpu_begun = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
            ended.set()
            sampler.join()
        self.stages[name] = {
            "seconds": round(seconds, 4),
            "cpu_s": round(cpu_s, 4),
            "extra_mib": round((peak - before) / MIB, 1),
        }


def list_files(bucket: str, gigabytes: int, node: int, nodes: int, store: StandInStore) -> tuple[CheckpointFile, ...]:
    """Return a node's share of a state: two files of pieces whose hashes are made up."""
    files = []
    for name in ("model", "optimizer"):
        size_bytes = gigabytes * GB // nodes // 2
        sizes = [min(CHUNK_BYTES, size_bytes - start) for start in range(0, size_bytes, CHUNK_BYTES)]
        chunks = []
        for number, size in enumerate(sizes):
            sha256 = hashlib.sha256(f"{name}/{node}/{number}".encode()).hexdigest()
            uri = f"s3://{bucket}/{blob_key(sha256)}"
            store.pieces[uri] = size
            chunks.append(Chunk(sha256=sha256, size_bytes=size, blake3=sha256[::-1], uri=uri))
        whole = hashlib.sha256(f"{name}/{node}".encode()).hexdigest()
        path = f"{name}-{node}.safetensors"
        files.append(CheckpointFile(path=path, sha256=whole, size_bytes=size_bytes, chunks=tuple(chunks)))
    return tuple(files)


class Trial:
    """One checkpoint of one size, from its parts to its collection."""

    def __init__(self, bus: Bus, settings: CheckpointSettings, folder: Path, gigabytes: int, nodes: int) -> None:
        self.bus, self.settings, self.folder = bus, settings, folder
        self.gigabytes, self.nodes = gigabytes, nodes
        self.store, self.figures = StandInStore(), Figures()
        self.objects = cast(ObjectStore, self.store)

    async def run(self) -> dict[str, Any]:
        await place(self.bus, self.nodes)
        committer = Committer(self.bus, self.objects, self.settings)
        bucket, stage = self.settings.bucket_models, self.figures.stage
        parts = [list_files(bucket, self.gigabytes, node, self.nodes, self.store) for node in range(self.nodes)]
        pieces = len(self.store.pieces)
        with stage("listings"):
            messages = [await self._stage_part(node, files) for node, files in enumerate(parts)]
        del parts
        with stage("commit"):
            for message in messages:
                await committer.on_checkpoint_staged(message)
        commit = await self._read_commit()
        manifest = self.store.objects[commit.checkpoint.uri]
        with stage("manifest read"):
            assert sum(file.size_bytes for file in files_of(manifest)) == commit.size_bytes
        with stage("restore"):
            await self._restore(commit)
        pieces_before = self.store.pieces_read
        with stage("restore of a node's rows"):
            await self._restore_rows(commit)
        node_pieces = self.store.pieces_read - pieces_before
        with stage("scrub"):
            await self._scrub(messages[0])
        clock = cast(LaterClock, self.bus.clock)
        clock.ahead = timedelta(days=3)
        with stage("collection of nothing"):
            found = await collect_garbage(self.bus, self.objects, self.settings)
        assert found.blobs == 0
        uri = commit.checkpoint.uri
        await self.bus.publish(CheckpointDeleted(run_id=RUN, uri=uri, step=1, reason="loadtest"))
        clock.ahead = timedelta(days=6)
        with stage("collection of all"):
            found = await collect_garbage(self.bus, self.objects, self.settings)
        assert not self.store.pieces
        assert list(self.store.objects) == [f"s3://{self.settings.bucket_models}/{LEDGER_KEY}"]
        return {
            "gigabytes": self.gigabytes,
            "pieces": pieces,
            "pieces_of_a_node": node_pieces,
            "manifest_bytes": len(manifest),
            "largest_fact_bytes": max(
                len(message.event.model_dump_json(exclude_defaults=True)) for message in messages
            ),
            "collected_blobs": found.blobs,
            "stages": self.figures.stages,
        }

    async def _stage_part(self, node: int, files: tuple[CheckpointFile, ...]) -> Message[Any]:
        body = encode_listing(files)
        sha256 = hashlib.sha256(body).hexdigest()
        uri = f"s3://{self.settings.bucket_models}/{blob_key(sha256)}"
        await self.store.put(uri, body)
        size = sum(file.size_bytes for file in files)
        listing = FileListing(uri=uri, sha256=sha256, size_bytes=len(body), files_bytes=size)
        return await publish_part(self.bus, node, 1, self.nodes, listing)

    async def _read_commit(self) -> CheckpointCommitted:
        [commit] = [each.event for each in await self.bus.read_history(f"run.{RUN}.checkpoint_committed")]
        assert isinstance(commit, CheckpointCommitted)
        return commit

    async def _restore(self, commit: CheckpointCommitted) -> None:
        """Restore all files on an empty node, as sparse files of their real sizes."""
        cache = NodeCache(FileCache(self.folder / "cache", self.objects), self.objects, 2**50)
        async with cache.pin_files() as pins:
            await cache.checkpoint(commit.checkpoint.uri, self.folder / "resume", pins, commit.manifest_sha256)
        found = sum(path.stat().st_size for path in (self.folder / "resume").iterdir())
        assert found == commit.size_bytes

    async def _restore_rows(self, commit: CheckpointCommitted) -> None:
        """Restore what the last node's ranks read: of every tensor, here a file, the last rows."""
        cache, folder = NodeCache(FileCache(self.folder / "empty", self.objects), self.objects, 2**50), self.folder
        async with cache.pin_files() as pins:
            _, partial = await cache.partial_checkpoint(
                commit.checkpoint.uri, folder / "rows", pins, commit.manifest_sha256
            )
            for path in (folder / "rows").iterdir():
                stop = path.stat().st_size
                start = stop - stop // self.nodes
                line = RangeRequestLine(rank=self.nodes - 1, generation=1, file=path.name, start=start, stop=stop)
                assert not await partial.request(line)

    async def _scrub(self, cause: Message[Any]) -> None:
        request = ScrubRequested(run_id=RUN)
        await Scrubber(self.bus, self.objects, self.settings).scrub(Message(request, cause.envelope, request.subject))
        assert not await self.bus.read_history(f"run.{RUN}.checkpoint_rotten")


async def place(bus: Bus, nodes: int) -> None:
    """Publish a placement on one rank a node, and what the log has before one."""
    spec = RunSpec.model_validate({"name": "large", "command": ["true"]})
    await bus.publish(RunAccepted(run_id=RUN, spec=spec, request_id=RUN, request_source="loadtest"))
    await bus.publish(RunQueued(run_id=RUN, next_generation=1))
    members = tuple(Member(node_id=f"n{node}", slots=(0,), ranks=(node,)) for node in range(nodes))
    placed = {"members": members, "world_size": nodes, "spec": spec, "decided_at_sequence": 0}
    await bus.publish(
        RunPlaced.model_validate({"run_id": RUN, "generation": 1, **placed, "decided_at": bus.clock.now()})
    )


async def publish_part(bus: Bus, node: int, step: int, nodes: int, listing: FileListing) -> Message[Any]:
    """Publish a node's part of a step; return it as the service gets it."""
    part = CheckpointStaged(
        run_id=RUN,
        generation=1,
        node_id=f"n{node}",
        ranks=(node,),
        world_size=nodes,
        step=step,
        epoch=1,
        samples_consumed=step,
        listing=listing,
    )
    ack = await bus.publish(part)
    stored = await bus.get_message(ack.sequence)
    assert stored is not None
    return stored


@asynccontextmanager
async def open_bus(folder: Path) -> AsyncIterator[tuple[Bus, CheckpointSettings]]:
    """An event server of its own, and a connection to it."""
    server = NatsServer(folder / "nats", free_ports(1)[0])
    await asyncio.to_thread(server.start)
    settings = CheckpointSettings(
        nats_url=server.url, data_dir=folder / "data", log_level="error", checkpoint_scrub_bytes_per_s=1e18
    )
    bus = Bus("loadtest", settings, LaterClock())
    try:
        await bus.connect()
        yield bus, settings
    finally:
        await bus.close()
        await asyncio.to_thread(server.stop)


async def measure_size(gigabytes: int, nodes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="trainbus-size-") as name:
        async with open_bus(Path(name)) as (bus, settings):
            return await Trial(bus, settings, Path(name), gigabytes, nodes).run()


async def measure_history(facts: int) -> dict[str, Any]:
    """Return what finding one step's parts takes behind ``facts`` others of the same run."""
    listing = FileListing(uri="s3://models/x", sha256="0" * 64, size_bytes=1, files_bytes=1)
    with tempfile.TemporaryDirectory(prefix="trainbus-size-") as name:
        async with open_bus(Path(name)) as (bus, _):
            for step in range(facts):
                await publish_part(bus, 0, step + 1, 2, listing)
            begun = time.perf_counter()
            await bus.read_history(f"run.{RUN}.checkpoint_staged")
            whole_s = time.perf_counter() - begun
            reader = StagedStepsReader(bus)
            begun = time.perf_counter()
            await reader.read(RUN)
            first_s = time.perf_counter() - begun
            await publish_part(bus, 1, facts, 2, listing)
            begun = time.perf_counter()
            steps = await reader.read(RUN)
            parts = await reader.read_parts(list(steps.of_generation(1)[facts]))
            later_s = time.perf_counter() - begun
            assert len(parts) == 2
    return {"facts": facts, "whole_history_s": whole_s, "first_read_s": first_s, "later_read_s": later_s}


def _run_size(gigabytes: int, nodes: int) -> dict[str, Any]:
    return asyncio.run(measure_size(gigabytes, nodes))


def find_growth(small: dict[str, Any], large: dict[str, Any]) -> list[str]:
    """Return the stages that grow faster than the pieces, in words."""
    allowed, problems = MAX_GROWTH * large["pieces"] / small["pieces"], []
    for name, before in small["stages"].items():
        after = large["stages"][name]
        for figure, least in (("cpu_s", MIN_COMPARED_S), ("extra_mib", MIN_COMPARED_MIB)):
            if after[figure] > allowed * max(before[figure], least):
                growth = after[figure] / max(before[figure], least)
                problems.append(
                    f"{name}: {growth:.1f} times the {figure} for {allowed / MAX_GROWTH:.1f} times the pieces"
                )
    return problems


def table_rows(sizes: list[dict[str, Any]], history: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return a row for each stage of each size, and those of the history."""
    rows = []
    for size in sizes:
        rows.append(
            (f"{size['gigabytes']:,} GB", f"{size['pieces']:,} pieces", f"manifest {size['manifest_bytes']:,} bytes")
        )
        for name, each in size["stages"].items():
            a_piece = 1e6 * each["cpu_s"] / size["pieces"]
            rows.append(
                (
                    f"  {name}",
                    f"{each['seconds']:.2f} s, {each['extra_mib']:.0f} MiB",
                    f"{a_piece:.0f} us of a core a piece",
                )
            )
    if history:
        rows.append((f"parts of a step among {history['facts']:,}", f"{1e3 * history['later_read_s']:.1f} ms", ""))
        rows.append(("  the first time in a process", f"{history['first_read_s']:.2f} s", ""))
        rows.append(("  whole history", f"{history['whole_history_s']:.2f} s", "what each part took before"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--history", type=int, default=10_000, help="staged facts of the run; 0: not measured")
    given = parser.parse_args()
    sizes = []
    for gigabytes in sorted(given.gigabytes):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            sizes.append(pool.apply(_run_size, (gigabytes, given.nodes)))
        print(f"{gigabytes:,} GB: {sizes[-1]['pieces']:,} pieces measured", flush=True)
    history = asyncio.run(measure_history(given.history)) if given.history else {}
    problems = [problem for small, large in pairwise(sizes) for problem in find_growth(small, large)]
    report("checkpoint-size", table_rows(sizes, history), {"sizes": sizes, "history": history, "problems": problems})
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
