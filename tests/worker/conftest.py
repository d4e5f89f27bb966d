"""A node whose ranks are small scripts, on a real bus and a real store, and a stand-in for the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from contracts import topology
from contracts.events.checkpoint import CheckpointCommitted, CheckpointStaged
from contracts.events.run import (
    CheckpointRef,
    Member,
    RunAccepted,
    RunExited,
    RunPlaced,
    RunPrepared,
    RunQueued,
    RunReleased,
)
from contracts.spec.run import RunSpec
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.worker.app import build
from services.worker.launch.executor import ProcessExecutor
from services.worker.settings import WorkerSettings

HERE = Path(__file__).parent
FAKE = (sys.executable, str(HERE / "fake_rank.py"))


def package(files: dict[str, bytes]) -> bytes:
    """A code package of these files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for what has no event to wait for: a process, a file."""
    deadline = time.monotonic() + timeout_s
    for _ in iter(condition, True):
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.02)


class World:
    """What stands around the agent: publishes placements, commits checkpoints, records facts."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: WorkerSettings) -> None:
        self.bus, self.objects, self.settings = bus, objects, settings
        self.code: dict[str, str] = {}

    async def upload_code(self, content: bytes) -> None:
        sha256 = hashlib.sha256(content).hexdigest()
        uri = f"s3://{self.settings.bucket_code}/packages/{sha256}.tar.gz"
        await self.objects.put(uri, content)
        self.code = {"uri": uri, "sha256": sha256}

    def spec(self, **fields: Any) -> RunSpec:
        base: dict[str, Any] = {"name": "fake", "task": "task:Fake", "code": self.code, "training": {"max_steps": 10}}
        if "command" in fields:
            base = {"name": "fake"}
        return RunSpec.model_validate({**base, "grace_s": 5, **fields})

    def placement(
        self,
        run_id: str = "r1",
        generation: int = 1,
        slots: tuple[int, ...] = (0,),
        resume: CheckpointRef | None = None,
        init: CheckpointRef | None = None,
        members: tuple[Member, ...] | None = None,
        dataset: RunPrepared | None = None,
        **fields: Any,
    ) -> RunPlaced:
        members = members or (Member(node_id=self.settings.node_id, slots=slots, ranks=tuple(range(len(slots)))),)
        return RunPlaced(
            run_id=run_id,
            generation=generation,
            members=members,
            world_size=sum(len(member.ranks) for member in members),
            resume=resume,
            init=init,
            spec=self.spec(**fields),
            dataset=dataset,
            decided_at_sequence=0,
            decided_at=datetime(2026, 1, 1, tzinfo=UTC),
        )

    async def place(self, *arguments: Any, **fields: Any) -> RunPlaced:
        """Publish a placement, and before it what the log has of a run that is placed; see ``placement``."""
        placed = self.placement(*arguments, **fields)
        await self.support(placed)
        await self.bus.publish(placed)
        return placed

    async def support(self, placed: RunPlaced) -> None:
        """Publish what the log has of a run before it is placed."""
        run_id = placed.run_id
        accepted = RunAccepted(run_id=run_id, spec=placed.spec, request_id=run_id, request_source="test")
        # Some tests change the request between two generations, to reach a case sooner: as if it had always been so.
        await self.bus.js.purge_stream(topology.FACTS.name, subject=accepted.subject)
        await self.bus.js.publish(accepted.subject, accepted.model_dump_json().encode())
        await self.bus.publish(RunQueued(run_id=run_id, next_generation=placed.generation, reason="new", failures=0))

    async def facts(self, run_id: str = "r1", stream: str = "FACTS", subject: str = "run.{}.*") -> list[Any]:
        return [each.event for each in await self.bus.read_history(subject.format(run_id), stream=stream)]

    async def wait_for(self, kind: type[Any], run_id: str = "r1", count: int = 1, timeout_s: float = 90.0) -> Any:
        """The ``count``-th fact of a kind about the run."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = [fact for fact in await self.facts(run_id) if isinstance(fact, kind)]
            if len(found) >= count:
                return found[count - 1]
            await asyncio.sleep(0.03)
        raise AssertionError(f"no {kind.__name__} #{count} within {timeout_s} s; there is {await self.facts(run_id)}")

    async def steps(self, run_id: str = "r1") -> list[int]:
        """Every training step that is in the stream, as often as it is there."""
        events = await self.facts(run_id, "PROGRESS", "progress.{}")
        return [point.step for event in events if event.kind == "training" for point in event.points]

    async def wait_steps(self, at_least: int, run_id: str = "r1") -> None:
        deadline = time.monotonic() + 90
        while len(await self.steps(run_id)) < at_least:
            assert time.monotonic() < deadline, f"fewer than {at_least} steps"
            await asyncio.sleep(0.03)

    async def commit(self, staged: CheckpointStaged) -> CheckpointRef:
        """Do as the checkpoint service does."""
        uri = f"s3://{self.settings.bucket_models}/default/{staged.run_id}/checkpoints/epoch_1/step_{staged.step}.json"
        position = {"step": staged.step, "epoch": staged.epoch, "samples_consumed": staged.samples_consumed}
        manifest = {**position, "files": [file.model_dump() for file in staged.files]}
        content = json.dumps(manifest).encode()
        await self.objects.put(uri, content)
        ref = CheckpointRef(uri=uri, **position, manifest_sha256=hashlib.sha256(content).hexdigest())
        await self.bus.publish(
            CheckpointCommitted(run_id=staged.run_id, generation=staged.generation, checkpoint=ref, size_bytes=1)
        )
        return ref

    async def commit_all(self) -> None:
        """Commit every staged checkpoint until cancelled."""
        async for batch in self.bus.follow(topology.FACTS.name, (CheckpointStaged.subject_filter(),)):
            for message in batch:
                await self.commit(message.event)

    async def ends(self, run_id: str = "r1") -> list[RunExited | RunReleased]:
        return [fact for fact in await self.facts(run_id) if isinstance(fact, RunExited | RunReleased)]


def ranks_of(folder: Path) -> list[int]:
    """Processes that belong to runs in ``folder``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # any of them may end while it is looked at
            launch = process.environ().get("TRAINBUS_LAUNCH", "")
            if launch.startswith(str(folder)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.fixture
def worker_settings(s3_settings: Settings) -> WorkerSettings:
    return WorkerSettings(
        **{
            **s3_settings.model_dump(),
            "node_id": "n1",
            "slots": 2,
            "accelerator": "cpu",
            "warm": False,
            "follow_interval_s": 0.05,
            "system_interval_s": 0.2,
            "kill_after_s": 0.3,
            "commit_timeout_s": 3.0,
            "lease_ttl_s": 180.0,
            "memory_dir": str(s3_settings.data_dir.resolve() / "memory"),
        }
    )


@pytest_asyncio.fixture
async def world(bus: Bus, objects: ObjectStore, worker_settings: WorkerSettings) -> World:
    world = World(bus, objects, worker_settings)
    await world.upload_code(package({"task.py": b"class Fake: ..."}))
    return world


@pytest_asyncio.fixture
async def agent(world: World) -> AsyncIterator[Callable[..., Any]]:
    """Start agents inside the test; they are stopped in good order at its end."""
    running: list[tuple[Any, asyncio.Task[None]]] = []

    async def start(**update: Any) -> Any:
        service = build(world.settings.model_copy(update=update), ProcessExecutor(rank_command=FAKE))
        running.append((service, asyncio.create_task(service.run())))
        task = running[-1][1]
        await until(lambda: task.done() or service.check_readiness().get("joined", False), 90)
        if task.done():
            task.result()
        return service

    yield start
    for service, task in running:
        service.stopping.set()
        await asyncio.wait_for(task, 90)
    assert not ranks_of(world.settings.data_dir.resolve())


@pytest.fixture
def agent_process(world: World) -> Any:
    """Start agents as processes that can be killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**update: Any) -> subprocess.Popen[bytes]:
        values = world.settings.model_copy(update=update).model_dump(mode="json", exclude_none=True)
        values["s3_secret_key"] = world.settings.s3_secret_key.get_secret_value()  # type: ignore[union-attr]
        settings = {
            f"TRAINBUS_{k.upper()}": json.dumps(v) if isinstance(v, dict) else str(v) for k, v in values.items()
        }
        with (world.settings.data_dir.parent / "agent.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.worker.agent_process"],
                env={**os.environ, **settings},
                stdout=log,
                stderr=log,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert not ranks_of(world.settings.data_dir.resolve())
