"""The same loop on an embedded stack: SIGKILL of a rank to the next step, notice to event, notice to durable."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

from contracts.base import run_id_for
from contracts.envelope import ANONYMOUS_SOURCE
from loadtest.checkpoints import PUT_BYTES, puts
from loadtest.turnaround import loop
from services.kit.bus import Bus, Message
from tests.e2e.support import LAKE, Stack, package

HERE = Path(__file__).parent
LIMIT_S = 120.0
#: The parts of the way from the event to a checkpoint on disk, and from there to one that counts.
TO_DISK = ("event to the end of the last step", "last step to disk")
TO_COMMITTED = ("disk to staged", "staged to committed")


@dataclass(slots=True)
class Figures:
    """Seconds, one entry a repetition, by what was timed."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    resumed_from: list[str] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


class Loop:
    """Runs of the loop on one stack."""

    def __init__(self, stack: Stack, code: dict[str, Any], width: int, every: int) -> None:
        self.stack, self._code, self._width, self._every = stack, code, width, every
        self._seeds = count()

    @classmethod
    async def open(cls, stack: Stack, width: int, every: int) -> Loop:
        """Put code and data where runs find them."""
        await stack.fill_lake()
        files = {name: (HERE / name).read_text() for name in ("task.py", "loop.py")}
        return cls(stack, await stack.upload(package(files)), width, every)

    async def publish(self, **changes: Any) -> str:
        body = {
            "name": "turnaround",
            "experiment": "turnaround",
            "code": self._code,
            "task": "task:Loop",
            "params": {"width": self._width},
            "slots": {"min": 2, "max": 2},
            "data": {"source": LAKE, "format": "images"},
            # Each run with weights of its own: the store would have those of the one before.
            "training": {
                "max_steps": 1_000_000,
                "global_batch": 64,
                "checkpoint_every_steps": self._every,
                "seed": next(self._seeds),
            },
            "max_attempts": 100,
            "grace_s": 60,
            **changes,
        }
        event_id = uuid.uuid4().hex
        await self.stack.bus.js.publish("train.requested", json.dumps(body).encode(), headers={"Nats-Msg-Id": event_id})
        return run_id_for(ANONYMOUS_SOURCE, event_id)

    async def kills(self, repeat: int, figures: Figures) -> None:
        """SIGKILL a rank ``repeat`` times and time the way to the next step, part by part."""
        run_id = await self.publish()
        for generation in range(1, repeat + 1):
            await self._committed(run_id, generation)
            before = await self._points(run_id, generation)
            killed = time.time()
            os.kill(self._newest_rank(run_id, generation), signal.SIGKILL)
            first = await self._first_point(run_id, generation + 1)
            exited = await self._of_generation(run_id, "exited", generation)
            placed = await self._of_generation(run_id, "placed", generation + 1)
            started = await self._of_generation(run_id, "started", generation + 1)
            figures.seconds["SIGKILL to next step"].append(first.time - killed)
            figures.seconds["SIGKILL to exited"].append(_at(exited) - killed)
            figures.seconds["exited to placed"].append(_at(placed) - _at(exited))
            figures.seconds["placed to first step"].append(first.time - _at(placed))
            figures.resumed_from.append(started.event.resumed_from)
            last = max(point.step for point in await self._points(run_id, generation) or before)
            figures.steps_lost.append(max(last - started.event.step, 0))
        await self._cancel(run_id)

    async def notices(self, repeat: int, figures: Figures) -> None:
        """Preempt a run for one of higher priority; time the way to a checkpoint on disk and in the store, by parts."""
        for _ in range(repeat):
            run_id = await self.publish()
            placed = (await self._fact(run_id, "started")).event
            await self._first_point(run_id, placed.generation)
            asked = time.time()
            sleepers = [await self.stack.sleeper(seconds=1.0, priority=10) for _ in range(4)]
            stopping = _at(await self._fact(run_id, "stopping"))
            released = await self._fact(run_id, "released")
            stepped = max(point.time for point in await self._points(run_id, placed.generation))
            on_disk = self._on_disk(run_id, placed.generation)
            staged = _at(await self._of_generation(run_id, "checkpoint_staged", placed.generation))
            commit = await self._of_generation(run_id, "checkpoint_committed", placed.generation)
            committed, size = _at(commit), commit.event.size_bytes
            figures.seconds["notice to event"].append(stopping - asked)
            figures.seconds["notice to durable"].append(on_disk - asked)
            figures.seconds["notice to committed"].append(committed - asked)
            figures.seconds["event to the end of the last step"].append(stepped - stopping)
            figures.seconds["last step to disk"].append(on_disk - stepped)
            figures.seconds["disk to staged"].append(staged - on_disk)
            figures.seconds["staged to committed"].append(committed - staged)
            figures.seconds["notice to released"].append(_at(released) - asked)
            figures.steps_lost.append(0 if released.event.clean else 1)
            figures.seconds["bytes"].append(size)
            await self._cancel(run_id)
            for sleeper in sleepers:
                await self.stack.wait_for(sleeper, "completed", LIMIT_S)
            # Once the machine is as quiet as it was.
            figures.seconds["raw write of as much"].append(raw_write(self.stack.data_dir, size))
            figures.seconds["plain puts of as much"].append(await self._raw_puts(size))

    async def _raw_puts(self, size: int) -> float:
        """Seconds of nothing but puts of as many bytes into the stack's store, in pieces like a checkpoint's."""
        content = os.urandom(size)
        pieces = [content[start : start + PUT_BYTES] for start in range(0, size, PUT_BYTES)]
        return await puts(self.stack.objects, "models", pieces, f"raw/{uuid.uuid4().hex}")

    # -- what is there ------------------------------------------------------

    def _newest_rank(self, run_id: str, generation: int) -> int:
        notes = self.stack.data_dir.glob(f"node-*/runs/{run_id}/g{generation}/processes.json")
        found = [(each["rank"], each["pid"]) for note in notes for each in json.loads(note.read_text())]
        return int(max(found)[1])

    def _on_disk(self, run_id: str, generation: int) -> float:
        """When the last of the ranks had its part on disk."""
        found = []
        for path in self.stack.data_dir.glob(f"node-*/runs/{run_id}/g{generation}/rank_*.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found.append(max(float(line["time"]) for line in lines if line["kind"] == "checkpoint"))
        return max(found)

    async def _committed(self, run_id: str, generation: int) -> None:
        await self._of_generation(run_id, "checkpoint_committed", generation)

    async def _of_generation(self, run_id: str, name: str, generation: int) -> Message[Any]:
        return await self._fact(run_id, name, lambda event: event.generation == generation)

    async def _cancel(self, run_id: str) -> None:
        await self.stack.bus.js.publish("cancel.requested", json.dumps({"run_id": run_id}).encode())
        await self._fact(run_id, "cancelled")

    async def _fact(self, run_id: str, name: str, condition: Callable[[Any], bool] = lambda _: True) -> Message[Any]:
        async with asyncio.timeout(LIMIT_S):
            return await first(
                self.stack.bus, "FACTS", f"run.{run_id}.*", lambda event: event.fact == name and condition(event)
            )

    async def _first_point(self, run_id: str, generation: int) -> Any:
        def trained(event: Any) -> bool:
            return event.generation >= generation and event.kind == "training" and bool(event.points)

        async with asyncio.timeout(LIMIT_S):
            event = (await first(self.stack.bus, "PROGRESS", f"progress.{run_id}", trained)).event
        return min(event.points, key=lambda point: float(point.time))

    async def _points(self, run_id: str, generation: int) -> list[Any]:
        batches = await self.stack.bus.read_history(f"progress.{run_id}", stream="PROGRESS")
        return [
            point
            for message in batches
            if message.event.generation == generation and message.event.kind == "training"
            for point in message.event.points
        ]


async def first(bus: Bus, stream: str, subject: str, condition: Callable[[Any], bool]) -> Message[Any]:
    """The first event on a subject that fulfils the condition."""
    async for batch in bus.follow(stream, (subject,)):
        for message in batch:
            if condition(message.event):
                return message
            if message.event.fact in ("failed", "rejected"):
                raise RuntimeError(f"{message.event}")
    raise AssertionError("unreachable")


def raw_write(folder: Path, size: int) -> float:
    """Seconds of one sequential write with fdatasync of so many bytes."""
    content = os.urandom(1 << 20) * (size // (1 << 20) + 1)
    target = folder / "raw_write"
    started = time.perf_counter()
    with target.open("wb", buffering=0) as file:
        file.write(memoryview(content)[:size])
        os.fdatasync(file.fileno())
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def load_seconds(width: int) -> float:
    """Seconds that it takes to read and load a state of that size, as every system must after a kill."""
    model = loop.make_model(width)
    optimizer = loop.make_optimizer(model)
    model(torch.rand(2, 64)).sum().backward()
    optimizer.step()
    folder = Path(tempfile.mkdtemp(prefix="trainbus-load-"))
    try:
        loop.save_file(folder / "state.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        started = time.perf_counter()
        state = torch.load(folder / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return time.perf_counter() - started
    finally:
        shutil.rmtree(folder)


def _at(message: Message[Any]) -> float:
    return float(message.envelope.time.timestamp())
