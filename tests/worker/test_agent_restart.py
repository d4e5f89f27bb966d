"""The agent is killed while ranks train, and another takes its place."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contracts.base import Fact
from contracts.events.node import NodeJoined
from contracts.events.run import RunExited, RunReleased, RunStarted, RunStopping
from services.worker.app import build
from services.worker.launch.executor import ProcessExecutor
from tests.contracts.earlier_facts import as_version_1
from tests.kit.support import until as eventually
from tests.worker.conftest import FAKE, World, ranks_of, until
from trainbus.embedded.servers import NatsServer


async def _joined(world: World, count: int) -> NodeJoined:
    found: list[Any] = []

    async def joined() -> bool:
        found[:] = await world.bus.read_history("node.n1.joined")
        return len(found) >= count

    await eventually(joined, "the agent to join", 90)  # a process of Python is slow to start on a busy machine
    event: NodeJoined = found[count - 1].event
    return event


async def test_killed_agent_reattaches_and_no_step_is_lost_or_doubled(world: World, agent_process: Any) -> None:
    folder = world.settings.data_dir.resolve()
    committing = asyncio.create_task(world.commit_all())
    process = agent_process()
    await _joined(world, 1)
    await world.place(slots=(0, 1), params={"steps": 300, "every": 50, "hold_at": 250})
    await world.wait_steps(20)
    ranks = set(ranks_of(folder))
    assert ranks
    for life in (2, 3):
        process.kill()
        process.wait()
        process = agent_process()
        joined = await _joined(world, life)
        assert joined.running == (("r1", 1),)
        assert set(ranks_of(folder)) <= ranks  # the same processes: none was started again
    (folder / "runs" / "r1" / "g1" / "go").touch()
    exited = await world.wait_for(RunExited)
    committing.cancel()
    assert (exited.outcome, exited.step) == ("succeeded", 300), exited
    assert sorted(await world.steps()) == sorted([*range(1, 301)] * 2)
    logs = [line for log in await world.facts(stream="LOGS", subject="log.{}.1") for line in log.lines]
    assert logs == ["rank 1 starts at 0", *(f"step {n}" for n in range(1, 301))]
    assert len(await world.ends()) == 1


@pytest.mark.parametrize("publish_as", [as_version_1, lambda fact: fact], ids=["version 1", "today"])
async def test_restarted_agent_catches_up(world: World, agent_process: Any, publish_as: Callable[[Fact], Fact]) -> None:
    folder = world.settings.data_dir.resolve()
    committing = asyncio.create_task(world.commit_all())
    process = agent_process()
    await _joined(world, 1)
    await world.place("stopped", params={"steps": 100_000})
    await world.place("died", slots=(1,), params={"steps": 100_000})
    await world.wait_steps(5, "stopped")
    await world.wait_steps(5, "died")
    process.kill()
    process.wait()
    for pid in set(ranks_of(folder / "runs" / "died")):
        with suppress(ProcessLookupError):  # a wrapper may have ended with its rank
            os.kill(pid, signal.SIGKILL)
    stop = RunStopping(run_id="stopped", generation=1, reason="preempted", message="room", grace_s=60)
    await world.bus.publish(publish_as(stop))
    agent_process()
    assert (await _joined(world, 2)).running == (("died", 1), ("stopped", 1))
    released = await world.wait_for(RunReleased, "stopped")
    assert released.clean
    exited = await world.wait_for(RunExited, "died")
    assert (exited.outcome, exited.rank) == ("failed", 0)
    assert "SIGKILL" in exited.reason
    committing.cancel()


async def _orphaned_ranks(world: World, agent_process: Any) -> Path:
    """Ranks that train on after their agent was killed; the folder by which they are found."""
    folder = world.settings.data_dir.resolve()
    process = agent_process()
    await _joined(world, 1)
    await world.place(params={"steps": 100_000})
    await world.wait_steps(3)
    process.kill()
    process.wait()
    assert ranks_of(folder)
    return folder


async def test_restart_kills_ranks_of_an_older_generation(world: World, agent_process: Any) -> None:
    folder = await _orphaned_ranks(world, agent_process)
    # Meanwhile the run went on elsewhere.
    placed = await world.place(generation=2, members=(_member("elsewhere"),), params={"steps": 5})
    assert placed.generation == 2
    agent_process()
    assert (await _joined(world, 2)).running == ()
    assert not ranks_of(folder)  # dead before the scheduler can place the run again
    assert await world.ends() == []


async def test_restart_kills_ranks_whose_placement_cannot_be_read(world: World, agent_process: Any) -> None:
    folder = await _orphaned_ranks(world, agent_process)
    (folder / "runs" / "r1" / "g1" / "placement.json").write_text('{"placed": ')
    agent_process()
    assert (await _joined(world, 2)).running == ()
    assert not ranks_of(folder)


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_script_that_ends_well_when_the_guard_stops_it_has_not_succeeded(
    world: World, agent_process: Any, is_restarted: bool
) -> None:
    world.settings = world.settings.model_copy(update={"lease_ttl_s": 2.0})
    folder = world.settings.data_dir.resolve()
    process = agent_process()
    await _joined(world, 1)
    await world.place(command=("/bin/sh", "-c", "trap 'exit 0' TERM; while true; do sleep 0.05; done"))
    await world.wait_for(RunStarted)
    process.send_signal(signal.SIGSTOP)
    await until(lambda: not ranks_of(folder), 90)
    if is_restarted:
        process.kill()
        process.wait()
        agent_process()
    else:
        process.send_signal(signal.SIGCONT)
    released: RunReleased = await world.wait_for(RunReleased)
    assert not released.clean
    assert await world.ends() == [released]


def _member(node_id: str) -> Any:
    from contracts.events.run import Member

    return Member(node_id=node_id, slots=(0,), ranks=(0,))


async def test_agent_stopped_before_it_rejoins_leaves_no_ranks(world: World, agent_process: Any) -> None:
    folder = world.settings.data_dir.resolve()
    process = agent_process()
    await _joined(world, 1)
    await world.place(params={"steps": 100_000}, grace_s=0.2)
    await world.wait_steps(3)
    process.kill()
    process.wait()
    assert ranks_of(folder)
    service = build(world.settings, ProcessExecutor(rank_command=FAKE))
    running = asyncio.create_task(service.run())
    await until(lambda: service.check_readiness()["started"], 90)
    service.stopping.set()
    await asyncio.wait_for(running, 90)
    await world.wait_for(RunReleased)
    assert not ranks_of(folder)


async def test_agent_stopped_without_a_bus_leaves_no_ranks_and_the_next_one_reports(
    world: World, agent_process: Any, nats_server: NatsServer
) -> None:
    folder = await _orphaned_ranks(world, agent_process)
    nats_server.kill()
    process = agent_process()
    # Its signal handlers, which come first, are the only sign of it yet.
    await until(lambda: _handles_sigterm(process.pid), 90)
    process.terminate()
    await asyncio.to_thread(process.wait, 90)
    assert not ranks_of(folder)
    nats_server.start()
    agent_process()
    released = await world.wait_for(RunReleased)
    assert not released.clean
    assert await world.ends() == [released]


async def test_second_agent_in_the_folder_ends_without_touching_ranks(world: World, agent_process: Any) -> None:
    folder = world.settings.data_dir.resolve()
    agent_process()
    await _joined(world, 1)
    await world.place(params={"steps": 100_000})
    await world.wait_steps(3)
    ranks = set(ranks_of(folder))
    second = build(world.settings, ProcessExecutor(rank_command=FAKE))
    with pytest.raises(RuntimeError, match="TRAINBUS_DATA_DIR"):
        await asyncio.wait_for(second.run(), 90)
    assert set(ranks_of(folder)) == ranks
    seen = len(await world.steps())
    await world.wait_steps(seen + 5)
    assert await world.ends() == []


def _handles_sigterm(pid: int) -> bool:
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


async def test_unreadable_placement_is_set_aside(world: World, agent: Any) -> None:
    """Torn by a full disk, or of a contract to come: it must not keep the node from working."""
    folder = world.settings.data_dir.resolve() / "runs" / "torn" / "g1"
    folder.mkdir(parents=True)
    (folder / "placement.json").write_text('{"placed": {"run_id": "torn"')
    await agent()
    assert (await _joined(world, 1)).running == ()
    assert [path.name for path in folder.iterdir()] == ["placement.unreadable.json"]
    await world.place(params={"steps": 3})
    assert (await world.wait_for(RunExited)).outcome == "succeeded"
