"""Training from a store with faults: 50 ms of latency, 1% errors, and ten seconds in which nothing comes at all.

    python -m loadtest.data --only cache

A rank (a process of its own, with the reader and the plan of the Trainer) takes steps that need 80% of what the link
to the store carries; the node's cache, which cannot hold the whole dataset, is filled over it. A step has stalled
when its batch was waited for longer than a tenth of a step. The first steps, for which nothing is here yet,
count like all others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.data.proxy import FaultProxy
from loadtest.data.stored import be_quiet, node, store
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.worker.cache.late_input import LateInput
from services.worker.ranks.control_socket import ControlSocket
from trainbus.data.dataset import Dataset
from trainbus.data.loader import Prefetcher
from trainbus.data.order import LaneOrder
from trainbus.data.read_plan import ReadPlan
from trainbus.data.sampler import Sampler
from trainbus.data.shard_prefetch import ShardPrefetcher
from trainbus.embedded.servers import S3Server

LATENCY_S, ERROR_SHARE = 0.05, 0.01
#: Of the link's bandwidth that training needs.
DEMAND = 0.8
#: A step has stalled that waited longer than this share of one.
STALL_SHARE = 0.1
SAMPLES, SAMPLE_BYTES, BATCH = 32, 16 * 1024, 16


@dataclass(frozen=True)
class Scene:
    """What is measured."""

    shards: int = 200
    epochs: int = 4
    link_bytes_per_s: float = 4 * 2**20
    freeze_s: float = 10.0
    #: When the store stands still, in seconds from the first step.
    freeze_at_s: float = 60.0
    #: Share of the dataset that the cache holds.
    cache_share: float = 0.6
    lanes: int = 8
    window: int = 2

    @property
    def step_s(self) -> float:
        return BATCH * SAMPLE_BYTES / (DEMAND * self.link_bytes_per_s)


def rank(scene: Scene, folder: Path, agent: Path, dataset_id: str) -> list[float]:
    """Be a rank; return how long each step's batch was waited for."""
    arrival = ShardPrefetcher(agent, folder)
    dataset = Dataset(folder, dataset_id, arrive=arrival.wait)
    split, sizes = dataset.split("train"), dataset.shard_samples("train")
    end = scene.epochs * len(split)

    def order() -> LaneOrder:
        return LaneOrder(dataset_id, sizes, 1, lanes=scene.lanes, window=scene.window)

    sampler = Sampler(order(), BATCH, end)
    arrival.set_plan("train", ReadPlan(order(), BATCH, 1, [0], end).needs)
    arrival.set_position(0)
    batches = (split.gather(sampler.slice(at, 1, 0).ids) for at in range(0, end, BATCH))
    waits: list[float] = []
    with closing(Prefetcher(batches)) as ready:
        while True:
            asked_s = time.perf_counter()
            if next(ready, None) is None:
                return waits
            waits.append(time.perf_counter() - asked_s)
            if len(waits) == 1:
                print("first", flush=True)
            time.sleep(scene.step_s)  # the accelerator's share
            arrival.set_position(len(waits) * BATCH)


async def _run(scene: Scene, folder: Path) -> tuple[list[float], float, FaultProxy]:
    """BatchTimings of all steps, and bytes that left the store as a multiple of the dataset, per epoch."""
    server = S3Server(folder / "s3", free_ports(1)[0], "key", "secret")
    server.start()
    settings = Settings.model_validate(
        {"s3_endpoint": server.endpoint, "s3_access_key": "key", "s3_secret_key": "secret"}
    )
    try:
        async with ObjectStore(settings) as objects:
            await objects.ensure_bucket(settings.bucket_datasets)
            stored = await store(
                objects, settings.bucket_datasets, shards=scene.shards, samples=SAMPLES, sample_bytes=SAMPLE_BYTES
            )
        link = FaultProxy(
            server.port, latency_s=LATENCY_S, error_share=ERROR_SHARE, bytes_per_s=scene.link_bytes_per_s, seed=1
        )
        async with link as proxy:
            through = settings.model_copy(update={"s3_endpoint": proxy.endpoint})
            room = int(scene.cache_share * stored.size_bytes)
            async with (
                node(through, folder / "cache", max_bytes=room) as (cache, _),
                cache.pin_files() as pins,
            ):
                view = await cache.dataset(stored.manifest_uri, stored.dataset_id, folder / "view", pins)
                async with ControlSocket(folder / "agent.sock", 1, lambda: None, LateInput.of(view)) as control:
                    waits = await _rank_process(scene, folder / "view", control.path, stored.dataset_id, proxy)
            return waits, proxy.egress_bytes / (scene.epochs * stored.size_bytes), proxy
    finally:
        server.stop()


async def _rank_process(scene: Scene, view: Path, agent: Path, dataset_id: str, proxy: FaultProxy) -> list[float]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loadtest.data.cache",
        *("--folder", str(view), "--agent", str(agent), "--dataset", dataset_id, "--scene", json.dumps(asdict(scene))),
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"first\n"
        asyncio.get_running_loop().call_later(scene.freeze_at_s, proxy.freeze, scene.freeze_s)
        answer = await process.stdout.readline()
        await process.wait()
        waits: list[float] = json.loads(answer)
        return waits
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def measure(quick: bool = False) -> list[tuple[str, str, str, bool]]:
    """Train through the faults and count the steps that waited."""
    be_quiet()
    small = Scene(shards=60, epochs=5, link_bytes_per_s=8 * 2**20, freeze_s=1.0, freeze_at_s=12.0, lanes=4)
    scene = small if quick else Scene()
    with tempfile.TemporaryDirectory() as name:
        waits, egress, proxy = asyncio.run(_run(scene, Path(name)))
    stalled = [wait_s for wait_s in waits if wait_s > STALL_SHARE * scene.step_s]
    share = len(stalled) / len(waits)
    late = [wait_s for wait_s in waits[BATCH:] if wait_s > STALL_SHARE * scene.step_s]
    return [
        (
            f"steps that stall at 80% of the bandwidth; 50 ms, 1% errors, {scene.freeze_s:g} s without a byte",
            f"{100 * share:.2f}% ({len(stalled)} of {len(waits)}, {len(late)} of them after the first {BATCH}; "
            f"{sum(stalled):.1f} s in all; {proxy.faults} faults in {proxy.answers} answers)",
            "at most 1%",
            share <= 0.01,
        ),
        (
            f"egress an epoch, with room for {100 * scene.cache_share:.0f}% of the dataset",
            f"{egress:.3f} times the dataset",
            "at most 1.05 times",
            egress <= 1.05,
        ),
    ]


def main() -> None:
    """Be the rank that ``measure`` starts."""
    parser = argparse.ArgumentParser(description="The rank of loadtest.data.cache; started by it.")
    for name in ("folder", "agent", "dataset", "scene"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    waits = rank(Scene(**json.loads(given.scene)), Path(given.folder), Path(given.agent), given.dataset)
    print(json.dumps(waits), flush=True)


if __name__ == "__main__":
    main()
