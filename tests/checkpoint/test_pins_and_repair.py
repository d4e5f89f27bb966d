"""Pins, scrubbing and repair on a real nats-server and a real S3, by the service and from the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from contracts.base import Fact, Request
from contracts.envelope import Envelope
from contracts.events.checkpoint import CheckpointDeleted, CheckpointRepaired
from contracts.events.model import ModelPromoted
from contracts.events.train import PinRequested, ScrubRequested
from contracts.spec.training import Retention
from services.checkpoint.app import Committer
from services.checkpoint.core.digests import state_digest
from services.checkpoint.keeper import Keeper
from services.checkpoint.scrubber import Scrubber
from services.checkpoint.settings import CheckpointSettings
from services.kit.bus import Bus, Message, PoisonMessage
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.kit.store.uris import split_uri
from tests.checkpoint.facts import RUN, blob_uri, content, file, placed, sha, staged, support, tuned
from tests.checkpoint.trials import Trial
from tests.client_address import serve_clients
from trainbus.client.checkpoints import find_checkpoint
from trainbus.client.client import AsyncClient
from trainbus.client.connection import connect
from trainbus.client.errors import TrainbusError
from trainbus.commands import checkpoints


class Rig:
    """The service's parts on real servers, and what agents and operators send."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings) -> None:
        self.bus, self.objects, self.settings = bus, objects, CheckpointSettings.of(settings)
        self.bucket = settings.bucket_models
        self.committer = Committer(bus, objects, self.settings)
        self.keeper = Keeper(bus, objects)
        self.scrubber = Scrubber(bus, objects, self.settings)

    async def publish(self, fact: Fact) -> Message[Any]:
        await self.bus.publish(fact)
        found = await self.bus.get_last_message(fact.subject)
        assert found is not None
        return found

    async def begin(self, retention: Retention) -> None:
        run = placed(retention=retention)
        for fact in (*support(run), run):
            await self.publish(fact)

    async def commit(self, step: int, *, differs: bool = False) -> str:
        """One checkpoint with digests of all ranks; its manifest."""
        for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
            part = staged(self.bucket, node, step)
            bodies = [content(rank, step) for rank in ranks]
            files = list(part.files)
            for rank in ranks:
                names = {f"model/{rank}": sha(b"%d" % (step if differs else rank)), "state": sha(b"s")}
                bodies.append(json.dumps(names).encode())
                files.append(file(self.bucket, f"digests-{rank}.json", bodies[-1]))
            for body in bodies:
                await self.objects.put(blob_uri(self.bucket, body), body)
            part = part.model_copy(update={"files": tuple(files), "exactness": "exact"})
            await self.committer.on_checkpoint_staged(await self.publish(part))
        return str((await self.facts("checkpoint_committed"))[-1].checkpoint.uri)

    async def facts(self, name: str) -> list[Any]:
        return [received.event for received in await self.bus.read_history(f"run.{RUN}.{name}")]

    async def kept(self) -> list[int]:
        gone = {fact.uri for fact in await self.facts("checkpoint_deleted")}
        return [c.checkpoint.step for c in await self.facts("checkpoint_committed") if c.checkpoint.uri not in gone]

    def ask(self, request: Request, request_id: str) -> Message[Any]:
        return Message(request, Envelope(request_id, "test", request.type, self.bus.clock.now()), request.subject)

    async def overwrite(self, uri: str, body: bytes) -> None:
        bucket, key = split_uri(uri)
        await self.objects._client.put_object(Bucket=bucket, Key=key, Body=body)


@pytest_asyncio.fixture
async def rig(make_bus: Callable[..., Any], objects: ObjectStore, s3_settings: Settings) -> Rig:
    return Rig(await make_bus(), objects, s3_settings)


async def test_a_pinned_checkpoint_outlives_retention_until_it_is_unpinned(rig: Rig) -> None:
    await rig.begin(Retention(last=2, best=0))
    for step in (10, 20):
        await rig.commit(step)
    pin = rig.ask(PinRequested(run_id=RUN, step=10, reason="for the paper"), "p1")
    await rig.keeper.on_pin_requested(pin)
    await rig.keeper.on_pin_requested(pin)
    for step in (30, 40):
        await rig.commit(step)
    assert await rig.kept() == [10, 30, 40]
    [fact] = await rig.facts("checkpoint_pinned")
    assert (fact.step, fact.pinned, fact.reason, fact.request_id) == (10, True, "for the paper", "p1")
    await rig.keeper.on_pin_requested(rig.ask(PinRequested(run_id=RUN, step=10, pinned=False), "p2"))
    assert await rig.kept() == [30, 40]
    for request, words in (
        (PinRequested(run_id=RUN, step=10), "was deleted by retention"),
        (PinRequested(run_id=RUN, step=11), "it has 30, 40"),
        (PinRequested(run_id="rnone", step=1), "is unknown"),
    ):
        with pytest.raises(PoisonMessage, match=words):
            await rig.keeper.on_pin_requested(rig.ask(request, f"bad {words}"))


@pytest.mark.parametrize("first", ["pin", "deletion"])
async def test_of_a_pin_and_a_deletion_that_cross_the_first_stands(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    await rig.begin(Retention(last=2, best=0))
    await rig.commit(10)
    await rig.commit(20)
    pin = rig.ask(PinRequested(run_id=RUN, step=10), "p1")
    publish = rig.bus.publish

    async def crossing(fact: Fact, *args: Any, **options: Any) -> Any:
        if fact.fact == ("checkpoint_deleted" if first == "pin" else "checkpoint_pinned"):
            monkeypatch.setattr(rig.bus, "publish", publish)
            # The other one gets in, between the decision and its publishing.
            if first == "pin":
                await Keeper(rig.bus, rig.objects).on_pin_requested(pin)
            else:
                await rig.commit(30)
        return await publish(fact, *args, **options)

    monkeypatch.setattr(rig.bus, "publish", crossing)
    if first == "pin":
        await rig.commit(30)
        assert await rig.kept() == [10, 20, 30]
    else:
        with pytest.raises(PoisonMessage, match="was deleted"):
            await rig.keeper.on_pin_requested(pin)
        assert await rig.kept() == [20, 30]
    for commit in await rig.facts("checkpoint_committed"):
        if commit.checkpoint.step in await rig.kept():
            assert await rig.objects.exists(commit.checkpoint.uri)


async def test_what_a_run_begins_with_is_there_though_it_was_accepted_while_retention_decided(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.begin(Retention(last=2, best=0))
    first = await rig.commit(10)
    await rig.commit(20)
    publish = rig.bus.publish

    async def crossing(fact: Fact, *args: Any, **options: Any) -> Any:
        if isinstance(fact, CheckpointDeleted) and fact.step == 10:
            await publish(tuned(first))
        return await publish(fact, *args, **options)

    monkeypatch.setattr(rig.bus, "publish", crossing)
    await rig.commit(30)
    assert await rig.kept() == [20, 30]
    assert await rig.objects.exists(first)
    second = (await rig.facts("checkpoint_committed"))[1].checkpoint.uri
    await rig.commit(40)
    assert not await rig.objects.exists(second)  # no run begins with this one


@pytest_asyncio.fixture
async def client(rig: Rig) -> AsyncIterator[AsyncClient]:
    async with serve_clients(rig.settings) as address, AsyncClient(address=address) as connected:
        yield connected


async def test_a_checkpoint_is_named_by_run_step_model_or_manifest(rig: Rig) -> None:
    await rig.begin(Retention(last=2, best=0))
    first, second = await rig.commit(10), await rig.commit(20)
    await rig.publish(ModelPromoted(model="digits", version=1, run_id=RUN, checkpoint_uri=first))
    await rig.publish(ModelPromoted(model="digits", version=2, run_id=RUN, checkpoint_uri=second))
    await rig.publish(ModelPromoted(model="other", version=1, run_id=RUN, checkpoint_uri=first))
    async with serve_clients(rig.settings) as address, connect(address) as connection:
        for target, uri in (
            (RUN, second),
            (f"{RUN}@10", first),
            ("models:/digits@champion", second),
            ("models:/other@champion", first),
            (first, first),
        ):
            assert (await find_checkpoint(connection, target)).uri == uri
        for target, words in (
            ("models:/digit@champion", "no champion of 'digit'; there are digits, other"),
            ("models:/digits@staging", "give models:/NAME@champion"),
            ("models:/digits/2", "give models:/NAME@champion"),
            (f"{RUN}@11", "it has steps 10, 20"),
            (f"{first}x", "is no committed checkpoint, or was deleted"),
        ):
            with pytest.raises(TrainbusError, match=words):
                await find_checkpoint(connection, target)


async def test_the_commit_says_what_the_ranks_digested_and_refuses_ranks_that_drifted_apart(rig: Rig) -> None:
    await rig.begin(Retention())
    await rig.commit(10)
    [commit] = await rig.facts("checkpoint_committed")
    expected = {f"model/{rank}": sha(b"%d" % rank) for rank in range(4)} | {"state": sha(b"s")}
    assert (commit.state_digest, commit.exactness) == (state_digest(expected), "exact")
    manifest = await rig.objects.get(commit.checkpoint.uri)
    assert sha(manifest) == commit.manifest_sha256
    assert json.loads(manifest)["state_digest"] == commit.state_digest
    for node in ("a", "b"):
        part = staged(rig.bucket, node, 20)
        body = json.dumps({"model/shared": sha(node.encode())}).encode()
        mine = file(rig.bucket, f"digests-{part.ranks[0]}.json", body)
        for each, uploaded in ((mine, body), *zip(part.files, [content(r, 20) for r in part.ranks], strict=True)):
            await rig.objects.put(each.chunks[0].uri, uploaded)
        update = {"files": (*part.files, mine)}
        await rig.committer.on_checkpoint_staged(await rig.publish(part.model_copy(update=update)))
    [refused] = await rig.facts("checkpoint_refused")
    assert "disagree about 'model/shared'" in refused.reason
    assert not refused.infrastructure_failure


async def test_scrubbing_tells_what_is_rotten_and_repairs_a_manifest_from_the_facts(
    rig: Rig, client: AsyncClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await rig.begin(Retention())
    first, second = await rig.commit(10), await rig.commit(20, differs=True)
    await checkpoints.verify(client, None, wait_s=1)
    await checkpoints.fetch(client, f"{RUN}@10", tmp_path / "ten", None)
    assert (tmp_path / "ten" / "rank_3.bin").read_bytes() == content(3, 10)
    with pytest.raises(TrainbusError, match="4 of 5 differ"):
        await checkpoints.diff(client, f"{RUN}@10", second)
    with pytest.raises(TrainbusError, match="refused: the manifest"):
        await checkpoints.fetch(client, first, tmp_path / "other", "0" * 64)
    # A byte of a blob, a blob, and a manifest.
    wrong, missing = blob_uri(rig.bucket, content(0, 10)), blob_uri(rig.bucket, content(1, 10))
    await rig.overwrite(wrong, b"X" + content(0, 10)[1:])
    await rig.objects.delete(missing)
    manifest = await rig.objects.get(second)
    await rig.overwrite(second, manifest.replace(b'"step":20', b'"step":21'))
    with pytest.raises(TrainbusError, match="2 of 2 checkpoints are rotten"):
        await checkpoints.verify(client, RUN, wait_s=1)
    for target in (first, second):
        with pytest.raises(TrainbusError):
            await checkpoints.fetch(client, target, tmp_path / f"bad{target[-9:]}", None)
    await rig.scrubber.scrub(rig.ask(ScrubRequested(run_id=RUN), "s1"))
    one, two = await rig.facts("checkpoint_rotten")
    assert (one.uri, set(one.blobs), one.repair) == (first, {wrong, missing}, True)
    assert (two.uri, two.blobs) == (second, (second,))
    assert await rig.objects.get(second) == manifest
    assert [(fact.uri, fact.blob) for fact in await rig.facts("checkpoint_repaired")] == [(second, second)]
    # A node writes one of them again, and only claims the other: the service checks both.
    await rig.objects.put(wrong, content(0, 10))
    for blob in (wrong, missing):
        fact = CheckpointRepaired(run_id=RUN, uri=first, step=10, blob=blob, node_id="a", found_at=one.found_at)
        received = await rig.publish(fact)
        await rig.scrubber.on_checkpoint_repaired(received)
        await rig.scrubber.on_checkpoint_repaired(received)
    again = (await rig.facts("checkpoint_rotten"))[2:]
    assert [fact.blobs for fact in again] == [(missing,)]
    capsys.readouterr()


async def test_the_running_service_pins_scrubs_and_repairs_by_request(
    rig: Rig,
    client: AsyncClient,
    s3_settings: Settings,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from services.checkpoint.app import build

    monkeypatch.setattr("trainbus.client.checkpoints.ANSWER_TIMEOUT_S", 60.0)
    service = build(s3_settings)
    task = asyncio.create_task(service.run())
    try:
        await rig.begin(Retention())
        uri = await rig.commit(10)
        await checkpoints.pin(client, f"{RUN}@10", reason="why")
        await rig.overwrite(uri, b"{}")
        await checkpoints.verify(client, repair=True, wait_s=90)
        await checkpoints.show(client, RUN, as_json=True)
        shown = capsys.readouterr().out
        assert '"pinned": true' in shown
        assert "repaired by checkpoint" in shown
        with pytest.raises(TrainbusError, match="it has steps 10"):
            await checkpoints.pin(client, f"{RUN}@11", reason="")
    finally:
        service.stopping.set()
        await task


@pytest.mark.parametrize("seed", range(12))
async def test_promises_hold_through_kills_failures_and_changed_bytes(rig: Rig, seed: int) -> None:
    trial = Trial(rig.bus, rig.objects, rig.settings, seed)
    await trial.live(steps=3, faults=6, corruptions=int(seed % 3 == 0))
    assert trial.problems == [], trial.faults.struck


async def test_a_trial_notices_a_protocol_that_deletes_before_it_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(rig.bus, rig.objects, rig.settings, 1)
    publish = trial.faulty_bus._target.publish

    async def too_late(fact: Fact, *args: Any, **options: Any) -> Any:
        if isinstance(fact, CheckpointDeleted):
            await rig.objects.delete(fact.uri)
            return await trial.faults.around("between", lambda: publish(fact, *args, **options))
        return await publish(fact, *args, **options)

    monkeypatch.setattr(rig.bus, "publish", too_late)
    wait: dict[tuple[str, int], str] = {("between", 1): "kill before"}
    live: Callable[..., Awaitable[None]] = trial.live
    monkeypatch.setattr(trial.random, "choices", lambda *_, k, **__: [])
    trial.faults.plan = wait
    await live(steps=6, faults=0, corruptions=0)
    assert any("its manifest is gone" in problem for problem in trial.problems)
