"""A run is trained again from its record and compared to the bit; what hides randomness is found out."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.e2e.support import PROJECT, Body, Stack, package

#: A task whose gradients depend on what no seed can repeat.
HIDDEN = """
import random

from slow_task import Slow


class Hidden(Slow):
    def loss(self, model, batch):
        return super().loss(model, batch) * (1 + random.SystemRandom().random() / 100)
"""


async def exact_run(stack: Stack, **changes: Any) -> Body:
    """Thirty steps of four logical ranks, with states saved after 10, 20 and 30."""
    files = {"slow_task.py": (PROJECT / "slow_task.py").read_text(), "hidden_task.py": HIDDEN}
    body = await stack.slow_run(epochs=2, step_s=0.0, evaluation=None, model=None, slots=2)
    training = {"epochs": 2, "global_batch": 16, "checkpoint_every_steps": 10, "logical_ranks": 4}
    body["retention"] = {"last": 10}
    return {**body, "code": await stack.upload(package(files)), "training": training, **changes}


async def test_a_run_is_reproduced_to_the_bit_and_what_cannot_be_is_found_out(stack: Stack) -> None:
    fast = {"epochs": 1, "global_batch": 16}
    exact, hidden, plain = await asyncio.gather(
        stack.publish(await exact_run(stack)),
        stack.publish(await exact_run(stack, task="hidden_task:Hidden", slots=1)),
        stack.publish(await exact_run(stack, training=fast, slots=1)),
    )
    for run_id in (exact, hidden, plain):
        await stack.wait_for(run_id, "completed")
    commits = [r.event for r in await stack.facts(exact) if r.event.fact == "checkpoint_committed"]
    digests = {commit.checkpoint.step: commit.state_digest for commit in commits}
    assert {commit.exactness for commit in commits} == {"exact"}

    again = await stack.cli("reproduce", exact, "--slots", "1", "--json")
    said = json.loads(again.out)
    assert (again.code, said["same"], said["compared"]) == (0, True, len(digests)), again.text
    assert said["final_digest"] == digests[max(digests)]

    later = await stack.cli("reproduce", exact, "--from", "20")
    assert later.code == 0, later.text
    assert f"identical at {len([step for step in digests if step > 20])} checkpoints" in later.text

    other = await stack.cli("reproduce", hidden, "--json")
    said = json.loads(other.out)
    assert (other.code, said["same"], said["step"], said["same_up_to"]) == (1, False, 10, None), other.text
    assert said["tensor"] == "model/1.bias"
    # It is told to end; one that is done sooner than the request arrives has ended too.
    await stack.wait_for(said["reproduction"], "completed", or_else=("cancelled",))

    refused = await stack.cli("reproduce", plain)
    assert (refused.code, "fast mode" in refused.text) == (2, True)

    shown = await stack.cli("show", exact)
    assert "exact (4 logical ranks" in shown.text
    assert digests[max(digests)] in shown.text
