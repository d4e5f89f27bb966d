"""Parts hang, or are killed again and again, while a run trains, ends and is judged: nothing false is said about it."""

from __future__ import annotations

import psutil
import pytest

from tests.e2e.outages import STEPS, Outcome, draw, play, request
from tests.e2e.support import DONE_S, Stack
from tests.suite.pauses import paused

pytestmark = [pytest.mark.e2e]


async def test_a_run_is_not_complete_while_its_final_checkpoint_is_not_committed(stack: Stack) -> None:
    with stack.hold() as hold:
        body = await request(stack)
        body["params"]["holds"] = {str(hold.path): 40}
        run_id = await stack.publish(body)
        await stack.wait_for(run_id, "checkpoint_committed", DONE_S)
        checkpoint = paused(psutil.Process(stack.pid("checkpoint")))
        checkpoint.__enter__()
    try:
        waiting = await stack.wait_for(run_id, "waiting", DONE_S, lambda fact: fact.code == "uncommitted")
        staged = [m.event for m in await stack.facts(run_id) if m.event.fact == "checkpoint_staged"]
        last = max(fact.step for fact in staged if fact.final)
        assert f"step {last} is committed" in waiting.message
        why = await stack.cli("why", run_id)
        assert f"step {last} is committed" in " ".join(why.text.split())
        listed = await stack.cli("ps")
        assert "is committed" in " ".join(listed.text.split())
        said = {message.event.fact for message in await stack.facts(run_id)}
        assert not said & {"completed", "evaluated", "promoted"}
    finally:
        checkpoint.__exit__(None, None, None)
    completed = await stack.wait_for(run_id, "completed", DONE_S)
    assert completed.checkpoint.step == last
    await stack.wait_for(run_id, "promoted", DONE_S)
    deleted = {m.event.uri for m in await stack.facts(run_id) if m.event.fact == "checkpoint_deleted"}
    assert completed.checkpoint.uri not in deleted


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Outcome]:
    """What came of the run that nothing was done to, once it has been played."""
    return {}


@pytest.mark.parametrize("number", range(5))
async def test_outages_change_nothing(stack: Stack, undisturbed: dict[str, Outcome], number: int) -> None:
    if not undisturbed:
        _, undisturbed["reference"] = await play(stack)
        assert undisturbed["reference"].step >= STEPS
    outages = draw(number, seconds=(1.0, 8.0))
    _, outcome = await play(stack, outages)
    assert outcome == undisturbed["reference"], [str(outage) for outage in outages]
