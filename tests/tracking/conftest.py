"""A tracking service over a real SQLite store, and a run's facts as other services publish them."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from contracts import topology
from contracts.base import Fact
from contracts.envelope import fact_envelope
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import (
    CheckpointRef,
    Member,
    ProgressPoint,
    RunAccepted,
    RunCompleted,
    RunExited,
    RunPlaced,
    RunProgress,
)
from contracts.spec.run import RunSpec
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.tracking.app import build
from services.tracking.settings import TrackingSettings
from services.tracking.store import Store

START = datetime(2026, 1, 1, tzinfo=UTC)
SHA = "ab" * 32
#: Only for what hangs: on a busy machine importing mlflow alone, which steps back behind all else, may take minutes.
LATE_S = 300.0


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database. Its migrations take seconds, so they run once and are copied."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    Store(f"sqlite:///{path}", None).open()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def copy_database(template: Path, data_dir: Path) -> None:
    """Copy the empty database; its default experiment keeps artifacts in ``data_dir``, as in one made there."""
    data_dir.mkdir(parents=True, exist_ok=True)
    shutil.copy(template, data_dir / "mlflow.db")
    with closing(sqlite3.connect(data_dir / "mlflow.db")) as database, database:
        location = str(data_dir / "mlflow-artifacts" / "0")
        database.execute("UPDATE experiments SET artifact_location = ? WHERE experiment_id = 0", (location,))


@pytest.fixture
def tracking_settings(settings: Settings, template: Path) -> TrackingSettings:
    copy_database(template, settings.data_dir)
    return TrackingSettings(
        **settings.model_dump() | {"live_interval_s": 0.1, "retry_first_s": 0.02, "retry_max_s": 0.1}
    )


class Story:
    """One run's facts, published with times that count up by a second a fact."""

    def __init__(self, bus: Bus, run_id: str, spec: RunSpec) -> None:
        self.bus, self.run_id, self.spec = bus, run_id, spec
        self.facts: list[tuple[Fact, Any]] = []

    async def publish(self, fact: Fact) -> None:
        envelope = fact_envelope(fact, "test", START + timedelta(seconds=len(self.facts)))
        self.facts.append((fact, envelope))
        await self.bus.publish_event(fact, fact.subject, envelope)

    async def accepted(self) -> None:
        await self.publish(RunAccepted(run_id=self.run_id, spec=self.spec, request_id="1", request_source="test"))

    async def placed(self, generation: int, resume: int | None = None) -> None:
        await self.publish(
            RunPlaced(
                run_id=self.run_id,
                generation=generation,
                members=(Member(node_id="n1", slots=(0, 1), ranks=(0, 1)),),
                world_size=2,
                resume=None if resume is None else self.reference(resume),
                spec=self.spec,
                decided_at_sequence=0,
                decided_at=START,
            )
        )

    async def progress(
        self, generation: int, steps: range, *keys: str, kind: Any = "training", value: float | None = None
    ) -> None:
        """One point a step; the trainer's clock depends on the generation, as it really does."""
        keys = keys or ("loss",)
        for first in range(steps.start, steps.stop, 5):
            points = tuple(
                ProgressPoint(
                    step=step,
                    time=START.timestamp() + generation * 1000 + step,
                    values=dict.fromkeys(keys, generation + step / 1000 if value is None else value),
                )
                for step in range(first, min(first + 5, steps.stop))
            )
            # Ids repeat nowhere: the same steps reported again are another place in the journal.
            offset = len(self.facts) * 100_000 + first
            batch = RunProgress(
                run_id=self.run_id, generation=generation, node_id="n1", rank=0, offset=offset, points=points, kind=kind
            )
            self.facts.append((batch, fact_envelope(batch, "test", START)))
            await self.bus.publish(batch)

    def reference(self, step: int) -> CheckpointRef:
        uri = f"s3://models/default/{self.run_id}/checkpoints/epoch_1/step_{step}.json"
        return CheckpointRef(uri=uri, step=step, epoch=1, samples_consumed=step * 8)

    async def committed(self, generation: int, step: int) -> None:
        await self.publish(
            CheckpointCommitted(
                run_id=self.run_id, generation=generation, checkpoint=self.reference(step), size_bytes=10
            )
        )

    async def completed(self, generation: int, **more: Any) -> None:
        exited = RunExited(run_id=self.run_id, generation=generation, node_id="n1", outcome="succeeded")
        await self.publish(exited)
        await self.publish(RunCompleted(run_id=self.run_id, generation=generation, **more))

    async def again(self) -> None:
        """Every fact once more, as a stream without memory of the ids would store it."""
        for number, (fact, envelope) in enumerate(self.facts):
            twin = replace(envelope, id=f"{envelope.id}#again{number}")
            await self.bus.publish_event(fact, fact.subject, twin)


def task_spec(**changes: Any) -> RunSpec:
    base: dict[str, Any] = {
        "name": "digits",
        "task": "task:Digits",
        "code": {"uri": "s3://code/p.tgz", "sha256": SHA, "git_commit": "c0ffee", "git_dirty": True},
        "training": {"epochs": 1},
        "user": "ada",
    }
    return RunSpec.model_validate(base | changes)


def command_spec(**changes: Any) -> RunSpec:
    return RunSpec.model_validate({"name": "script", "command": ["python", "train.py"]} | changes)


class World:
    """A running tracking service, and what MLflow holds."""

    def __init__(self, bus: Bus, settings: TrackingSettings, store: Store) -> None:
        self.bus, self.settings, self.store = bus, settings, store

    def story(self, run_id: str = "r1", spec: RunSpec | None = None) -> Story:
        return Story(self.bus, run_id, spec or task_spec())

    @property
    def client(self) -> Any:
        return self.store._mlflow

    def pages(self, run_id: str = "r1") -> list[Any]:
        """The MLflow runs of a run, oldest attempt first."""
        experiments = [each.experiment_id for each in self.client.search_experiments()]
        found = self.client.search_runs(experiments, f"tags.`trainbus.run_id` = '{run_id}'")
        return sorted(found, key=lambda run: int(run.data.tags["trainbus.attempt"]))

    def series(self, page: Any, key: str = "loss") -> list[tuple[int, float]]:
        return [(each.step, each.value) for each in self.client.get_metric_history(page.info.run_id, key)]

    async def settled(self) -> None:
        """Wait until every fact is handled and acknowledged."""

        last = max([await self.bus.get_last_sequence(each) for each in topology.TRACKING.filters])

        async def empty() -> bool:
            info = await self.bus.js.consumer_info(topology.TRACKING.stream, topology.TRACKING.name)
            # The server may acknowledge a publish before it counts the message as pending.
            acknowledged = info.ack_floor is not None and info.ack_floor.stream_seq >= last
            return acknowledged and not info.num_pending and not info.num_ack_pending

        await eventually(empty)


def is_begun(database: Path) -> bool:
    """Whether the file that is to become the database has any content; it may go at any moment."""
    try:
        return any(each.stat().st_size for each in database.parent.glob(f".{database.name}.new-*[0-9]"))
    except FileNotFoundError:
        return False


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LATE_S):
        while not await check():  # noqa: ASYNC110 - what is waited for is another process's state
            await asyncio.sleep(0.02)


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Start services; each is stopped at the end."""
    async with AsyncExitStack() as stack:

        async def start(settings: Settings, store: Store | None = None) -> Any:
            service = build(settings, store)
            task = asyncio.create_task(service.run())

            async def stop() -> None:
                service.stopping.set()
                await task

            stack.push_async_callback(stop)
            async with asyncio.timeout(LATE_S):
                while not service._started:
                    if task.done():
                        task.result()
                    await asyncio.sleep(0.01)
            return service

        yield start


@pytest_asyncio.fixture
async def world(
    bus: Bus, tracking_settings: TrackingSettings, running: Callable[..., Awaitable[Any]]
) -> AsyncIterator[World]:
    store = Store(tracking_settings.tracking_uri, tracking_settings.artifact_location)
    await running(tracking_settings, store)
    yield World(bus, tracking_settings, store)
