"""The data of a script is staged on its nodes before it is placed: answered once, pinned, and no run's failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from contracts.base import Fact
from contracts.envelope import Envelope
from contracts.events.node import NodeJoined, NodeStaged
from contracts.events.run import Member, RunCancelled, RunExited, RunPlaced, RunPrepared, RunStaging
from loadtest.data.stored import Stored, store
from services.kit.bus import Message
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.worker.cache.node_cache import NodeCache
from services.worker.data_folders.data_staging import DataStaging
from tests.kit.support import until
from tests.scheduler.world import spec
from tests.worker.conftest import World
from tests.worker.test_data_folders import data_folders

ENVELOPE = Envelope(id="e", source="s", type="t", time=datetime(2026, 1, 1, tzinfo=UTC), correlation_id="c")


def prepared(stored: Stored, run_id: str = "r1") -> RunPrepared:
    data = {"manifest_uri": stored.manifest_uri, "train_samples": stored.row_count}
    return RunPrepared.model_validate({"run_id": run_id, "dataset_id": stored.dataset_id, **data})


def staging(stored: Stored, run_id: str = "r1", limit_s: float = 600.0, node_ids: tuple[str, ...] = ("n1",)) -> Fact:
    return RunStaging(run_id=run_id, node_ids=node_ids, dataset=prepared(stored, run_id), limit_s=limit_s)


def placed(node_id: str) -> RunPlaced:
    member = Member(node_id=node_id, slots=(0,), ranks=(0,))
    when: dict[str, Any] = {"decided_at_sequence": 0, "decided_at": datetime(2026, 1, 1, tzinfo=UTC)}
    return RunPlaced(
        run_id="r1", generation=1, members=(member,), world_size=1, spec=spec(command=True), resume=None, **when
    )


class Node:
    """A node's cache with its staging; what it publishes is recorded."""

    def __init__(self, cache: NodeCache, folders: Any) -> None:
        self.cache, self.published = cache, list[NodeStaged]()
        context = SimpleNamespace(settings=SimpleNamespace(node_id="n1"), bus=self, cache=cache, data_folders=folders)
        self.staging = DataStaging(context, lambda: "life")  # type: ignore[arg-type]

    async def publish(self, fact: NodeStaged, cause: Envelope) -> None:
        self.published.append(fact)

    def handle(self, fact: Fact) -> None:
        self.staging.handle_fact(Message(fact, ENVELOPE, fact.subject))

    async def wait_for_answers(self, count: int) -> list[NodeStaged]:
        await until(lambda: len(self.published) >= count, "the answers")
        return self.published

    def has_files(self) -> bool:
        """Whether the files outlive an eviction of all that is not pinned."""
        self.cache.evict()
        return bool(self.cache.files.trees.names())


@asynccontextmanager
async def made_node(settings: Settings, folder: Path, max_bytes: int = 1) -> AsyncIterator[Node]:
    async with data_folders(settings, folder, max_bytes=max_bytes) as (cache, folders):
        node = Node(cache, folders)
        try:
            yield node
        finally:
            await node.staging.close()


async def test_staged_files_are_kept_while_the_run_is_here_and_no_longer(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets)
    async with made_node(s3_settings, tmp_path / "cache") as node:
        node.handle(staging(stored))
        (answer,) = await node.wait_for_answers(1)
        assert (answer.run_id, answer.dataset_ids, answer.error) == ("r1", (stored.dataset_id,), "")
        assert (answer.incarnation, answer.size_bytes) == ("life", 4 * 8 * 1000)
        # A second delivery stages nothing, and pins nothing twice.
        node.handle(staging(stored))
        node.handle(placed("n1"))
        assert node.has_files()
        node.handle(RunExited(run_id="r1", generation=1, node_id="n1", outcome="succeeded"))
        await until(lambda: not node.has_files(), "the files to go")
        assert len(node.published) == 1


async def test_a_run_that_goes_elsewhere_or_is_cancelled_keeps_no_files(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets)
    ends = (placed("n2"), RunCancelled(run_id="r1", reason="no more"))
    async with made_node(s3_settings, tmp_path / "cache") as node:
        for number, end in enumerate(ends, start=1):
            node.handle(staging(stored))
            await node.wait_for_answers(number)
            assert node.has_files()
            node.handle(end)
            await until(lambda: not node.has_files(), "the files to go")
        # The limit of the staging is over, and the run was not placed.
        node.handle(staging(stored, limit_s=0.001))
        await node.wait_for_answers(3)
        await until(lambda: not node.has_files(), "the files to go")


async def test_what_cannot_be_staged_is_answered_with_the_reason(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets)
    await objects.delete(stored.manifest_uri)
    async with made_node(s3_settings, tmp_path / "cache") as node:
        node.handle(staging(stored, node_ids=("n2",)))
        node.handle(staging(stored))
        (answer,) = await node.wait_for_answers(1)
        assert "is not in the store" in answer.error
        assert (answer.dataset_ids, answer.size_bytes) == ((), 0)


async def test_runs_wait_for_each_other_and_a_cancelled_one_for_none(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets)
    async with made_node(s3_settings, tmp_path / "cache", max_bytes=2**30) as node:
        files = node.cache.files
        async with files.lock(files.trees.path(stored.dataset_id)):
            for number in range(5):
                node.handle(staging(stored, f"r{number}"))
            node.handle(RunCancelled(run_id="r0", reason="no more"))
            node.handle(RunCancelled(run_id="r4", reason="no more"))
            await asyncio.sleep(0)
        answers = await node.wait_for_answers(3)
        assert {each.run_id for each in answers} == {"r1", "r2", "r3"}


async def test_a_restarted_agent_has_the_files_and_stages_nothing_that_it_missed(
    world: World, agent_process: Any
) -> None:
    first = await store(world.objects, world.settings.bucket_datasets, seed=1)
    missed = await store(world.objects, world.settings.bucket_datasets, seed=2)
    process = agent_process()
    await wait_for(world, NodeJoined, 1)
    await world.bus.publish(staging(first, "first"))
    answer = await wait_for(world, NodeStaged, 1)
    assert (answer.run_id, answer.dataset_ids) == ("first", (first.dataset_id,))
    process.kill()
    process.wait()
    await world.bus.publish(staging(missed, "missed"))
    agent_process()
    joined = await wait_for(world, NodeJoined, 2)
    assert joined.data_folders == (first.dataset_id,)
    assert joined.incarnation != answer.incarnation
    await world.bus.publish(staging(first, "again"))
    assert (await wait_for(world, NodeStaged, 2)).run_id == "again"


async def wait_for(world: World, kind: type[Any], count: int) -> Any:
    found: list[Any] = []

    async def published() -> bool:
        found[:] = await world.bus.read_history(f"node.n1.{kind.fact}")
        return len(found) >= count

    await until(published, f"{kind.__name__} #{count}", 90)
    return found[count - 1].event
