"""Ranks get shards from a restarted agent, fail on a corrupted one, and stop while they wait for one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from contracts.datasets import shard_uri
from contracts.events.run import RunExited, RunPrepared, RunReleased, RunStopping
from loadtest.data.proxy import FaultProxy
from loadtest.data.stored import Stored, store
from tests.kit.support import until
from tests.worker.conftest import World, ranks_of
from trainbus.embedded.servers import S3Server


def prepared(stored: Stored) -> RunPrepared:
    return RunPrepared(
        run_id="r1", dataset_id=stored.dataset_id, manifest_uri=stored.manifest_uri, train_samples=stored.row_count
    )


async def joined(world: World) -> bool:
    return bool(await world.bus.read_history("node.n1.joined"))


async def accepts(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True


async def test_restarted_agent_serves_shards_to_running_ranks(
    world: World, agent_process: Any, s3_server: S3Server
) -> None:
    stored = await store(world.objects, world.settings.bucket_datasets, shards=12, sample_bytes=20_000)
    committing = asyncio.create_task(world.commit_all())
    cache = world.settings.data_dir.resolve() / "cache" / "shards"
    async with FaultProxy(s3_server.port, bytes_per_s=300_000) as proxy:
        world.settings = world.settings.model_copy(update={"s3_endpoint": proxy.endpoint})
        process = agent_process()
        await until(lambda: joined(world), "the agent to join", 60)
        await world.place(params={"steps": 24, "read": True}, dataset=prepared(stored))
        await until(lambda: any(cache.glob("*/.*.part")), "a download", 60)
        await world.wait_steps(2)
        process.kill()
        process.wait()
        ranks = ranks_of(world.settings.data_dir.resolve())
        agent_process()
        exited = await world.wait_for(RunExited)
        assert ranks, "the rank waits on while there is no agent"
        folder = world.settings.data_dir / "runs" / "r1" / "g1" / "dataset"
        await until(lambda: not folder.exists(), "the links to be removed")
    committing.cancel()
    assert (exited.outcome, exited.step) == ("succeeded", 24), exited
    assert sorted(await world.steps()) == [*range(1, 25)]
    assert not list(cache.glob("*/.*"))


async def test_an_agent_that_restarts_while_the_store_is_away_serves_shards_once_it_is_back(
    world: World, agent_process: Any, s3_server: S3Server
) -> None:
    stored = await store(world.objects, world.settings.bucket_datasets, shards=12, sample_bytes=20_000)
    committing = asyncio.create_task(world.commit_all())
    data_dir = world.settings.data_dir.resolve()
    cache = data_dir / "cache"
    async with FaultProxy(s3_server.port, bytes_per_s=300_000) as proxy:
        world.settings = world.settings.model_copy(update={"s3_endpoint": proxy.endpoint})
        process = agent_process()
        await until(lambda: joined(world), "the agent to join", 60)
        await world.place(params={"steps": 24, "read": True}, dataset=prepared(stored))
        await world.wait_steps(2)
        process.kill()
        process.wait()
        (cache / "datasets" / stored.dataset_id / "manifest.json").unlink()
        for path in (cache / "shards").glob("*/*"):
            path.unlink()
        proxy.error_share = 1.0
        agent_process()
        control = Path(json.loads((data_dir / "runs" / "r1" / "g1" / "launch.json").read_bytes())["socket"])
        # The ranks can be told to stop although the store does not answer.
        await until(lambda: accepts(control), "the agent to listen", 90)
        proxy.error_share = 0.0
        exited = await world.wait_for(RunExited)
    committing.cancel()
    assert (exited.outcome, exited.step) == ("succeeded", 24), exited


async def test_run_with_a_corrupted_shard_fails_and_names_it(world: World, agent: Any) -> None:
    stored = await store(world.objects, world.settings.bucket_datasets, shards=3)
    shard = stored.shards()[1]
    await world.objects.put(shard_uri(stored.bucket, shard.sha256), bytes(shard.size_bytes))
    await agent()
    await world.place(params={"steps": 3, "read": True}, dataset=prepared(stored))
    exited = await world.wait_for(RunExited)
    assert exited.outcome == "failed"
    assert f"shard {shard.path} is damaged in the store" in exited.reason
    assert "Shard the dataset again" in exited.reason
    assert await world.steps() == [1]


async def test_ranks_that_wait_for_a_shard_obey_a_stop(world: World, agent: Any, s3_server: S3Server) -> None:
    stored = await store(world.objects, world.settings.bucket_datasets, shards=3)
    async with FaultProxy(s3_server.port) as proxy:
        await agent(s3_endpoint=proxy.endpoint)
        await world.place(params={"steps": 100_000, "read": True, "step_s": 0.02}, dataset=prepared(stored))
        await world.wait_steps(3)
        shards = world.settings.data_dir.resolve() / "cache" / "shards"
        proxy.freeze(300)
        for path in shards.glob("*/*"):
            path.unlink()
        steps = len(await world.steps())
        await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="preempted", message="room", grace_s=1))
        released = await world.wait_for(RunReleased)
        assert not released.clean
        assert released.step >= steps
        proxy.freeze(0)
