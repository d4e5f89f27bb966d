"""A node of several has of a checkpoint what its ranks read, verified, also after its agent was killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save_file

from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import CheckpointRef, Member, RunExited, RunReleased, RunStarted, RunStopping
from contracts.ranks import Launch, RangeRequestLine
from services.kit.concurrency import cancel_and_wait
from services.kit.messages import TransientError
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.worker.cache.file_cache import FileCache
from services.worker.cache.late_input import LateInput
from services.worker.cache.node_cache import CachePins, NodeCache
from services.worker.cache.partial_checkpoint import PartialCheckpoint
from services.worker.checkpoints.uploader import CheckpointUploader, KnownBlobs
from services.worker.ranks.control_socket import ControlSocket
from tests.kit.support import until as eventually
from tests.trainbus.support import request
from tests.worker.conftest import World
from tests.worker.test_real_ranks import committed_checkpoints, prepare, running_agent
from trainbus.trainer.checkpoint import CheckpointError
from trainbus.trainer.checkpoint.ranges import CheckpointRanges
from trainbus.trainer.checkpoint.tensor_file import open_tensor_file

MIB = 2**20
NAME = "model-0.safetensors"


class StoredCheckpoint:
    """A committed checkpoint of one tensor of 24 MiB, in pieces of 8 MiB, and of a file without tensors."""

    def __init__(self, objects: ObjectStore, ref: CheckpointRef, tensor: Any, uris: list[str]) -> None:
        self.objects, self.ref, self.tensor, self.uris = objects, ref, tensor, uris

    def node(self, folder: Path) -> NodeCache:
        return NodeCache(FileCache(folder, self.objects), self.objects, 2**30)


@pytest_asyncio.fixture
async def stored(tmp_path: Path, objects: ObjectStore, s3_settings: Settings) -> StoredCheckpoint:
    bucket, folder = s3_settings.bucket_models, tmp_path / "written"
    folder.mkdir()
    tensor = np.random.default_rng(0).standard_normal((24 * 1024, 256), dtype=np.float32)
    save_file({"weight": tensor}, folder / NAME)
    (folder / "state.json").write_text("{}")
    writer = NodeCache(FileCache(tmp_path / "writer", objects), objects, 2**30)
    uploader = CheckpointUploader(objects, bucket, writer, KnownBlobs())
    files = await uploader.upload({path.name: path for path in folder.iterdir()})
    position = {"step": 1, "epoch": 1, "samples_consumed": 8}
    manifest = {**position, "files": [file.model_dump(mode="json") for file in files]}
    uri = f"s3://{bucket}/manifest.json"
    await objects.put(uri, json.dumps(manifest).encode())
    (file,) = (each for each in files if each.path == NAME)
    return StoredCheckpoint(objects, CheckpointRef(uri=uri, **position), tensor, [chunk.uri for chunk in file.chunks])


@pytest_asyncio.fixture
async def pins(tmp_path: Path, stored: StoredCheckpoint) -> AsyncIterator[CachePins]:
    async with stored.node(tmp_path / "pins").pin_files() as pins:
        yield pins


def held_bytes(folder: Path) -> int:
    """Bytes of a folder's tensor files for which there are blocks."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.safetensors"))


def ranges_of(folder: Path, control: ControlSocket, generation: int = 1) -> CheckpointRanges:
    launch = Launch(
        run_id="r1",
        generation=generation,
        node_id="n1",
        world_size=2,
        spec=request(),
        folder=folder.parent,
        socket=control.path,
        resume_folder=folder,
    )
    return CheckpointRanges(launch, 0, patience_s=0.5)


async def read_rows(folder: Path, partial: PartialCheckpoint, start: int, stop: int) -> Any:
    """Read as a rank does it."""
    async with ControlSocket(
        folder.parent / "agent.sock", 1, lambda: None, checkpoint=LateInput.of(partial)
    ) as control:
        require = ranges_of(folder, control)
        tensor = (await asyncio.to_thread(open_tensor_file, folder / NAME, require))["weight"]
        return (await asyncio.to_thread(tensor.read_rows, start, stop)).numpy()


async def test_a_rank_reads_rows_and_the_node_fetches_their_pieces(
    tmp_path: Path, stored: StoredCheckpoint, pins: CachePins
) -> None:
    folder = tmp_path / "resume"
    ref, partial = await stored.node(tmp_path / "cache").partial_checkpoint(stored.ref.uri, folder, pins)
    assert ref.step == 1
    assert (folder / "state.json").read_text() == "{}"
    assert held_bytes(folder) < MIB  # the header
    for start, stop, most in ((0, 10, 9), (8 * 1024 - 5, 8 * 1024 + 5, 17), (0, 0, 17)):
        assert np.array_equal(await read_rows(folder, partial, start, stop), stored.tensor[start:stop])
        assert held_bytes(folder) < most * MIB
    # All else is as it was laid out: never a byte that nobody verified.
    assert not any((folder / NAME).read_bytes()[-7 * MIB :])


async def test_what_the_node_has_whole_is_not_fetched(
    tmp_path: Path, stored: StoredCheckpoint, pins: CachePins
) -> None:
    folder, node = tmp_path / "resume", stored.node(tmp_path / "cache")
    await node.checkpoint(stored.ref.uri, tmp_path / "whole", pins)
    for uri in stored.uris:
        await stored.objects.delete(uri)
    _, partial = await node.partial_checkpoint(stored.ref.uri, folder, pins)
    assert np.array_equal(await read_rows(folder, partial, 0, 24 * 1024), stored.tensor)
    assert (folder / NAME).stat().st_ino == (tmp_path / "whole" / NAME).stat().st_ino


async def test_pieces_of_an_earlier_life_are_verified_and_kept(
    tmp_path: Path, stored: StoredCheckpoint, pins: CachePins
) -> None:
    folder, node = tmp_path / "resume", stored.node(tmp_path / "cache")
    ref, partial = await node.partial_checkpoint(stored.ref.uri, folder, pins)
    await read_rows(folder, partial, 0, 10)
    await stored.objects.delete(stored.uris[1])  # of the piece that is here
    with (folder / NAME).open("r+b") as file:  # a piece that was being written when the agent was killed
        file.seek(20 * MIB)
        file.write(b"x" * 100)
    again = await stored.node(tmp_path / "other").reopen_checkpoint(ref, folder, pins)
    assert np.array_equal(await read_rows(folder, again, 0, 24 * 1024), stored.tensor)


async def test_a_damaged_piece_is_refused_by_name(tmp_path: Path, stored: StoredCheckpoint, pins: CachePins) -> None:
    folder = tmp_path / "resume"
    _, partial = await stored.node(tmp_path / "cache").partial_checkpoint(stored.ref.uri, folder, pins)
    bucket, _, key = stored.uris[3].removeprefix("s3://").partition("/")
    size_bytes = len(await stored.objects.get(stored.uris[3]))
    await stored.objects._client.put_object(Bucket=bucket, Key=key, Body=b"x" * size_bytes)
    with pytest.raises(CheckpointError, match=r"is damaged: .*expected .*Choose another one"):
        await read_rows(folder, partial, 24 * 1024 - 1, 24 * 1024)
    assert np.array_equal(await read_rows(folder, partial, 0, 10), stored.tensor[:10])
    await stored.objects.delete(stored.uris[2])
    with pytest.raises(CheckpointError, match=r"is damaged: .*Choose another one"):
        await read_rows(folder, partial, 12 * 1024, 12 * 1024 + 1)


async def test_a_rank_waits_for_the_store_and_for_its_agent(
    tmp_path: Path, stored: StoredCheckpoint, pins: CachePins, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "resume"
    _, partial = await stored.node(tmp_path / "cache").partial_checkpoint(stored.ref.uri, folder, pins)
    refused = asyncio.Event()
    read_into = stored.objects.read_into

    async def refuse_once(*arguments: Any) -> str:
        if not refused.is_set():
            refused.set()
            raise TransientError("the store is away")
        return await read_into(*arguments)

    monkeypatch.setattr(stored.objects, "read_into", refuse_once)
    assert np.array_equal(await read_rows(folder, partial, 0, 10), stored.tensor[:10])
    assert refused.is_set()

    async with ControlSocket(tmp_path / "agent.sock", 2, lambda: None, checkpoint=LateInput.of(partial)) as control:
        with pytest.raises(CheckpointError, match="another generation"):
            await asyncio.to_thread(ranges_of(folder, control), folder / NAME, 0, 10)
    with pytest.raises(CheckpointError, match=r"no agent has answered for 0\.5 s"):
        await asyncio.to_thread(ranges_of(folder, control), folder / NAME, 0, 10)
    partial.close()
    line = RangeRequestLine(rank=0, generation=1, file=NAME, start=9 * MIB, stop=10 * MIB)
    assert await partial.request(line) == "the generation is over"


async def test_a_rank_waits_until_a_restarted_agent_has_reopened_its_checkpoint(
    tmp_path: Path, stored: StoredCheckpoint, pins: CachePins
) -> None:
    folder, node = tmp_path / "resume", stored.node(tmp_path / "cache")
    ref, _ = await node.partial_checkpoint(stored.ref.uri, folder, pins)
    attempts = 0

    async def reopen() -> PartialCheckpoint:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise TransientError("the store is away")
        return await node.reopen_checkpoint(ref, folder, pins)

    late = LateInput[PartialCheckpoint]()
    async with ControlSocket(tmp_path / "agent.sock", 1, lambda: None, checkpoint=late) as control:
        reading = asyncio.create_task(asyncio.to_thread(ranges_of(folder, control), folder / NAME, MIB, 2 * MIB))
        opening = asyncio.create_task(late.open_again("the run's checkpoint", reopen))
        await reading
        await opening
    assert attempts == 3
    assert held_bytes(folder) >= 8 * MIB

    lost = LateInput[PartialCheckpoint]()
    async with ControlSocket(tmp_path / "agent.sock", 1, lambda: None, checkpoint=lost) as control:
        await stored.objects.delete(ref.uri)
        await lost.open_again("the run's checkpoint", lambda: node.reopen_checkpoint(ref, folder, pins))
        with pytest.raises(CheckpointError, match=r"could not reopen the run's checkpoint: .* is not in the store"):
            await asyncio.to_thread(ranges_of(folder, control), folder / NAME, 0, 10)


async def test_a_rank_that_waits_for_a_reopening_learns_that_the_run_is_over(
    tmp_path: Path, stored: StoredCheckpoint
) -> None:
    late = LateInput[PartialCheckpoint]()
    async with ControlSocket(tmp_path / "agent.sock", 1, lambda: None, checkpoint=late) as control:
        reading = asyncio.create_task(asyncio.to_thread(ranges_of(tmp_path, control), tmp_path / NAME, 0, 10))
        opening = asyncio.create_task(late.open_again("the run's checkpoint", asyncio.Event().wait))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await cancel_and_wait(opening)
        with pytest.raises(CheckpointError, match="the run is over on this node"):
            await reading


async def test_a_node_of_two_fetches_its_rows_and_trains_on_as_one_node_does(world: World, tmp_path: Path) -> None:
    prepared = await prepare(world, tmp_path / "dataset")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_agent(world, data_dir=tmp_path / "n1"))
        other: dict[str, Any] = {"node_id": "n2", "data_dir": tmp_path / "n2", "memory_dir": str(tmp_path / "m2")}
        await stack.enter_async_context(running_agent(world, **other))
        await stack.enter_async_context(committed_checkpoints(world))
        training: dict[str, Any] = {"max_steps": 5, "global_batch": 16, "strategy": "fsdp2", "logical_ranks": 2}
        fields: dict[str, Any] = {"task": "task:Linear", "grace_s": 60, "dataset": prepared, "training": training}
        fields["params"] = {"width": 600_000, "adam": False}
        await world.place(slots=(0, 1), **fields)
        await world.wait_for(RunExited)
        resume = [each for each in await world.facts() if isinstance(each, CheckpointCommitted)][-1].checkpoint
        assert resume.step == 5

        training["max_steps"] = 1_000_000
        members = tuple(Member(node_id=node, slots=(0,), ranks=(rank,)) for rank, node in enumerate(("n1", "n2")))
        await world.place(generation=2, resume=resume, members=members, **fields)
        await world.wait_for(RunStarted, count=2)
        folder = tmp_path / "n2" / "runs" / "r1" / "g2" / "resume"
        launch = Launch.model_validate_json((folder.parent / "launch.json").read_bytes())
        assert launch.resume_is_partial
        whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        # Of the largest weight and its momentum the first of three pieces.
        assert held_bytes(folder) < whole - 2 * 8 * MIB + MIB
        await world.bus.publish(RunStopping(run_id="r1", generation=2, reason="preempted", message="room", grace_s=60))
        await eventually(lambda: _is_released(world, 2), "both nodes' reports", 90)

        training["max_steps"] = 10
        await world.place("r2", resume=resume, members=members, **fields)
        await world.place("r3", resume=resume, slots=(0, 1), **fields)
        ended: list[Any] = [await world.wait_for(RunExited, run_id) for run_id in ("r2", "r3")]
        assert [(each.outcome, each.step) for each in ended] == [("succeeded", 10)] * 2, ended
        assert ended[0].metrics == ended[1].metrics

        fields |= {"kind": "evaluate", "evaluate": {"run_id": "r1", "checkpoint_uri": resume.uri, "split": "test"}}
        await world.place("e1", members=members, **fields)
        await world.place("e2", **fields)
        measured: list[Any] = [await world.wait_for(RunExited, run_id) for run_id in ("e1", "e2")]
        assert [each.outcome for each in measured] == ["succeeded"] * 2, measured
        assert measured[1].metrics.pop("test/latency_ms") > 0  # a model in shards has none
        assert measured[0].metrics == pytest.approx(measured[1].metrics, rel=1e-5)


async def _is_released(world: World, count: int) -> bool:
    return len([each for each in await world.facts() if isinstance(each, RunReleased)]) >= count
