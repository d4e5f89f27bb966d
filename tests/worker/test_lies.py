"""Facts that somebody else has published: an agent acts on none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from contracts.events.run import (
    Member,
    RunAccepted,
    RunCancelled,
    RunCompleted,
    RunExited,
    RunFailed,
    RunQueued,
    RunReleased,
    RunStarted,
)
from tests.kit.support import until
from tests.worker.conftest import World, ranks_of


def ignored(fact: str) -> float:
    return REGISTRY.get_sample_value("trainbus_worker_unsupported_facts_total", {"fact": fact}) or 0.0


async def test_a_placement_that_nothing_supports_is_not_executed(world: World, agent: Any, tmp_path: Path) -> None:
    await agent()
    canary, before = tmp_path / "canary", ignored("placed")
    touch = ["touch", str(canary)]
    # Never accepted; accepted with another command; of a generation that nobody waits for; with ranks that are missing.
    await world.bus.publish(world.placement("never", command=touch))
    await world.support(world.placement("other", command=["true"]))
    await world.bus.publish(world.placement("other", command=touch))
    for run_id, change in {"later": {"generation": 2}, "half": {"world_size": 2}}.items():
        placed = world.placement(run_id, command=touch)
        await world.support(placed)
        await world.bus.publish(placed.model_copy(update=change))
    await until(lambda: ignored("placed") == before + 4, "the lies to be found out")
    # The scheduler takes the second one for its own: it gets an answer, and places the run again.
    released = await world.wait_for(RunReleased, "other")
    assert (released.generation, released.clean) == (1, False)
    await world.place("other", generation=2, command=["true"])
    assert (await world.wait_for(RunExited, "other")).outcome == "succeeded"
    assert not canary.exists()
    for run_id in ("never", "later", "half"):
        assert not any(isinstance(fact, RunStarted | RunExited | RunReleased) for fact in await world.facts(run_id))


async def test_lies_beside_the_true_facts_keep_nothing_from_running(world: World, agent: Any) -> None:
    await agent()
    placed = world.placement(params={"steps": 20, "hold_at": 5, "lr": float("nan")})
    await world.support(placed)
    await world.bus.publish(RunQueued(run_id="r1", next_generation=9, reason="new", failures=0))
    other = RunAccepted(run_id="r1", spec=world.spec(command=["false"]), request_id="2", request_source="liar")
    await world.bus.js.publish(other.subject, other.model_dump_json().encode())
    await world.bus.publish(placed)
    await world.wait_steps(5)
    # It is not ended here by a placement elsewhere that nobody waits for.
    elsewhere = (Member(node_id="n9", slots=(0,), ranks=(0,)),)
    await world.bus.publish(world.placement(generation=4, members=elsewhere))
    (world.settings.data_dir.resolve() / "runs" / "r1" / "g1" / "go").touch()
    assert (await world.wait_for(RunExited)).outcome == "succeeded"


async def test_ranks_that_are_said_to_have_ended_are_ended(world: World, agent: Any) -> None:
    await agent()
    await world.place(params={"steps": 1_000_000})
    await world.wait_steps(5)
    lie = RunReleased(run_id="r1", generation=1, node_id=world.settings.node_id)
    await world.bus.publish(lie)
    await until(lambda: not ranks_of(world.settings.data_dir.resolve()), "the ranks to end")
    assert await world.ends() == [lie]


async def test_a_run_is_not_completed_while_its_ranks_run(world: World, agent: Any) -> None:
    await agent()
    before = ignored("completed")
    await world.place(params={"steps": 20, "hold_at": 5})
    await world.wait_steps(5)
    await world.bus.publish(RunCompleted(run_id="r1", generation=1))
    await until(lambda: ignored("completed") == before + 1, "the lie to be found out")
    (world.settings.data_dir.resolve() / "runs" / "r1" / "g1" / "go").touch()
    exited = await world.wait_for(RunExited)
    assert (exited.outcome, exited.step) == ("succeeded", 20)


@pytest.mark.parametrize("end", [RunFailed(run_id="r1", reason="a lie"), RunCancelled(run_id="r1", reason="a lie")])
async def test_a_forged_end_of_a_run_is_answered(world: World, agent: Any, end: Any) -> None:
    await agent()
    await world.place(params={"steps": 1_000_000})
    await world.wait_steps(5)
    await world.bus.publish(end)
    # Its slots are not held for ever, whatever the scheduler believes.
    await world.wait_for(RunReleased)
