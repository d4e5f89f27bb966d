"""A run begins with another's weights: on other data, under another head, through kills and preemption."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from tests.e2e.support import DONE_S, IMAGES, PROJECT, Body, Stack, digits, held, package
from trainbus.embedded.launch import read_stack
from trainbus.ranks.step_hold import StepHold

#: The first five digits alone.
HALF = "s3://lake/digits-half/"
#: A body under a head of its own.
TASK = """
from slow_task import Slow
from torch import nn


class Net(nn.Module):
    def __init__(self, heads):
        super().__init__()
        convolution = nn.Conv2d(1, 4, 3)
        self.body = nn.Sequential(convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1))
        self.head = nn.Linear(144, heads)

    def forward(self, x_B88):
        return self.head(self.body(x_B88[:, None]))


class Headed(Slow):
    def __init__(self, heads=10, **params):
        super().__init__(step_s=0.0, **params)
        self.heads = heads

    def model(self):
        return Net(self.heads)
"""
FILES = {"slow_task.py": (PROJECT / "slow_task.py").read_text(), "headed_task.py": TASK}


async def headed(stack: Stack, **changes: Any) -> Body:
    body = await stack.slow_run(evaluation=None, model=None, slots=2)
    training = {"epochs": 2, "global_batch": 16, "checkpoint_every_steps": 10, "logical_ranks": 4}
    own = {"name": "headed", "code": await stack.upload(package(FILES)), "task": "headed_task:Headed", "params": {}}
    return {**body, **own, "training": training, "retention": {"last": 10}, **changes}


async def half(stack: Stack, init_from: str, holds: dict[StepHold, int] | None = None, **changes: Any) -> Body:
    """A request that fine-tunes on half of the digits, in some forty steps."""
    data = {"source": HALF, "format": "images"}
    training = {"epochs": 5, "global_batch": 16, "checkpoint_every_steps": 10, "logical_ranks": 4, "ema_decay": 0.9}
    params = {"heads": 5, **held(holds)}
    weights = {"init_from": init_from, "init_exclude": ["head.*"]}
    return await headed(stack, name="half", data=data, training=training, params=params, **{**weights, **changes})


async def trained(stack: Stack, **changes: Any) -> tuple[str, Any]:
    """Train on all digits; return (run, its last checkpoint)."""
    base = await stack.publish(await headed(stack, **changes))
    completed = await stack.wait_for(base, "completed", DONE_S)
    return base, completed.checkpoint


async def digests(stack: Stack, run_id: str) -> dict[int, str]:
    commits = [r.event for r in await stack.facts(run_id) if r.event.fact == "checkpoint_committed"]
    assert {commit.exactness for commit in commits} == {"exact"}
    return {commit.checkpoint.step: commit.state_digest for commit in commits}


async def deleted(stack: Stack, run_id: str) -> str:
    """A checkpoint of the run that retention has deleted."""
    async with asyncio.timeout(DONE_S):
        async for batch in stack.bus.follow("FACTS", (f"run.{run_id}.checkpoint_deleted",)):
            for message in batch:
                return str(message.event.uri)
    raise AssertionError("unreachable")


async def test_a_fine_tuned_run_is_the_same_to_the_bit_whatever_happens_to_it(stack: Stack, tmp_path: Path) -> None:
    images = [(path, png) for path, png in digits(IMAGES) if path[0] in "01234"]
    await asyncio.gather(*(stack.objects.put(f"{HALF}{path}", png) for path, png in images))
    base, checkpoint = await trained(stack)

    # Undisturbed, as a person would ask for it.
    project, request = tmp_path / "project", tmp_path / "half.json"
    project.mkdir()
    for name, text in FILES.items():
        (project / name).write_text(text)
    body = await half(stack, "s3://models/given-as-an-option.json", init_exclude=[])
    request.write_text(json.dumps({name: value for name, value in body.items() if name != "code"}))
    options = ("--request", str(request), "--init-from", base, "--init-exclude", "head.*", "--json")
    submitted = await stack.cli("submit", str(project), "headed_task:Headed", *options)
    assert submitted.code == 0, submitted.text
    undisturbed = json.loads(submitted.out)["run_id"]
    accepted = await stack.wait_for(undisturbed, "accepted")
    assert (accepted.spec.init_from, accepted.spec.init_exclude) == (checkpoint.uri, ("head.*",))
    started = await stack.wait_for(undisturbed, "started", DONE_S)
    assert (started.step, started.samples_consumed) == (0, 0)
    await stack.wait_for(undisturbed, "completed", DONE_S)
    expected = await digests(stack, undisturbed)

    # All ranks are killed before the first checkpoint; after it the run gives way to others.
    with stack.hold() as before_checkpoint, stack.hold() as after_checkpoint, stack.hold() as slots_taken:
        holds = {before_checkpoint: 6, after_checkpoint: 15}
        disturbed = await stack.publish(await half(stack, checkpoint.uri, holds))
        await stack.wait_for_step(disturbed, 3, DONE_S)
        for pid in stack.rank_pids(disturbed):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        before_checkpoint.release()
        await stack.wait_for(disturbed, "checkpoint_committed", DONE_S)
        important = [await stack.occupant(slots_taken, priority=5) for _ in range(3)]
        # Not only asked to: released before it is asked, it could come to its end.
        await stack.wait_for(disturbed, "released", DONE_S, condition=lambda event: event.generation > 1)
    for other in important:
        await stack.wait_for(other, "completed", DONE_S)
    await stack.wait_for(disturbed, "completed", DONE_S)
    facts = [r.event for r in await stack.facts(disturbed)]
    starts = {event.generation: event for event in facts if event.fact == "started"}
    assert (starts[2].step, starts[2].resumed_from) == (0, "scratch")
    placed = [event for event in facts if event.fact == "placed"]
    first, again, *later = [(each.resume is not None, each.init and each.init.uri) for each in placed]
    assert first == again == (False, checkpoint.uri)
    assert later
    assert set(later) == {(True, None)}
    found = await digests(stack, disturbed)
    same = {step: digest for step, digest in found.items() if step in expected}
    assert max(found) == max(expected)
    assert len(same) >= 4
    assert same == {step: expected[step] for step in same}

    reproduced = await stack.cli("reproduce", disturbed, "--slots", "1", "--json")
    said = json.loads(reproduced.out)
    assert (reproduced.code, said["same"], said["final_digest"]) == (0, True, expected[max(expected)]), reproduced.text
    shown = await stack.cli("show", disturbed)
    assert f"weights from  {checkpoint.uri} (without head.*)" in shown.text

    info = read_stack(stack.data_dir)
    assert info is not None
    await stack.tracked(disturbed)
    tracked = await stack.wait_for(disturbed, "tracked")
    page = MlflowClient(info.mlflow_tracking_uri).get_run(tracked.mlflow_run_id)
    assert page.data.tags["trainbus.init_from"] == checkpoint.uri


async def test_what_cannot_be_begun_with_is_said(stack: Stack) -> None:
    base, checkpoint = await trained(stack, retention={"last": 1, "best": 0})
    misfit = await stack.publish(await headed(stack, params={"heads": 3}, init_from=checkpoint.uri, max_attempts=3))
    failed = await stack.wait_for(misfit, "failed", DONE_S)
    assert "'head.weight' is (10, 144) float32 in the checkpoint, (3, 144) float32 in the model" in failed.reason
    assert 'set init_exclude to ["head.*"]' in failed.reason
    assert failed.generation == 1, "no attempt can change it"

    for uri in (await deleted(stack, base), "s3://models/none.json"):
        run_id = await stack.publish(await headed(stack, init_from=uri))
        rejected = await stack.wait_for(run_id, "rejected")
        [problem] = rejected.problems
        assert problem.field == "init_from"
        assert f"no committed checkpoint has the manifest {uri}, or it was deleted" in problem.message
