"""The agent with the real Trainer: forked from the warm server, preempted, resumed smaller, evaluated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from contracts.datasets import dataset_uri, shard_uri
from contracts.events.checkpoint import CheckpointStaged
from contracts.events.node import NodeUnfit
from contracts.events.run import CheckpointRef, RunExited, RunPrepared, RunReleased, RunStarted, RunStopping
from services.kit.store.files import hash_file
from services.worker.app import build
from tests.kit.support import until as eventually
from tests.trainbus.support import LINEAR_TASK, linear_dataset
from tests.worker.conftest import World, package, ranks_of, until
from tests.worker.cuttable_proxy import CuttableProxy


async def prepare(world: World, folder: Path) -> RunPrepared:
    """Have dataset and code in the store."""
    dataset = linear_dataset(folder)
    bucket = world.settings.bucket_datasets
    manifest_uri = dataset_uri(bucket, dataset.dataset_id)
    await world.objects.upload(dataset.folder / "manifest.json", manifest_uri)
    for file in dataset.folder.rglob("*"):
        if file.is_file():
            await world.objects.upload(file, shard_uri(bucket, hash_file(file)))
    await world.upload_code(package({"task.py": LINEAR_TASK.encode()}))
    return RunPrepared(run_id="r1", dataset_id=dataset.dataset_id, manifest_uri=manifest_uri, train_samples=100)


@asynccontextmanager
async def running_agent(world: World, **changes: Any) -> AsyncIterator[None]:
    """Run the agent with the warm server, from when it has joined to when it has stopped."""
    service = build(world.settings.model_copy(update={"warm": True, **changes}))
    running = asyncio.create_task(service.run())
    try:
        await until(lambda: service.check_readiness().get("joined", False), 90)
        yield
    finally:
        service.stopping.set()
        await asyncio.wait_for(running, 90)


@asynccontextmanager
async def committed_checkpoints(world: World) -> AsyncIterator[None]:
    """Commit whatever is staged meanwhile."""
    committing = asyncio.create_task(world.commit_all())
    try:
        yield
    finally:
        committing.cancel()


async def test_training_is_stopped_resumed_on_fewer_slots_and_evaluated(world: World, tmp_path: Path) -> None:
    prepared = await prepare(world, tmp_path / "dataset")
    async with running_agent(world, commit_timeout_s=10.0), committed_checkpoints(world):
        fields = {"task": "task:Linear", "grace_s": 60, "dataset": prepared}
        # It has no end of its own before it is stopped.
        training = {"max_steps": 1_000_000, "global_batch": 16, "checkpoint_every_steps": 50}
        await world.place(slots=(0, 1), training=training, **fields)
        await world.wait_steps(10)
        await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="preempted", message="room", grace_s=60))
        released: RunReleased = await world.wait_for(RunReleased, timeout_s=90)
        assert released.clean, released
        resume = await _last_commit(world)
        assert resume.step == released.step
        steps = released.step + 200
        training["max_steps"] = steps
        await world.place(generation=2, resume=resume, training=training, **fields)
        exited: Any = await world.wait_for(RunExited, timeout_s=90)
        assert (exited.outcome, exited.step, exited.samples_consumed) == ("succeeded", steps, steps * 16), exited
        # No step twice, none left out, over both generations.
        assert sorted(set(await world.steps())) == [*range(1, steps + 1)]

        evaluate = {"run_id": "r1", "checkpoint_uri": (await _last_commit(world)).uri, "split": "test"}
        await world.place("e1", kind="evaluate", evaluate=evaluate, training=None, **fields)
        measured: Any = await world.wait_for(RunExited, "e1", timeout_s=90)
        assert measured.outcome == "succeeded", measured
        assert measured.metrics
    assert not ranks_of(world.settings.data_dir.resolve())


async def test_stop_with_an_uncommitted_checkpoint_loses_no_step(world: World, tmp_path: Path) -> None:
    """The node keeps what the ranks wrote; a generation that could not be prepared changes nothing about it."""
    prepared = await prepare(world, tmp_path / "dataset")
    survivors = world.settings.data_dir.resolve() / "runs" / "r1" / "survivors"
    async with running_agent(world), AsyncExitStack() as stack:
        training: dict[str, Any] = {"max_steps": 1_000_000, "global_batch": 16, "checkpoint_every_steps": 400}
        training |= {"logical_ranks": 2, "strategy": "zero1", "validate_every_steps": 100_000}
        fields: dict[str, Any] = {"task": "task:Linear", "grace_s": 10, "dataset": prepared, "training": training}
        await world.place(slots=(0, 1), **fields)
        await world.wait_steps(10)
        await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="preempted", message="room", grace_s=10))
        released: RunReleased = await world.wait_for(RunReleased)
        assert not released.clean, released
        assert [path.name for path in survivors.iterdir()] == ["g1"]
        nowhere = {"uri": "s3://none/packages/" + "0" * 64 + ".tar.gz", "sha256": "0" * 64}
        await world.place(generation=2, code=nowhere, **fields)
        await world.wait_for(RunExited)
        await stack.enter_async_context(committed_checkpoints(world))
        steps = training["max_steps"] = released.step + 200
        await world.place(generation=3, **fields)
        started: Any = await world.wait_for(RunStarted, count=2)
        assert (started.generation, started.resumed_from, started.step) == (3, "memory", released.step)
        exited: Any = await world.wait_for(RunExited, count=2, timeout_s=300)
        assert (exited.outcome, exited.step) == ("succeeded", steps), exited
        assert sorted(set(await world.steps())) == [*range(1, steps + 1)]
        await until(lambda: not any(survivors.iterdir()), 90)  # the third has a checkpoint in the store


#: Diverges once, at a step after the first checkpoint.
DIVERGING_TASK = """
from pathlib import Path

import task


class DivergingLinear(task.Linear):
    def __init__(self, flag):
        super().__init__()
        self.flag, self.steps = Path(flag), 0

    def loss(self, model, batch):
        self.steps += model.training
        if self.steps == 15 and not self.flag.exists():
            self.flag.touch()
            return super().loss(model, batch) * float("nan")
        return super().loss(model, batch)
"""


async def test_a_retry_after_nan_begins_with_a_committed_checkpoint(world: World, tmp_path: Path) -> None:
    prepared = await prepare(world, tmp_path / "dataset")
    await world.upload_code(package({"task.py": LINEAR_TASK.encode(), "diverging.py": DIVERGING_TASK.encode()}))
    async with running_agent(world), committed_checkpoints(world):
        training = {"max_steps": 30, "global_batch": 16, "checkpoint_every_steps": 10, "validate_every_steps": 100_000}
        params = {"flag": str(tmp_path / "flag")}
        fields: dict[str, Any] = {"task": "diverging:DivergingLinear", "dataset": prepared, "training": training}
        await world.place(params=params, **fields)
        failed: Any = await world.wait_for(RunExited, timeout_s=90)
        assert failed.outcome == "failed"
        assert "train/loss is nan at step 15" in failed.reason
        resume = await _last_commit(world)
        assert resume.step == 10
        await world.place(generation=2, resume=resume, params=params, **fields)
        started: Any = await world.wait_for(RunStarted, count=2, timeout_s=90)
        assert (started.resumed_from, started.step) == ("checkpoint", 10)
        exited: Any = await world.wait_for(RunExited, count=2, timeout_s=90)
        assert (exited.outcome, exited.step) == ("succeeded", 30), exited


#: One bit of one weight of the second rank flips.
DRIFTING_TASK = """
import os

import torch

import task


class DriftingLinear(task.Linear):
    def optimizer(self, model):
        self.steps, self.weights = 0, list(model.parameters())
        optimizer = super().optimizer(model)
        optimizer.register_step_post_hook(self.count)
        return optimizer

    def count(self, *_):
        self.steps += 1
        if self.steps == 15 and os.environ["RANK"] == "1":
            with torch.no_grad():
                self.weights[0].view(-1).view(torch.uint8)[0] ^= 1
"""


async def test_a_device_that_computes_wrongly_is_unfit(world: World, tmp_path: Path) -> None:
    prepared = await prepare(world, tmp_path / "dataset")
    await world.upload_code(package({"task.py": LINEAR_TASK.encode(), "drifting.py": DRIFTING_TASK.encode()}))
    async with running_agent(world, slots=4), committed_checkpoints(world):
        training = {"max_steps": 30, "global_batch": 16, "checkpoint_every_steps": 10}
        training |= {"validate_every_steps": 100_000}
        fields: dict[str, Any] = {"task": "drifting:DriftingLinear", "dataset": prepared, "training": training}
        await world.place(slots=(2, 3, 0), **fields)
        failed: Any = await world.wait_for(RunExited, timeout_s=90)
        assert (failed.outcome, failed.infrastructure_failure) == ("failed", True)
        assert "that of rank 1 is not the others' after step 20" in failed.reason
        assert (await _last_commit(world)).step == 10
        facts = await world.facts(world.settings.node_id, subject="node.{}.*")
        (unfit,) = [fact for fact in facts if isinstance(fact, NodeUnfit)]
        assert unfit.slots == (3,)


async def _last_commit(world: World) -> CheckpointRef:
    await world.wait_for(CheckpointStaged)  # ranks that fail end before what they wrote is uploaded
    staged = [fact for fact in await world.facts() if isinstance(fact, CheckpointStaged)][-1]
    return CheckpointRef(
        uri=f"s3://{world.settings.bucket_models}/default/r1/checkpoints/epoch_1/step_{staged.step}.json",
        step=staged.step,
        epoch=staged.epoch,
        samples_consumed=staged.samples_consumed,
    )


async def test_a_pause_longer_than_the_lease_changes_nothing_in_the_state(world: World, tmp_path: Path) -> None:
    """The bus is away from the agent for longer: the ranks stop, and the run goes on with the very state they had."""
    prepared = await prepare(world, tmp_path / "dataset")
    # How many steps it takes is known only after the pause: the schedule must not depend on it.
    task = LINEAR_TASK.replace("CosineAnnealingLR(optimizer, total_steps + 1)", "ConstantLR(optimizer, factor=1.0)")
    assert task != LINEAR_TASK
    await world.upload_code(package({"task.py": task.encode()}))
    async with (
        CuttableProxy(int(world.settings.nats_url.rpartition(":")[2])) as proxy,
        running_agent(world, nats_url=proxy.url, lease_ttl_s=4.0),
        committed_checkpoints(world),
    ):
        fields = {"task": "task:Linear", "grace_s": 60, "dataset": prepared}
        training = {"max_steps": 1_000_000, "global_batch": 16, "checkpoint_every_steps": 100_000, "seed": 3}
        await world.place(training=training, **fields)
        await world.wait_steps(10)
        proxy.cut()
        await until(lambda: not ranks_of(world.settings.data_dir.resolve()), 90)
        assert await world.ends() == []
        proxy.heal()
        released: RunReleased = await world.wait_for(RunReleased, timeout_s=90)
        await eventually(partial(_has_joined, world, 2), "the agent to join again", 90)
        training["max_steps"] = released.step + 50
        # As the scheduler does: from the last committed checkpoint, unless the node has newer state of its own.
        resume = await _last_commit(world) if released.clean else None
        await world.place(generation=2, resume=resume, training=training, **fields)
        await world.place("undisturbed", slots=(1,), training=training, **fields)
        for run_id in ("r1", "undisturbed"):
            exited: Any = await world.wait_for(RunExited, run_id, timeout_s=90)
            assert (exited.outcome, exited.step) == ("succeeded", training["max_steps"]), exited
        started = [fact for fact in await world.facts() if isinstance(fact, RunStarted)]
        assert started[-1].step > 0
        assert await _last_tensors(world, "r1") == await _last_tensors(world, "undisturbed")


async def _has_joined(world: World, count: int) -> bool:
    return len(await world.bus.read_history("node.n1.joined")) >= count


async def _last_tensors(world: World, run_id: str) -> dict[str, str]:
    """Return the hashes of the tensors of a run's last checkpoint."""
    staged = [fact for fact in await world.facts(run_id) if isinstance(fact, CheckpointStaged)]
    found = {file.path: file.sha256 for file in staged[-1].files if file.path.endswith(".safetensors")}
    assert found
    return found
