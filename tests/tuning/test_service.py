"""The service on a real server: studies begin, survive a kill, and leave no run behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from contracts import subjects
from contracts.base import study_id_for
from contracts.events.run import ProgressPoint, RunAccepted, RunCompleted, RunProgress
from contracts.spec.run import RunSpec
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.tuning.app import build

SOURCE = "test"
STUDY = study_id_for(SOURCE, "1")
BODY: dict[str, Any] = {
    "name": "sweep",
    "run": {"name": "run", "command": ["python", "train.py"]},
    "space": {"lr": "1e-4..1e-1 log"},
    "trials": 3,
    "parallel": 2,
    "epochs": 4,
    "sampler": {"name": "random"},
    "pruning": {"name": "median", "startup_trials": 1},
}


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[None]:
    service = build(settings)
    task = asyncio.create_task(service.run())
    try:
        yield
    finally:
        service.stopping.set()
        await task


async def request(bus: Bus, verb: str, body: Any, event_id: str = "1") -> None:
    headers = {"ce-id": event_id, "ce-source": SOURCE}
    await bus.js.publish(subjects.request(verb), json.dumps(body).encode(), headers=headers)


async def until(bus: Bus, subject: str, enough: int = 1, stream: str = "FACTS") -> list[Any]:
    """Wait until ``enough`` events stand on ``subject``."""
    found: list[Any] = []
    async with asyncio.timeout(90):
        async for batch in bus.follow(stream, (subject,), idle_s=0.05):
            found += [each.event for each in batch]
            if len(found) >= enough:
                break
    return found


async def accept(bus: Bus, run_id: str, trial: int) -> None:
    spec = RunSpec(name="run", command=["true"], study=STUDY, trial=trial)
    await bus.publish(RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="trainbus/tuning"))


async def complete(bus: Bus, run_id: str, loss: float) -> None:
    await bus.publish(RunCompleted(run_id=run_id, generation=1, metrics={"validation/loss": loss}))


async def report(bus: Bus, run_id: str, epoch: int, loss: float) -> None:
    point = ProgressPoint(step=epoch, time=0.0, values={"validation/loss": loss})
    progress = RunProgress(run_id=run_id, generation=1, node_id="n1", rank=0, offset=epoch, points=(point,))
    await bus.publish(progress)


@pytest.mark.shell
async def test_a_study_goes_on_after_the_service_was_away_and_prunes_what_is_bad(settings: Settings, bus: Bus) -> None:
    async with running(settings):
        await request(bus, "tune", BODY)
        first, second = await until(bus, f"study.{STUDY}.trial_suggested", 2)
        requests = await until(bus, "train.requested", 2, "REQUESTS")
        assert [each.params["lr"] for each in requests] == [first.params["lr"], second.params["lr"]]
        await accept(bus, first.run_id, 0)
        await accept(bus, second.run_id, 1)
        for epoch in range(1, 4):
            await report(bus, first.run_id, epoch, 0.5)
        await until(bus, f"study.{STUDY}.trial_reported", 3)
    # What happens meanwhile is in the log.
    await complete(bus, first.run_id, 0.5)
    for epoch in range(1, 4):
        await report(bus, second.run_id, epoch, 0.9)
    async with running(settings):
        [ended] = await until(bus, f"study.{STUDY}.trial_ended")
        assert (ended.trial, ended.outcome, ended.values) == (0, "completed", (0.5,))
        [pruned] = await until(bus, f"study.{STUDY}.trial_pruned")
        assert (pruned.trial, pruned.run_id) == (1, second.run_id)
        [cancel] = await until(bus, "cancel.requested", 1, "REQUESTS")
        assert (cancel.run_id, cancel.reason) == (second.run_id, pruned.reason)
        # A result that comes too late.
        await complete(bus, second.run_id, 0.0)
        third = (await until(bus, f"study.{STUDY}.trial_suggested", 3))[2]
        await accept(bus, third.run_id, 2)
        await complete(bus, third.run_id, 0.3)
        [completed] = await until(bus, f"study.{STUDY}.completed")
        assert completed.best == (2,)
        assert len(await until(bus, "train.requested", 3, "REQUESTS")) == 3


@pytest.mark.shell
async def test_a_study_is_rejected_in_words_and_another_is_stopped(settings: Settings, bus: Bus) -> None:
    async with running(settings):
        await request(bus, "tune", {"name": "sweep", "space": {"lr": [1e-3, 1e-4]}}, "2")
        [rejected] = await until(bus, f"study.{study_id_for(SOURCE, '2')}.rejected")
        assert "run: give what each trial is a run of" in rejected.reason
        await request(bus, "tune", BODY)
        suggested = await until(bus, f"study.{STUDY}.trial_suggested", 2)
        for trial in suggested:
            await accept(bus, trial.run_id, trial.trial)
        await request(bus, "stop_study", {"study_id": STUDY, "reason": "enough"}, "3")
        [stopped] = await until(bus, f"study.{STUDY}.stopped")
        assert stopped.reason == "enough"
        cancels = await until(bus, "cancel.requested", 2, "REQUESTS")
        assert {each.run_id for each in cancels} == {trial.run_id for trial in suggested}


@pytest.mark.shell
async def test_trials_of_a_task_end_with_their_study_when_the_objective_is_not_among_the_metrics(
    settings: Settings, bus: Bus
) -> None:
    task = {
        "task": "t:T",
        "code": {"uri": "s3://code/c", "sha256": "0" * 64},
        "data": {"source": "s3://lake/d/"},
        "training": {"epochs": 4},
    }
    body = {**BODY, "run": {"name": "run", **task}, "epochs": None, "trials": 8}
    body |= {"objectives": [{"metric": "validation/acuracy", "mode": "max"}], "parallel": 1}
    async with running(settings):
        await request(bus, "tune", body)
        [first] = await until(bus, f"study.{STUDY}.trial_suggested")
        await accept(bus, first.run_id, 0)
        point = ProgressPoint(step=1, time=0.0, values={"validation/accuracy": 0.5})
        await bus.publish(
            RunProgress(
                run_id=first.run_id, generation=1, node_id="n1", rank=0, offset=1, points=(point,), total_steps=4
            )
        )
        [cancel] = await until(bus, "cancel.requested", 1, "REQUESTS")
        assert cancel.run_id == first.run_id
        [completed] = await until(bus, f"study.{STUDY}.completed")
        assert "did you mean 'validation/accuracy'" in completed.reason
        await request(bus, "tune", body | {"objectives": [{"metric": "accuracy"}]}, "4")
        [rejected] = await until(bus, f"study.{study_id_for(SOURCE, '4')}.rejected")
        assert "objectives.0.metric: the training of a Task reports no 'accuracy'" in rejected.reason
