"""A gateway on a real nats-server, and the facts of runs to feed it with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from contracts.base import Event
from contracts.envelope import Envelope
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.node import NodeJoined
from contracts.events.run import (
    CheckpointRef,
    Member,
    ProgressPoint,
    RunAccepted,
    RunCompleted,
    RunExited,
    RunPlaced,
    RunProgress,
    RunPromoted,
    RunQueued,
    RunReleased,
    RunStarted,
    RunStopping,
)
from contracts.events.train import TrainRequested
from contracts.spec.run import RunSpec
from contracts.spec.training import Evaluation
from services.gateway import commands, mlflow_pages, projection
from services.gateway.app import Gateway, build
from services.gateway.settings import GatewaySettings
from services.kit.settings import Settings

REQUEST = TrainRequested(name="digits", command=["python", "train.py"], slots={"min": 1, "max": 4})  # type: ignore[arg-type]
SPEC = REQUEST.run_spec
BODY = {"name": "digits", "command": ["python", "train.py"], "slots": {"min": 1, "max": 4}}
RUN = "rone"


def ref(step: int, run_id: str = RUN, epoch: int = 1) -> CheckpointRef:
    uri = f"s3://models/default/{run_id}/checkpoints/epoch_{epoch}/step_{step}.json"
    return CheckpointRef(uri=uri, step=step, epoch=epoch, samples_consumed=step * 64)


def placed(generation: int, *nodes: str, run_id: str = RUN, resume: CheckpointRef | None = None) -> RunPlaced:
    members = tuple(Member(node_id=node, slots=(0, 1), ranks=(2 * i, 2 * i + 1)) for i, node in enumerate(nodes))
    return RunPlaced(
        run_id=run_id,
        generation=generation,
        members=members,
        world_size=2 * len(nodes),
        resume=resume,
        spec=SPEC,
        decided_at_sequence=0,
        decided_at=datetime(2026, 1, 1, tzinfo=UTC),
        wanted_slots=4,
    )


def progress(
    generation: int, steps: range, *, loss: Callable[[int], float] = lambda s: 1 / (1 + s), run_id: str = RUN
) -> RunProgress:
    points = tuple(ProgressPoint(step=s, time=1000.0 + s, values={"train/loss": loss(s)}) for s in steps)
    return RunProgress(
        run_id=run_id,
        generation=generation,
        node_id="n1",
        rank=0,
        offset=steps.start,
        points=points,
        step=steps[-1],
        total_steps=100,
        epoch=1,
        samples_consumed=steps[-1] * 64,
    )


def life(run_id: str = RUN, spec: RunSpec = SPEC) -> list[Any]:
    """A run that is preempted once, shrinks, resumes and is promoted."""
    return [
        NodeJoined(node_id="n1", incarnation="a", address="127.0.0.1", slots=2, lease_ttl_s=3),
        NodeJoined(node_id="n2", incarnation="a", address="127.0.0.1", slots=2, lease_ttl_s=3),
        RunAccepted(run_id=run_id, spec=spec, request_id="e1", request_source="test"),
        RunQueued(run_id=run_id, next_generation=1),
        placed(1, "n1", "n2", run_id=run_id),
        RunStarted(run_id=run_id, generation=1, node_id="n1"),
        progress(1, range(1, 31), run_id=run_id),
        CheckpointCommitted(run_id=run_id, generation=1, checkpoint=ref(20, run_id), size_bytes=1000),
        RunStopping(run_id=run_id, generation=1, reason="preempted", message="a run of higher priority", grace_s=30),
        RunReleased(run_id=run_id, generation=1, node_id="n1", step=30),
        RunReleased(run_id=run_id, generation=1, node_id="n2", step=30),
        RunQueued(run_id=run_id, next_generation=2, reason="preempted"),
        placed(2, "n1", run_id=run_id, resume=ref(20, run_id)),
        RunStarted(run_id=run_id, generation=2, node_id="n1", step=20),
        progress(2, range(21, 41), loss=lambda s: 100.0 + s, run_id=run_id),
        CheckpointCommitted(run_id=run_id, generation=2, checkpoint=ref(40, run_id, 2), size_bytes=1000, final=True),
        RunExited(run_id=run_id, generation=2, node_id="n1", outcome="succeeded", step=40),
        RunCompleted(run_id=run_id, generation=2, checkpoint=ref(40, run_id, 2), metrics={"test/accuracy": 0.97}),
        RunPromoted(run_id=run_id, model="digits", version=1, reason="no champion yet"),
    ]


EVALUATED_SPEC = SPEC.model_copy(
    update={"model": "digits", "evaluation": Evaluation(metric="test/accuracy", mode="max")}
)


def stamp(event: Event, sequence: int) -> Envelope:
    when = datetime.fromtimestamp(1_700_000_000 + sequence, UTC)
    return Envelope(id=f"id-{sequence}", source="test", type=event.type, time=when)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer waits for what was published before, on the slowest machine too."""
    monkeypatch.setattr(projection, "CATCH_UP_S", 60.0)
    monkeypatch.setattr(commands, "WHY_TIMEOUT_S", 60.0)
    monkeypatch.setattr(mlflow_pages, "PROBE_TIMEOUT_S", 60.0)


@pytest.fixture
def gateway_settings(settings: Settings) -> GatewaySettings:
    return GatewaySettings(**{**settings.model_dump(), "gateway_port": 0})


class Running:
    """A gateway that serves, and a client for it."""

    def __init__(self, service: Gateway, client: httpx.AsyncClient) -> None:
        self.service, self.client = service, client

    async def get(self, path: str, **kwargs: Any) -> Any:
        response = await self.client.get(path, **kwargs)
        assert response.status_code == 200, response.text
        return response.json()


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(settings: GatewaySettings) -> AsyncIterator[Running]:
    service = build(settings)
    task = asyncio.create_task(service.run())
    try:
        await until(lambda: task.done() or all(service.check_readiness().values()))
        if task.done():
            task.result()
        await until(lambda: service.gateway_port is not None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.gateway_port}", timeout=60) as client:
            yield Running(service, client)
    finally:
        service.stopping.set()
        await asyncio.wait_for(task, 60)


@pytest.fixture
async def gateway(gateway_settings: GatewaySettings) -> AsyncIterator[Running]:
    async with running(gateway_settings) as up:
        yield up
