"""A fact whose body is about something else than its subject is believed by no reader."""

from __future__ import annotations

import json
from typing import Any

from contracts import subjects, topology
from contracts.events.run import RunCancelled, RunCompleted
from services.kit.bus import Bus, Message, UndecodableEvent
from tests.kit.support import until

FORGED = json.dumps({"run_id": "rvictim", "generation": 1, "reason": "forged"}).encode()


async def test_history_the_last_fact_and_following_leave_a_forged_fact_out(bus: Bus) -> None:
    await bus.publish(RunCancelled(run_id="rmine", reason="mine"))
    await bus.js.publish("run.rmine.cancelled", FORGED)
    await bus.js.publish("run.rmine.failed", FORGED, headers={"ce-type": RunCancelled.type})
    found = await bus.read_history(subjects.run("rmine"))
    assert [message.event.reason for message in found] == ["mine"]
    last = await bus.get_last_message("run.rmine.cancelled")
    assert last is not None
    assert (last.event.reason, last.sequence) == ("mine", 2)
    async for batch in bus.follow(topology.FACTS.name, until_caught_up=True, include_undecodable=True):
        for message in batch[1:]:
            assert isinstance(message.event, UndecodableEvent)
            assert "is on another subject" in message.event.problem


async def test_a_handler_dead_letters_a_forged_fact(make_bus: Any) -> None:
    bus: Bus = await make_bus("evaluation")
    scheduler: Bus = await make_bus("scheduler")
    handled: list[str] = []

    @bus.subscriber(topology.EVALUATION, RunCompleted)
    async def on_completed(message: Message[RunCompleted]) -> None:
        handled.append(message.event.run_id)

    await bus.start()
    await bus.js.publish("run.rmine.completed", FORGED)
    await scheduler.publish(RunCompleted(run_id="rmine", generation=1))

    async def dead() -> bool:
        return await bus.get_last_sequence("dead.>", stream=topology.DEAD_LETTERS.name) > 0

    await until(dead, "a dead letter")
    await until(lambda: handled, "the true fact")
    assert handled == ["rmine"]
