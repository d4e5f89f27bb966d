"""A node whose disk fills up: its runs go on, end when they must, and what cannot be started is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from contracts.disk_space import DISK_FULL
from contracts.events.run import RunExited, RunReleased, RunStarted, RunStopping
from services.worker.local_files import hold_space, read_json, release_space, write_atomically, write_if_space
from tests.kit.support import until as eventually
from tests.small_disk import file_system, fill
from tests.worker.conftest import World
from tests.worker.test_real_ranks import committed_checkpoints, prepare, running_agent


def test_files_on_a_full_disk(tmp_path: Path) -> None:
    """What is there is replaced in its place, as long as its blocks suffice; nothing is cut off."""
    with file_system(tmp_path / "disk", "1m") as disk, capture_logs() as logs:
        state = disk / "state.json"
        write_atomically(state, json.dumps({"position": 1, "more": "x" * 100}))
        filler = fill(disk)
        for content in ({"position": 2}, {"position": 3, "more": "y" * 1000}):
            write_atomically(state, json.dumps(content))
            assert read_json(state) == content
        long = json.dumps({"more": "z" * 5000})
        with pytest.raises(OSError, match=r"No space left") as caught:
            write_atomically(state, long)
        assert caught.value.errno in DISK_FULL
        assert not write_if_space(state, long)
        assert not write_if_space(disk / "new.json", "{}")
        assert read_json(state) == content
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "state.json"]
        assert [line["event"].partition(":")[0] for line in logs] == ["the disk is full"]
        filler.unlink()
        write_atomically(state, long)
        assert state.read_text() == long


def test_space_that_is_held_for_a_file_is_its_own(tmp_path: Path) -> None:
    with file_system(tmp_path / "disk", "1m") as disk:
        grows, end, left = (disk / name for name in ("follow.json", "report.json", "left.json"))
        write_atomically(grows, "{}")
        hold_space(end)
        hold_space(left)
        fill(disk)
        assert not write_if_space(grows, json.dumps({"more": "x" * 5000}))
        write_atomically(end, json.dumps({"kind": "exited"}))
        assert end.read_text() == '{"kind": "exited"}'
        release_space(disk)
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "follow.json", "report.json"]


def _term_asked_at(data_dir: Path) -> float:
    return float(read_json(data_dir / "agent" / "lease.json")["asked_at"])


async def test_a_full_disk_ends_no_run(world: World, tmp_path: Path) -> None:
    """It trains on, and its node's lease is renewed; it is stopped when asked, and goes on once there is space."""
    prepared = await prepare(world, tmp_path / "dataset")
    with file_system(tmp_path / "disk", "64m") as disk:
        data_dir = disk / "data"
        async with running_agent(world, data_dir=data_dir, lease_ttl_s=30.0), committed_checkpoints(world):
            training: dict[str, Any] = {"max_steps": 1_000_000, "global_batch": 16, "checkpoint_every_steps": 20}
            fields: dict[str, Any] = {"task": "task:Linear", "grace_s": 60, "dataset": prepared, "training": training}
            await world.place(**fields)
            await world.wait_steps(10)
            filler = fill(disk)
            asked_at = _term_asked_at(data_dir)
            await eventually(lambda: _term_asked_at(data_dir) > asked_at, "the lease's term", 90)
            fill(disk)
            await world.wait_steps(len(await world.steps()) + 50)

            await world.bus.publish(
                RunStopping(run_id="r1", generation=1, reason="preempted", message="room", grace_s=60)
            )
            await world.wait_for(RunReleased)
            # The end of the generation frees space.
            first = data_dir / "runs" / "r1" / "g1"
            await eventually(lambda: not [*first.glob("*.ring"), *first.glob("*.spare")], "the removal of its files")
            assert (first / "report.json").exists()
            assert (first / "done.json").exists()
            fill(disk)
            await world.place(generation=2, **fields)
            failed: Any = await world.wait_for(RunExited)
            assert (failed.outcome, failed.infrastructure_failure) == ("failed", True)
            assert "No space left on device" in failed.reason

            filler.unlink()
            training["max_steps"] = max(await world.steps()) + 50
            await world.place(generation=3, **fields)
            started: Any = await world.wait_for(RunStarted, count=2)
            assert started.generation == 3
            exited: Any = await world.wait_for(RunExited, count=2)
            assert (exited.outcome, exited.step) == ("succeeded", training["max_steps"]), exited
