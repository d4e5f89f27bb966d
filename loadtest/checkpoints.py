"""Checkpoints between node and store: how fast, and how much of them is sent. On real servers, started for it.

    python -m loadtest.checkpoints upload  [--megabytes 500] [--repeats 3]
    python -m loadtest.checkpoints savings [--apart 20] [--warm 100]

``upload``: from a checkpoint on disk to ``checkpoint_committed`` (agent's upload, staged, the checkpoint service's
verification, manifest, commit) against the time in which the same bytes are put into the same store by nothing but
puts; the same for restoring, against gets into memory and gets that land in a file; and what is sent when 5 % of the
tensors changed. Each part begins with nothing left to write to disk. ``savings`` trains small models and measures what
deduplication and differences save of their states from one checkpoint to the next.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from contracts.events.checkpoint import CheckpointCommitted, CheckpointRefused, CheckpointStaged
from contracts.events.run import Member, RunAccepted, RunPlaced, RunQueued
from contracts.spec.run import RunSpec
from loadtest.common import report
from services.checkpoint.app import build
from services.checkpoint.settings import CheckpointSettings
from services.kit.bus import Bus
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.kit.store.files import write_at
from services.kit.store.objects import ObjectStore
from services.worker.cache.file_cache import FileCache
from services.worker.cache.node_cache import NodeCache
from services.worker.checkpoints.uploader import CheckpointUploader, KnownBlobs
from services.worker.core.checkpoint_chunks import CHUNK_BYTES
from trainbus.embedded.servers import NatsServer, S3Server

MIB = 2**20
#: What one plain put sends in the yardstick: the size of a large piece, which is what the store is fastest with.
PUT_BYTES = CHUNK_BYTES
PARALLEL = 4


# -- upload --------------------------------------------------------------------


@contextmanager
def _servers(folder: Path) -> Iterator[tuple[NatsServer, S3Server]]:
    ports = free_ports(2)
    nats, s3 = NatsServer(folder / "nats", ports[0]), S3Server(folder / "s3", ports[1], "loadtest", "loadtest-secret")
    try:
        nats.start()
        s3.start()
        yield nats, s3
    finally:
        nats.stop()
        s3.stop()


@asynccontextmanager
async def _stack(folder: Path) -> AsyncIterator[tuple[Bus, ObjectStore, Settings]]:
    """Servers and the checkpoint service, in this process."""
    with _servers(folder) as (nats, s3):
        settings = CheckpointSettings(
            nats_url=nats.url,
            s3_endpoint=s3.endpoint,
            s3_access_key=s3.access_key,
            s3_secret_key=Settings(s3_secret_key=s3.secret_key).s3_secret_key,
            data_dir=folder / "service",
            http_port=-1,
            log_level="error",
        )
        service = build(settings)
        running = asyncio.create_task(service.run())
        bus = Bus("loadtest", settings)
        await bus.connect()
        try:
            async with ObjectStore(settings) as objects:
                await objects.ensure_bucket(settings.bucket_models)
                while not all(service.check_readiness().values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                yield bus, objects, settings
        finally:
            await bus.close()
            service.stopping.set()
            await running


class _Node:
    """What an agent does with a checkpoint, and when its commit is heard of."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings, folder: Path) -> None:
        self.bus, self.objects, self.settings, self.folder = bus, objects, settings, folder
        self.cache, self.known = NodeCache(FileCache(folder / "cache", objects), objects, 2**40), KnownBlobs()
        self.run_id = f"r{os.getpid()}"

    async def place(self) -> None:
        spec = RunSpec.model_validate({"name": "checkpoints", "command": ["true"]})
        placed = RunPlaced(
            run_id=self.run_id,
            generation=1,
            members=(Member(node_id="n1", slots=(0,), ranks=(0,)),),
            world_size=1,
            resume=None,
            spec=spec,
            dataset=None,
            decided_at_sequence=0,
            decided_at=datetime.now(UTC),
        )
        await self.bus.publish(
            RunAccepted(run_id=self.run_id, spec=spec, request_id=self.run_id, request_source="loadtest")
        )
        await self.bus.publish(RunQueued(run_id=self.run_id, next_generation=1))
        await self.bus.publish(placed)

    async def commit(self, step: int, named: dict[str, Path]) -> tuple[float, int, CheckpointCommitted]:
        """Seconds to the commit, bytes sent, the commit."""
        filters = (CheckpointCommitted.subject_filter(), CheckpointRefused.subject_filter())
        start = (await self.bus.js.stream_info("FACTS")).state.last_seq + 1
        heard: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def listen() -> None:
            async for batch in self.bus.follow("FACTS", filters, start):
                for message in batch:
                    if not heard.done():
                        heard.set_result(message.event)

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0.3)  # what is measured begins with a listener at rest
        begun = time.perf_counter()
        uploader = CheckpointUploader(self.objects, self.settings.bucket_models, self.cache, self.known)
        files = await uploader.upload(named)
        await self.bus.publish(
            CheckpointStaged(
                run_id=self.run_id,
                generation=1,
                node_id="n1",
                ranks=(0,),
                world_size=1,
                step=step,
                epoch=1,
                samples_consumed=step,
                files=files,
            )
        )
        event = await asyncio.wait_for(heard, 120)
        seconds = time.perf_counter() - begun
        listening.cancel()
        if not isinstance(event, CheckpointCommitted):
            raise RuntimeError(f"the checkpoint was not committed: {event}")
        return seconds, uploader.sent_bytes, event

    async def restore(self, uri: str) -> float:
        """Seconds on a node that has nothing."""
        cache = NodeCache(FileCache(self.folder / "fresh", self.objects), self.objects, 2**40)
        begun = time.perf_counter()
        async with cache.pin_files() as pins:
            await cache.checkpoint(uri, self.folder / "resume", pins)
        seconds = time.perf_counter() - begun
        for name in ("fresh", "resume"):
            shutil.rmtree(self.folder / name)
        return seconds


def _state(megabytes: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Weights and two moments of a transformer: large matrices, small vectors."""
    generator = np.random.default_rng(seed)
    state: dict[str, np.ndarray[Any, Any]] = {}
    left, block = megabytes * MIB, 0
    while left > 0:
        for name, size in (("attention", 2 * MIB), ("mlp", 4 * MIB), ("bias", 16 * 1024), ("norm", 4 * 1024)):
            size = min(size, left)
            if size:
                state[f"block.{block:03d}.{name}"] = generator.standard_normal(size // 4, dtype=np.float32)
                left -= size
        block += 1
    return state


async def puts(objects: ObjectStore, bucket: str, contents: list[bytes], prefix: str) -> float:
    """Seconds of nothing but puts: the store's own rate for these bytes."""
    gate = asyncio.Semaphore(PARALLEL)

    async def put(number: int, content: bytes) -> None:
        async with gate:
            await objects.put(f"s3://{bucket}/{prefix}/{number}", content)

    begun = time.perf_counter()
    await asyncio.gather(*(put(*each) for each in enumerate(contents)))
    return time.perf_counter() - begun


async def _gets(objects: ObjectStore, bucket: str, count: int, prefix: str, into: Path | None = None) -> float:
    """Seconds of nothing but gets; with ``into``, of gets whose bytes are written to a file."""
    gate = asyncio.Semaphore(PARALLEL)

    async def get(number: int) -> None:
        async with gate:
            content = await objects.get(f"s3://{bucket}/{prefix}/{number}")
            if into is not None:
                await asyncio.to_thread(_write, into, content, number * PUT_BYTES)

    begun = time.perf_counter()
    await asyncio.gather(*(get(number) for number in range(count)))
    return time.perf_counter() - begun


def _write(path: Path, content: bytes, offset: int) -> None:
    with path.open("r+b") as file:
        write_at(file, content, offset)


async def upload(megabytes: int, repeats: int) -> None:
    """Interleaved, each repeat with bytes that the store has never seen; the least of each counts."""
    folder = Path(tempfile.mkdtemp(prefix="trainbus-checkpoints-"))
    try:
        async with _stack(folder) as (bus, objects, settings):
            node = _Node(bus, objects, settings, folder)
            await node.place()
            bucket = settings.bucket_models
            raw_put, commit, raw_get, filed, restore = [], [], [], [], []
            state: dict[str, Any] = {}
            for repeat in range(repeats):
                state = _state(megabytes, repeat)
                path = folder / f"state-{repeat}" / "model-0.safetensors"
                path.parent.mkdir()
                save_file(state, path)
                content = os.urandom(path.stat().st_size)
                parts = [content[at : at + PUT_BYTES] for at in range(0, len(content), PUT_BYTES)]
                await asyncio.to_thread(os.sync)
                raw_put.append(await puts(objects, bucket, parts, f"raw/{repeat}"))
                await asyncio.to_thread(os.sync)
                seconds, _, committed = await node.commit(repeat + 1, {path.name: path})
                commit.append(seconds)
                await asyncio.to_thread(os.sync)
                raw_get.append(await _gets(objects, bucket, len(parts), f"raw/{repeat}"))
                into = folder / "gets"
                into.touch()
                filed.append(await _gets(objects, bucket, len(parts), f"raw/{repeat}", into))
                into.unlink()
                await asyncio.to_thread(os.sync)
                restore.append(await node.restore(committed.checkpoint.uri))
                del content, parts
                gc.collect()
                print(
                    f"{repeat}: put {raw_put[-1]:.2f} commit {commit[-1]:.2f} get {raw_get[-1]:.2f} "
                    f"get into a file {filed[-1]:.2f} restore {restore[-1]:.2f} s",
                    flush=True,
                )
            total, changed = sum(each.nbytes for each in state.values()), 0
            for name in np.random.default_rng(9).permutation(sorted(state)):
                if changed + state[name].nbytes <= 0.05 * total:
                    changed += state[name].nbytes
                    state[name] = state[name] + np.float32(1e-3)
            path = folder / "changed" / "model-0.safetensors"
            path.parent.mkdir()
            save_file(state, path)
            seconds, sent, _ = await node.commit(repeats + 1, {path.name: path})
            share = sent / path.stat().st_size
            put_ratio, get_ratio = min(commit) / min(raw_put), min(restore) / min(raw_get)
            filed_ratio = min(restore) / min(filed)
            size = path.stat().st_size / MIB
            rows = [
                ("plain puts", f"{min(raw_put):.2f} s ({size / min(raw_put):.0f} MiB/s)", ""),
                ("to checkpoint_committed", f"{min(commit):.2f} s, {put_ratio:.2f} of the puts", "1.3"),
                ("plain gets", f"{min(raw_get):.2f} s ({size / min(raw_get):.0f} MiB/s)", ""),
                ("plain gets into a file", f"{min(filed):.2f} s ({size / min(filed):.0f} MiB/s)", ""),
                (
                    "restored",
                    f"{min(restore):.2f} s, {get_ratio:.2f} of the gets, {filed_ratio:.2f} into a file",
                    "1.3",
                ),
                (f"sent when {changed / total:.1%} changed", f"{share:.2%} in {seconds:.2f} s", "6 %"),
            ]
            figures = {
                "bytes": path.stat().st_size,
                "put_s": raw_put,
                "commit_s": commit,
                "get_s": raw_get,
                "get_into_file_s": filed,
                "restore_s": restore,
                "commit_ratio": put_ratio,
                "restore_ratio": get_ratio,
                "restore_file_ratio": filed_ratio,
                "changed_share_sent": share,
                "changed_commit_s": seconds,
            }
            report("checkpoints-upload", rows, figures)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    mode = modes.add_parser("upload")
    mode.add_argument("--megabytes", type=int, default=500)
    mode.add_argument("--repeats", type=int, default=3)
    mode = modes.add_parser("savings")
    mode.add_argument("--apart", type=int, default=20, help="steps from one checkpoint to the next")
    mode.add_argument("--warm", type=int, default=100, help="steps before the first one")
    given = parser.parse_args()
    if given.mode == "upload":
        asyncio.run(upload(given.megabytes, given.repeats))
    else:
        from loadtest.checkpoint_savings import savings

        savings(given.apart, given.warm)


if __name__ == "__main__":
    main()
