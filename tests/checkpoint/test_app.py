"""The checkpoint service on a real nats-server and a real S3."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio

from contracts.base import Fact
from contracts.events.checkpoint import CheckpointCommitted, CheckpointStaged
from contracts.events.run import Member, RunCompleted, RunPlaced
from contracts.manifest import Blob
from contracts.spec.training import Retention
from services.checkpoint.app import MAX_ATTEMPTS, Committer, build
from services.checkpoint.core.commit import manifest_uri
from services.checkpoint.garbage_collection import collect_garbage
from services.checkpoint.settings import CheckpointSettings
from services.kit.bus import Bus, Message, TransientError
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.kit.store.uris import split_uri
from tests.checkpoint.facts import RUN, blob_uri, content, file, placed, staged, support
from tests.manual_clock import ManualClock


class Killed(BaseException):
    """Stands for kill -9: nothing in the service catches it."""


class Rig:
    """A committer on real servers, and the facts that agents and scheduler would publish."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings) -> None:
        self.bus, self.objects = bus, objects
        self.settings = CheckpointSettings.of(settings)
        self.bucket = settings.bucket_models
        self.committer = self.restarted()

    def restarted(self) -> Committer:
        self.committer = Committer(self.bus, self.objects, self.settings)
        return self.committer

    async def upload(self, part: CheckpointStaged) -> None:
        for each in part.files:
            rank = int(each.path.split("_")[1].split(".")[0])
            await self.objects.put(each.chunks[0].uri, content(rank, part.step, part.generation))

    async def stage(self, step: int = 100, generation: int = 1, **fields: Any) -> list[Message[Any]]:
        """Both nodes' parts, uploaded and published; the messages as a consumer gets them."""
        messages = []
        for node in ("a", "b"):
            part = staged(self.bucket, node, step, generation, **fields)
            await self.upload(part)
            messages.append(await self.publish(part))
        return messages

    async def overwrite(self, uri: str, body: bytes) -> None:
        """Put other bytes under a blob's name, as no client of ours would."""
        bucket, key = split_uri(uri)
        await self.objects._client.put_object(Bucket=bucket, Key=key, Body=body)

    async def publish(self, fact: Fact) -> Message[Any]:
        await self.bus.publish(fact)
        stored = await self.bus.get_last_message(fact.subject)
        assert stored is not None
        return stored

    async def place(self, generation: int = 1, **fields: Any) -> None:
        """Publish a placement, and what the log has before one."""
        run = placed(generation, **fields)
        for fact in (*support(run), run):
            await self.bus.publish(fact)

    async def deliver(self, messages: list[Message[Any]]) -> None:
        for message in messages:
            await self.committer.on_checkpoint_staged(message)

    async def facts(self, name: str, run: str = RUN) -> list[Any]:
        return [received.event for received in await self.bus.read_history(f"run.{run}.{name}")]

    async def commits(self) -> list[tuple[int, int]]:
        return [(c.generation, c.checkpoint.step) for c in await self.facts("checkpoint_committed")]

    async def manifests(self) -> list[str]:
        found = [info.key async for info in self.objects.list(f"s3://{self.bucket}/digits/")]
        return [key.rsplit("/", 1)[1] for key in found]

    def die_publishing(self, monkeypatch: pytest.MonkeyPatch, kind: type[Fact], *, after: bool = False) -> None:
        """Kill the service once, just before or after it publishes ``kind``."""
        publish = self.bus.publish

        async def dying(fact: Fact, *args: Any, **kwargs: Any) -> Any:
            if isinstance(fact, kind):
                monkeypatch.setattr(self.bus, "publish", publish)
                if after:
                    await publish(fact, *args, **kwargs)
                raise Killed
            return await publish(fact, *args, **kwargs)

        monkeypatch.setattr(self.bus, "publish", dying)


@pytest_asyncio.fixture
async def rig(make_bus: Callable[..., Any], objects: ObjectStore, s3_settings: Settings) -> Rig:
    return Rig(await make_bus(), objects, s3_settings)


async def test_the_running_service_commits_once_what_two_nodes_staged(
    rig: Rig, s3_settings: Settings, bus: Bus
) -> None:
    services = [build(s3_settings), build(s3_settings)]
    tasks = [asyncio.create_task(service.run()) for service in services]
    try:
        await rig.place()
        await rig.stage(metrics={"validation/loss": 0.5})
        async with asyncio.timeout(90):
            async for batch in bus.follow("FACTS", ("run.*.checkpoint_committed",)):
                if batch:
                    break
        # The same parts again, as new messages: the server no longer remembers their ids.
        for node in ("a", "b"):
            again = staged(rig.bucket, node, metrics={"validation/loss": 0.5})
            await bus.js.publish(again.subject, again.model_dump_json().encode())
        async with asyncio.timeout(90):
            info = await bus.js.consumer_info("FACTS", "checkpoint")
            while info.num_pending or info.num_ack_pending:
                await asyncio.sleep(0.02)
                info = await bus.js.consumer_info("FACTS", "checkpoint")
    finally:
        for service in services:
            service.stopping.set()
        await asyncio.gather(*tasks)
    [commit] = await rig.facts("checkpoint_committed")
    assert commit.checkpoint.step == 100
    assert commit.metrics == {"validation/loss": 0.5}
    manifest = json.loads(await rig.objects.get(commit.checkpoint.uri))
    assert sum(each["size_bytes"] for each in manifest["files"]) == commit.size_bytes
    assert await rig.facts("checkpoint_refused") == []
    cause = await bus.get_last_message(f"run.{RUN}.checkpoint_committed")
    assert cause is not None
    assert cause.envelope.causation_id.startswith(f"run/{RUN}/checkpoint_staged/1/100/")


async def test_one_part_alone_commits_nothing(rig: Rig) -> None:
    await rig.place()
    part = staged(rig.bucket, "a")
    await rig.upload(part)
    await rig.deliver([await rig.publish(part)])
    assert await rig.commits() == []
    assert await rig.manifests() == []


async def test_what_is_staged_before_it_is_placed_waits(rig: Rig) -> None:
    messages = await rig.stage()
    with pytest.raises(TransientError):
        await rig.deliver(messages)
    await rig.place()
    await rig.deliver(messages)
    assert await rig.commits() == [(1, 100)]


async def test_a_zombie_cannot_commit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.place(1)
    messages = await rig.stage()
    # Placed again while the service verifies: the fence stops it.
    put = rig.objects.put

    async def placed_meanwhile(*args: Any, **kwargs: Any) -> None:
        await put(*args, **kwargs)
        await rig.place(2)

    monkeypatch.setattr(rig.objects, "put", placed_meanwhile)
    await rig.deliver(messages[1:])
    monkeypatch.undo()
    assert await rig.commits() == []
    assert await rig.manifests() == [], "its manifest is withdrawn"
    await rig.deliver(messages)
    await rig.deliver(await rig.stage(110, 1))
    assert await rig.commits() == []
    await rig.deliver(await rig.stage(100, 2))
    assert await rig.commits() == [(2, 100)]


FORGED: dict[str, RunPlaced | None] = {
    "a world of any size": placed(world_size=10**30),
    "a generation that nobody waits for": placed(7),
    "the same generation elsewhere": placed(members=(Member(node_id="c", slots=(0,), ranks=(0, 1, 2, 3)),)),
    "another request": placed(2, retention=Retention(last=1, best=0)),
    "nonsense": None,
}


@pytest.mark.parametrize("when", ["before it is staged", "before it is committed"])
@pytest.mark.parametrize("lie", FORGED)
async def test_a_placement_that_nothing_supports_keeps_no_checkpoint_from_being_committed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, lie: str, when: str
) -> None:
    await rig.place(retention=Retention(last=9, best=0))
    forged = FORGED[lie]

    async def publish_lie() -> None:
        # Without an id: the server drops none of them as known.
        body = b"{" if forged is None else forged.model_dump_json().encode()
        await rig.bus.js.publish(placed().subject, body)

    for step in (100, 110, 120):
        messages = await rig.stage(step)
        if when == "before it is staged":
            await publish_lie()
        else:
            put = rig.objects.put

            async def lie_meanwhile(*args: Any, put: Any = put, **kwargs: Any) -> None:
                await put(*args, **kwargs)
                await publish_lie()

            monkeypatch.setattr(rig.objects, "put", lie_meanwhile)
        await rig.deliver(messages)
        monkeypatch.undo()
    assert await rig.commits() == [(1, 100), (1, 110), (1, 120)]
    assert len(await rig.manifests()) == 3
    assert await rig.facts("checkpoint_refused") == await rig.facts("checkpoint_deleted") == []


async def test_a_kill_between_manifest_and_commit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.place()
    messages = await rig.stage()
    rig.die_publishing(monkeypatch, CheckpointCommitted)
    with suppress(Killed):
        await rig.deliver(messages)
    assert (await rig.commits(), len(await rig.manifests())) == ([], 1)
    rig.restarted()
    await rig.deliver(messages)
    await rig.deliver(messages)
    assert await rig.commits() == [(1, 100)]
    assert len(await rig.manifests()) == 1


async def test_the_next_generation_reaches_the_step_whose_commit_was_never_published(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.place(1)
    messages = await rig.stage()
    rig.die_publishing(monkeypatch, CheckpointCommitted)
    with suppress(Killed):
        await rig.deliver(messages)
    await rig.place(2)
    rig.restarted()
    await rig.deliver(messages)
    await rig.deliver(await rig.stage(100, 2))
    assert await rig.commits() == [(2, 100)]
    [commit] = await rig.facts("checkpoint_committed")
    assert json.loads(await rig.objects.get(commit.checkpoint.uri))["generation"] == 2


@pytest.mark.parametrize("fault", ["missing", "corrupt", "truncated", "another manifest"])
async def test_what_does_not_verify_is_refused_for_good(rig: Rig, fault: str) -> None:
    await rig.place()
    messages = await rig.stage()
    blob = blob_uri(rig.bucket, content(2, 100))
    match fault:
        case "missing":
            await rig.objects.delete(blob)
        case "corrupt":
            await rig.overwrite(blob, content(3, 100))
        case "truncated":
            await rig.overwrite(blob, b"short")
        case _:
            await rig.objects.put(manifest_uri(rig.bucket, "digits", RUN, 1, 100, 1), b"{}")
    await rig.deliver(messages)
    [refused] = await rig.facts("checkpoint_refused")
    assert (refused.step, refused.infrastructure_failure) == (100, True)
    assert ("rank_2.bin" if fault != "another manifest" else "another content") in refused.reason
    await rig.objects.put(blob, content(2, 100))
    await rig.deliver(messages)
    assert await rig.commits() == []
    await rig.deliver(await rig.stage(110))
    assert await rig.commits() == [(1, 110)], "the next one is not disturbed"


async def test_retention_removes_manifests_once_even_when_killed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from contracts.events.checkpoint import CheckpointDeleted
    from contracts.events.model import ModelPromoted

    await rig.place(retention=Retention(last=2, best=1))
    for step, loss in ((10, 0.1), (20, 0.9)):
        await rig.deliver(await rig.stage(step, metrics={"validation/loss": loss}))
    champion = (await rig.facts("checkpoint_committed"))[1].checkpoint.uri
    await rig.publish(ModelPromoted(model="m", version=1, run_id=RUN, checkpoint_uri=champion))
    for step in (30, 40):
        await rig.deliver(await rig.stage(step, metrics={"validation/loss": 0.8}))
    rig.die_publishing(monkeypatch, CheckpointDeleted)
    messages = await rig.stage(50, metrics={"validation/loss": 0.7})
    with suppress(Killed):
        await rig.deliver(messages)
    assert await rig.facts("checkpoint_deleted") == []
    rig.restarted()
    await rig.deliver(messages)
    await rig.deliver(messages)
    assert [fact.step for fact in await rig.facts("checkpoint_deleted")] == [30]
    # The best, the champion's, and the last two.
    assert [int(name.split("_")[1].split(".")[0]) for name in await rig.manifests()] == [10, 20, 40, 50]


async def test_garbage_collection_takes_what_nothing_names_and_nothing_else(
    make_bus: Callable[..., Any], objects: ObjectStore, s3_settings: Settings
) -> None:
    clock = ManualClock()
    later = ManualClock(start=clock.now().replace(year=2100))
    rig = Rig(await make_bus(), objects, s3_settings)
    await rig.place(retention=Retention(last=2, best=0))
    shared = b"frozen weights, the same in every step"
    await objects.put(blob_uri(rig.bucket, shared), shared)
    for step in (10, 20, 30):
        for node in ("a", "b"):
            part = staged(rig.bucket, node, step)
            await rig.upload(part)
            files = (*part.files, file(rig.bucket, "frozen.bin", shared))
            await rig.deliver([await rig.publish(part.model_copy(update={"files": files}))])
    half = staged(rig.bucket, "a", 40)
    await rig.upload(half)
    await rig.publish(half)
    stray = blob_uri(rig.bucket, b"stray")
    await objects.put(stray, b"stray")
    # Nothing is old enough yet.
    assert (await collect_garbage(rig.bus, objects, rig.settings)).blobs == 0
    old = await make_bus("test", clock=later)
    found = await collect_garbage(old, objects, rig.settings)
    gone = [blob_uri(rig.bucket, content(rank, 10)) for rank in range(4)]
    assert [found.blobs, found.manifests] == [5, 0]
    assert not any([await objects.exists(uri) for uri in [*gone, stray]])
    for commit in (await rig.facts("checkpoint_committed"))[1:]:
        for each in json.loads(await objects.get(commit.checkpoint.uri))["files"]:
            for chunk in each["chunks"]:
                assert await objects.hash(chunk["uri"]) == chunk["sha256"]
    assert all([await objects.exists(uri) for each in half.files for uri in each.uris])
    # The half that waited is superseded, and long ago: it goes. A second collection finds nothing.
    await rig.place(2)
    assert (await collect_garbage(old, objects, rig.settings)).blobs == 2
    assert (await collect_garbage(old, objects, rig.settings)).blobs == 0


async def test_garbage_collection_stops_at_a_manifest_it_cannot_read(
    make_bus: Callable[..., Any], objects: ObjectStore, s3_settings: Settings
) -> None:
    later = ManualClock(start=ManualClock().now() + timedelta(days=36500))
    rig = Rig(await make_bus("test", clock=later), objects, s3_settings)
    await objects.put(blob_uri(rig.bucket, b"stray"), b"stray")
    await objects.put(manifest_uri(rig.bucket, "x", "ry", 1, 1, 1), b"scrambled")
    with pytest.raises(ValueError, match="repair or remove it"):
        await collect_garbage(rig.bus, objects, rig.settings)
    assert await objects.exists(blob_uri(rig.bucket, b"stray"))


async def test_a_backlog_is_committed_the_newest_first_without_what_retention_would_delete(rig: Rig) -> None:
    retention = Retention(last=1, best=1, metric="validation/loss", every_steps=300)
    await rig.place(retention=retention)
    messages: list[Message[Any]] = []
    for step in range(100, 1100, 100):
        metrics = {"validation/loss": 0.1 if step == 200 else 0.5}
        messages += await rig.stage(step, final=step == 1000, metrics=metrics)
    await rig.deliver(messages)
    # Newest first: the final one, the multiples of 300, and the best. The others are never written.
    assert await rig.commits() == [(1, 1000), (1, 900), (1, 600), (1, 300), (1, 200)]
    assert await rig.facts("checkpoint_deleted") == []
    refused = await rig.facts("checkpoint_refused")
    assert [fact.step for fact in refused if fact.superseded] == [800, 700, 500, 400, 100]
    assert len(refused) == 5
    assert len(await rig.manifests()) == 5


async def test_what_a_refused_newer_checkpoint_does_not_replace_is_committed(rig: Rig) -> None:
    await rig.place(retention=Retention(last=1, best=0))
    messages = [*await rig.stage(100), *await rig.stage(200)]
    broken = staged(rig.bucket, "a", 300, final=True)
    messages.append(await rig.publish(broken))  # its blobs never arrived
    messages += [await rig.publish(staged(rig.bucket, "b", 300, final=True))]
    await rig.deliver(messages)
    assert [refused.step for refused in await rig.facts("checkpoint_refused")] == [300]
    assert (1, 200) in await rig.commits()


async def test_parts_of_a_backlog_that_come_late_complete_their_step(rig: Rig) -> None:
    await rig.place(retention=Retention(last=3, best=0))
    first = staged(rig.bucket, "a", 100)
    await rig.upload(first)
    messages = [await rig.publish(first), *await rig.stage(200)]
    await rig.deliver(messages)
    assert await rig.commits() == [(1, 200)]
    late = staged(rig.bucket, "b", 100)
    await rig.upload(late)
    await rig.deliver([await rig.publish(late)])
    assert await rig.commits() == [(1, 200), (1, 100)]


async def test_a_part_that_cannot_be_understood_is_refused_in_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.place()
    messages = await rig.stage()

    async def unreadable(*_: object) -> str:
        raise ValueError("the answer of the store makes no sense")

    monkeypatch.setattr(rig.committer._verifier, "problem", unreadable)
    with pytest.raises(ValueError, match="makes no sense"):
        await rig.deliver(messages)
    await rig.deliver([replace(messages[-1], deliveries=MAX_ATTEMPTS)])
    [refused] = await rig.facts("checkpoint_refused")
    assert "makes no sense" in refused.reason


async def test_a_part_that_cannot_be_understood_stops_no_other_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.place(retention=Retention(last=9, best=0))
    messages = [message for step in (100, 200, 300) for message in await rig.stage(step)]
    problem = rig.committer._verifier.problem

    async def unreadable_at_200(blobs: dict[Blob, str]) -> str:
        if any(blob.uri == blob_uri(rig.bucket, content(0, 200)) for blob in blobs):
            raise ValueError("the answer of the store makes no sense")
        return await problem(blobs)

    monkeypatch.setattr(rig.committer._verifier, "problem", unreadable_at_200)
    with pytest.raises(ValueError, match="makes no sense"):
        await rig.deliver(messages[:1])
    assert await rig.commits() == [(1, 300), (1, 100)]
    # It is the step itself that is given up in the end, and not the one whose part is looked at.
    await rig.deliver([replace(messages[0], deliveries=MAX_ATTEMPTS), replace(messages[2], deliveries=MAX_ATTEMPTS)])
    assert [fact.step for fact in await rig.facts("checkpoint_refused")] == [200]


async def test_a_generation_that_is_placed_during_a_sweep_is_committed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.place()
    messages = [*await rig.stage(100), *await rig.stage(200)]
    sweep, next_ones = rig.committer._commit_unless_superseded, list[Message[Any]]()

    async def placed_again_meanwhile(*args: Any) -> None:
        if not next_ones:
            await rig.place(generation=2)
            next_ones.extend(await rig.stage(300, generation=2))
        await sweep(*args)

    monkeypatch.setattr(rig.committer, "_commit_unless_superseded", placed_again_meanwhile)
    await rig.deliver(messages)
    await rig.deliver(next_ones)
    assert (2, 300) in await rig.commits()


async def test_what_the_run_is_completed_with_is_kept(rig: Rig) -> None:
    await rig.place(retention=Retention(last=1, best=0))
    await rig.deliver(await rig.stage(100))
    [commit] = await rig.facts("checkpoint_committed")
    await rig.publish(RunCompleted(run_id=RUN, generation=1, checkpoint=commit.checkpoint))
    for step in (200, 300, 400):
        await rig.deliver(await rig.stage(step))
    assert commit.checkpoint.uri not in {deleted.uri for deleted in await rig.facts("checkpoint_deleted")}
    assert await rig.objects.exists(commit.checkpoint.uri)
