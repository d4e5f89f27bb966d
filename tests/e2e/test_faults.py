"""kill -9 of everything in turn, in mid-run. Each time the run completes and the audit holds."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.support import LAKE, Stack, connected
from trainbus.embedded.launch import StackProcess
from trainbus.embedded.layout import StackOptions

pytestmark = [pytest.mark.e2e]

EPOCHS = 8
DONE_S = 240.0


async def start(stack: Stack, step: int = 25) -> str:
    """Publish a run and wait until it has trained up to ``step``."""
    run_id = await stack.publish(await stack.slow_run(epochs=EPOCHS))
    await stack.wait_for_step(run_id, step)
    return run_id


async def finish(stack: Stack, run_id: str) -> None:
    await stack.wait_for(run_id, "completed", DONE_S)
    await stack.audit(run_id, epochs=EPOCHS)


async def test_every_service_is_killed_in_turn(stack: Stack) -> None:
    run_id = await start(stack, step=5)
    for name in ("scheduler", "checkpoint", "tracking", "ingestion", "sharding", "evaluation", "gateway"):
        stack.kill(name)
        await asyncio.sleep(0.4)  # the deaths are spread over the run
    await finish(stack, run_id)


@pytest.mark.parametrize(("name", "seed"), [("ingestion", 1), ("sharding", 2), ("scheduler", 3)])
async def test_what_prepares_a_run_is_killed_while_it_does(stack: Stack, name: str, seed: int) -> None:
    # Another seed of the split is another dataset: nothing can be answered from an earlier one.
    data = {"source": LAKE, "format": "images", "split": {"seed": seed}}
    run_id = await stack.publish(await stack.slow_run(epochs=EPOCHS, step_s=0.001, data=data))
    await stack.wait_for(run_id, "accepted")
    stack.kill(name)
    await finish(stack, run_id)


async def test_evaluation_is_killed_while_it_evaluates(stack: Stack) -> None:
    run_id = await stack.publish(await stack.slow_run(epochs=EPOCHS, step_s=0.001))
    await stack.wait_for(run_id, "completed", DONE_S)
    stack.kill("evaluation")
    await stack.audit(run_id, epochs=EPOCHS)


async def test_a_rank_is_killed(stack: Stack) -> None:
    run_id = await start(stack)
    os.kill(stack.rank_pids(run_id)[-1], signal.SIGKILL)
    await finish(stack, run_id)
    generations = [r.event.generation for r in await stack.facts(run_id) if r.event.fact == "placed"]
    assert generations == [1, 2]


async def test_an_agent_is_killed(stack: Stack) -> None:
    run_id = await start(stack)
    placed = await stack.wait_for(run_id, "placed")
    stack.kill(placed.members[0].node_id)
    await finish(stack, run_id)


async def test_the_event_server_is_away_for_five_seconds(stack: Stack) -> None:
    run_id = await start(stack)
    await stack.kill_for("nats", 5)
    await finish(stack, run_id)


async def test_the_object_store_is_away_for_five_seconds(stack: Stack) -> None:
    run_id = await start(stack)
    await stack.kill_for("s3", 5)
    await finish(stack, run_id)


async def test_everything_is_delivered_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINBUS_INJECT_DUPLICATES", "1")
    folder = tmp_path / "data"
    with StackProcess(StackOptions(folder), output=tmp_path / "output.log") as process:
        process.wait_ready()
        bus, objects = connected(folder)
        await bus.connect(reconcile_topology=False)
        async with objects:
            stack = Stack(folder, bus, objects)
            await stack.fill_lake()
            run_id = await start(stack)
            await finish(stack, run_id)
            staged = len(await bus.read_history(f"run.{run_id}.checkpoint_staged"))
            info = await bus.js.consumer_info("FACTS", "checkpoint")
            assert info.delivered.consumer_seq >= 2 * staged, "the fault was not there"
        await bus.close()
