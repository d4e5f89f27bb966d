"""kill -9 of everything in turn, in mid-run. Each time the run completes and the audit holds."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.e2e.support import DONE_S, LAKE, Stack, own_stack

pytestmark = [pytest.mark.e2e]

EPOCHS = 8
#: A step is reported while the next ones are under way.
REPORTED_LATER = 5


@asynccontextmanager
async def held_run(stack: Stack, step: int = 25) -> AsyncIterator[str]:
    """Publish a run and let it train up to ``step``; it goes on when the block ends."""
    with stack.hold() as hold:
        run_id = await stack.publish(await stack.slow_run(epochs=EPOCHS, holds={hold: step + REPORTED_LATER}))
        await stack.wait_for_step(run_id, step, DONE_S)
        yield run_id


async def finish(stack: Stack, run_id: str) -> None:
    await stack.wait_for(run_id, "completed", DONE_S)
    await stack.audit(run_id, epochs=EPOCHS)


async def test_every_service_is_killed_in_turn(stack: Stack) -> None:
    services = ("scheduler", "checkpoint", "tracking", "ingestion", "sharding", "evaluation", "gateway")
    async with held_run(stack, step=5) as run_id:
        for name in services[:4]:
            stack.kill(name)
    for number, name in enumerate(services[4:]):
        await stack.wait_for_step(run_id, 20 + 30 * number, DONE_S)  # the deaths are spread over the run
        stack.kill(name)
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
    async with held_run(stack) as run_id:
        os.kill(stack.rank_pids(run_id)[-1], signal.SIGKILL)
        await stack.wait_for(run_id, "placed", condition=lambda placed: placed.generation == 2)
    await finish(stack, run_id)


async def test_an_agent_is_killed(stack: Stack) -> None:
    async with held_run(stack) as run_id:
        placed = await stack.wait_for(run_id, "placed")
        stack.kill(placed.members[0].node_id)
    await finish(stack, run_id)


async def test_the_event_server_is_away_for_five_seconds(stack: Stack) -> None:
    async with held_run(stack) as run_id:
        stack.kill("nats")
    await stack.kill_for("nats", 5)
    await finish(stack, run_id)


async def test_the_object_store_is_away_for_five_seconds(stack: Stack) -> None:
    async with held_run(stack) as run_id:
        stack.kill("s3")
    await stack.kill_for("s3", 5)
    await finish(stack, run_id)


async def test_everything_is_delivered_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINBUS_INJECT_DUPLICATES", "1")
    async with own_stack(tmp_path) as stack:
        run_id = await stack.publish(await stack.slow_run(epochs=EPOCHS))
        await finish(stack, run_id)
        staged = len(await stack.bus.read_history(f"run.{run_id}.checkpoint_staged"))
        info = await stack.bus.js.consumer_info("FACTS", "checkpoint")
        assert info.delivered.consumer_seq >= 2 * staged, "the fault was not there"
