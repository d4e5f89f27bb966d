"""Checkpoints whose list of files no event can hold, from the ranks' folder to the same bytes on another node."""

from __future__ import annotations

import array
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.numpy import load_file
from structlog.testing import CapturingLogger

from contracts.events.checkpoint import CheckpointCommitted, CheckpointStaged
from contracts.events.run import RunExited
from services.checkpoint.app import build
from services.kit.store.objects import ObjectStore
from services.worker.cache.file_cache import FileCache
from services.worker.cache.node_cache import NodeCache
from services.worker.checkpoints import stager
from services.worker.core import checkpoint_chunks
from tests.worker.conftest import World

CHUNK_BYTES = 64
CHUNKS = 12_000
#: What one fact does not hold, either.
FEWER_CHUNKS = 4_200
#: Contents of chunks that differ: each is stored once, and listed as often as it occurs.
CONTENTS = 150
FLOATS_A_CHUNK = CHUNK_BYTES // 4


@pytest_asyncio.fixture
async def checkpoint_service(world: World) -> AsyncIterator[None]:
    """The real service, in this process."""
    service = build(world.settings)
    running = asyncio.create_task(service.run())
    yield
    service.stopping.set()
    await asyncio.wait_for(running, 90)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("checkpoint_service")
async def test_checkpoint_of_more_chunks_than_an_event_holds_is_committed_and_restored(
    world: World, agent: Any, objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12,000 chunks of 8 MiB are 94 GiB on one node. Here they are small; their number is what counts."""
    monkeypatch.setattr(checkpoint_chunks, "CHUNK_BYTES", CHUNK_BYTES)
    await agent()
    params: dict[str, int] = {"steps": 1, "weights": CHUNKS * FLOATS_A_CHUNK, "period": CONTENTS * FLOATS_A_CHUNK}
    await world.place(params=params)
    commit: CheckpointCommitted = await world.wait_for(CheckpointCommitted)
    staged: CheckpointStaged = await world.wait_for(CheckpointStaged)
    await world.wait_for(RunExited)
    assert (staged.files, staged.size_bytes) == ((), commit.size_bytes)
    empty = NodeCache(FileCache(tmp_path / "empty", objects), objects, 2**30)
    async with empty.pin_files() as pins:
        await empty.checkpoint(commit.checkpoint.uri, tmp_path / "resume", pins, commit.checkpoint.manifest_sha256)
    factor = 0.37 * (1 + commit.checkpoint.step * 1e-6)
    weights = array.array("f", (number % params["period"] * factor for number in range(params["weights"])))
    restored = load_file(tmp_path / "resume" / "model-0.safetensors")["w"]
    assert restored.tobytes() == weights.tobytes()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("limit", "value"), [("MAX_INLINE_BYTES", 2**40), ("MAX_LISTING_BYTES", 1000)])
async def test_checkpoint_that_no_reader_would_read_is_skipped_once(
    world: World,
    agent: Any,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
) -> None:
    """A list that is too long for its place, in the fact or in the store, costs that checkpoint and not the run."""
    monkeypatch.setattr(checkpoint_chunks, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(f"services.worker.checkpoints.uploader.{limit}", value)
    log = CapturingLogger()
    monkeypatch.setattr(stager, "log", log)
    await agent()
    await world.place(
        params={"steps": 1, "weights": FEWER_CHUNKS * FLOATS_A_CHUNK, "period": CONTENTS * FLOATS_A_CHUNK}
    )
    exited: RunExited = await world.wait_for(RunExited)
    assert exited.outcome == "succeeded"
    assert not [fact for fact in await world.facts() if isinstance(fact, CheckpointStaged)]
    assert [call.args[0] for call in log.calls].count("a checkpoint cannot be staged and is skipped") == 1
