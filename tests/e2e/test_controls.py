"""What an operator does to runs and nodes, on the real stack: cancel, restore, drain, and give way to the important."""

from __future__ import annotations

from typing import Any

import httpx
import psutil
import pytest

from contracts.base import run_id_for
from tests.e2e.support import DONE_S, Stack
from trainbus.embedded.launch import read_stack

pytestmark = [pytest.mark.e2e]

NO_VERDICT: dict[str, Any] = {"model": None, "evaluation": None}


async def started(stack: Stack, run_id: str) -> tuple[int, int]:
    """Step and samples at which a run's first generation began."""
    found = await stack.wait_for(run_id, "started", DONE_S)
    return found.step, found.samples_consumed


async def test_a_running_run_is_cancelled(stack: Stack) -> None:
    with stack.hold() as hold:
        run_id = await stack.publish(await stack.slow_run(holds={hold: 10}, **NO_VERDICT))
        await stack.wait_for_step(run_id, 5)
        pids = stack.rank_pids(run_id)
        assert pids
        await stack.request("cancel.requested", {"run_id": run_id, "reason": "no longer needed"})
        cancelled = await stack.wait_for(run_id, "cancelled")
    assert cancelled.reason == "no longer needed"
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    # Its slots are free again: as many as there are can be had.
    others = [await stack.sleeper(seconds=0) for _ in range(4)]
    for other in others:
        await stack.wait_for(other, "completed")


async def test_a_waiting_run_is_cancelled_without_ever_starting(stack: Stack) -> None:
    with stack.hold() as slots_taken:
        for occupant in [await stack.occupant(slots_taken) for _ in range(4)]:
            await stack.wait_for(occupant, "placed")
        run_id = await stack.sleeper(seconds=0)
        waiting = await stack.wait_for(run_id, "waiting")
        assert waiting.code == "slots"
        await stack.request("cancel.requested", {"run_id": run_id})
        await stack.wait_for(run_id, "cancelled")
    assert "placed" not in [message.event.fact for message in await stack.facts(run_id)]


async def test_restoring_starts_a_new_run_where_the_old_one_was(stack: Stack) -> None:
    training = {"epochs": 3, "global_batch": 16, "checkpoint_every_steps": 10}
    body = await stack.slow_run(step_s=0.001, training=training, retention={"last": 10}, **NO_VERDICT)
    parent = await stack.publish(body)
    completed = await stack.wait_for(parent, "completed", DONE_S)
    committed = {
        message.event.checkpoint.step: message.event.checkpoint
        for message in await stack.facts(parent)
        if message.event.fact == "checkpoint_committed"
    }
    last = completed.checkpoint.step
    assert {10, 20, 30, 40, last} <= set(committed)
    end_of_two = max(step for step, checkpoint in committed.items() if checkpoint.epoch == 2)
    by_step = await restore_step(stack, parent, 10)
    by_epoch = await stack.request("restore.requested", {"run_id": parent, "epoch": 2})
    for run_id, step in ((by_step, 10), (by_epoch, end_of_two)):
        accepted = await stack.wait_for(run_id, "accepted")
        assert accepted.parent_run_id == parent
        assert accepted.spec.resume_from == committed[step].uri
        assert await started(stack, run_id) == (step, committed[step].samples_consumed)
        done = await stack.wait_for(run_id, "completed", DONE_S)
        assert (done.checkpoint.step, done.checkpoint.samples_consumed) == (last, completed.checkpoint.samples_consumed)
        steps = await stack.tracked(run_id, "train/loss")
        assert sorted(steps["train/loss"]) == list(range(step + 1, last + 1))
    # The old run is what it was.
    assert [r.event.fact for r in await stack.facts(parent)].count("completed") == 1
    missing = await stack.request("restore.requested", {"run_id": parent, "step": 11})
    rejected = await stack.wait_for(missing, "rejected")
    assert "step 10 (epoch 1)" in rejected.problems[0].message


async def restore_step(stack: Stack, run_id: str, step: int) -> str:
    """Ask the gateway, as a person's script would; return the new run's id."""
    info = read_stack(stack.data_dir)
    assert info is not None
    async with httpx.AsyncClient(base_url=info.gateway_url, timeout=120) as client:
        headers = {"Idempotency-Key": f"restore-{run_id}"}
        answers = [
            await client.post(f"/training-runs/{run_id}/checkpoints/{step}/restore", headers=headers) for _ in range(2)
        ]
    assert [answer.status_code for answer in answers] == [202, 202], answers[0].text
    first, second = (str(answer.json()["run_id"]) for answer in answers)
    assert first == second == run_id_for("trainbus/gateway", f"restore-{run_id}")
    return first


async def test_a_drained_node_gets_nothing_until_it_is_undrained(stack: Stack) -> None:
    drained = ""
    try:
        with stack.hold() as hold:
            run_id = await stack.publish(await stack.slow_run(epochs=12, holds={hold: 15}))
            await stack.wait_for_step(run_id, 10)
            placed = await stack.wait_for(run_id, "placed")
            [drained] = {member.node_id for member in placed.members}
            await stack.request("drain.requested", {"node_id": drained, "reason": "a fan is loud"})
            moved = await stack.wait_for(run_id, "placed", condition=lambda event: event.generation == 2)
        assert drained not in {member.node_id for member in moved.members}
        assert moved.resume is not None
        # Three more than fit on the other node: they wait rather than go where nothing may go.
        others = [await stack.sleeper(seconds=0) for _ in range(3)]
        await stack.wait_for(run_id, "completed", DONE_S)
        for other in others:
            await stack.wait_for(other, "completed", DONE_S)
        for other in (run_id, *others):
            last = [r.event for r in await stack.facts(other) if r.event.fact == "placed"][-1]
            assert drained not in {member.node_id for member in last.members}
        await stack.audit(run_id, epochs=12)
        sequence = (await stack.bus.js.stream_info("FACTS")).state.last_seq
        stack.kill(drained)
        await stack.wait_for_node(drained, "joined", after=sequence)
        shown = await stack.cli("nodes")
        assert "a fan is loud; until `trainbus undrain`" in " ".join(shown.text.split())
        with stack.hold() as hold:
            others = [await stack.occupant(hold) for _ in range(3)]
            await stack.wait_for(others[-1], "waiting")
            assert [r.event.fact for r in await stack.facts(others[-1])].count("placed") == 0
    finally:
        if drained:
            undrained = await stack.cli("undrain", drained)
            assert "undrained by" in undrained.text
    with stack.hold() as hold:
        again = [await stack.occupant(hold) for _ in range(4)]
        used = [(await stack.wait_for(other, "placed")).members[0].node_id for other in again]
    assert drained in used


async def test_a_run_that_cannot_shrink_gives_way_whole_and_comes_back(stack: Stack) -> None:
    with stack.hold() as in_mid_run, stack.hold() as slots_taken:
        run_id = await stack.publish(await stack.slow_run(epochs=12, slots=2, holds={in_mid_run: 15}))
        await stack.wait_for_step(run_id, 10)
        # Two find a free slot. For the third the run must go, since it cannot do with less than it has.
        important = [await stack.occupant(slots_taken, priority=5) for _ in range(3)]
        stopping = await stack.wait_for(run_id, "stopping")
    assert stopping.reason == "preempted"
    assert stopping.message in [f"gives way to run {other} of priority 5" for other in important]
    for other in important:
        await stack.wait_for(other, "completed", DONE_S)
    await stack.wait_for(run_id, "completed", DONE_S)
    facts = [message.event for message in await stack.facts(run_id)]
    assert [fact.world_size for fact in facts if fact.fact == "placed"] == [2, 2]
    [released] = [fact for fact in facts if fact.fact == "released"]
    resumed = [fact for fact in facts if fact.fact == "placed"][1]
    assert released.clean
    assert (resumed.resume.step, resumed.resume.samples_consumed) == (released.step, released.samples_consumed)
    await stack.audit(run_id, epochs=12)
