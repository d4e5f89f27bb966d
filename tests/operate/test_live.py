"""What the real service has decided on a real nats-server is decided again, asked about, and shadowed."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from contracts import topology
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import (
    TERMINAL,
    CheckpointRef,
    RunExited,
    RunPlaced,
    RunReleased,
    RunStarted,
    RunStopping,
    RunWaiting,
)
from contracts.scheduling import Policy
from services.kit.bus import Bus
from services.kit.concurrency import cancel_and_wait
from services.kit.settings import Settings
from services.scheduler.app import SchedulerSettings
from tests.client_address import serve_clients
from tests.scheduler.test_shell import ask, join, request, running, until
from tests.scheduler.world import CODE
from trainbus.client.address import StackAddress
from trainbus.client.client import AsyncClient
from trainbus.client.errors import TrainbusError
from trainbus.commands import policy, runs, scheduler
from trainbus.commands.scheduler_replay import replay_decisions, replay_log
from trainbus.operate.connection import connect
from trainbus.operate.history.fact_log import BusLog, FileLog
from trainbus.operate.history.log import Entry, line_of

#: Slots of all nodes that stay.
SLOT_MILLI = 8
TASK = {"name": "digits", "task": "m:T", "code": CODE, "training": {"epochs": 2}, "grace_s": 1}
COMMAND = {"name": "hello", "command": ["true"]}


class Agents:
    """The agents of all nodes: they start placed runs, release slots on request, and end runs at random.

    What has a whole cluster to itself at first goes on until it must give way.
    """

    def __init__(self, bus: Bus, seed: int) -> None:
        self.bus, self.rng = bus, random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped: set[tuple[str, int]] = set()

    async def live(self) -> None:
        try:
            async for batch in self.bus.follow("FACTS", ("run.*.placed", "run.*.stopping"), idle_s=0.05):
                for received in batch:
                    self._hear(received.event)
        finally:
            await cancel_and_wait(*self._tasks)

    def _hear(self, fact: Any) -> None:
        if isinstance(fact, RunPlaced):
            task = asyncio.create_task(self._train(fact))
        elif isinstance(fact, RunStopping):
            self._stopped.add((fact.run_id, fact.generation))
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _train(self, placed: RunPlaced) -> None:
        run_id, generation = placed.run_id, placed.generation
        for member in placed.members:
            await self.bus.publish(RunStarted(run_id=run_id, generation=generation, node_id=member.node_id))
        crashes = generation == 1 and self.rng.random() < 0.2
        steps = self.rng.randint(2, 8)
        stays = generation == 1 and placed.world_size == SLOT_MILLI
        for step in itertools.count(1):
            await asyncio.sleep(0.03)
            if (run_id, generation) in self._stopped or (step >= steps and not stays):
                break
            await self._commit(placed, step)
        for member in placed.members:
            part = {"run_id": run_id, "generation": generation, "node_id": member.node_id}
            if (run_id, generation) in self._stopped:
                await self.bus.publish(RunReleased.model_validate(part))
            else:
                outcome = "failed" if crashes else "succeeded"
                await self.bus.publish(RunExited.model_validate({**part, "outcome": outcome, "metrics": {"a": 0.1}}))

    async def _commit(self, placed: RunPlaced, step: int) -> None:
        if placed.spec.task is None:
            return
        uri = f"s3://models/{placed.run_id}/{placed.generation}-{step}.json"
        ref = CheckpointRef(uri=uri, step=step, epoch=1, samples_consumed=step)
        fact = {"run_id": placed.run_id, "generation": placed.generation, "checkpoint": ref, "size_bytes": 1}
        await self.bus.publish(CheckpointCommitted.model_validate({**fact, "final": True}))


@asynccontextmanager
async def agents(bus: Bus, seed: int = 1) -> AsyncIterator[None]:
    task = asyncio.create_task(Agents(bus, seed).live())
    try:
        yield
    finally:
        await cancel_and_wait(task)


async def lively(bus: Bus, runs: int = 24, seed: int = 1) -> list[str]:
    """Runs of all sizes and priorities, cancelled ones, bad requests, a node that is lost; until all are over."""
    rng = random.Random(seed)
    await join(bus, "n1", 4)
    await join(bus, "n2", 4)
    # Whoever comes after this one makes it give way, however slow the machine is.
    run_ids = [await request(bus, "train", {**TASK, "slots": SLOT_MILLI}, "run-0")]
    await until(bus, f"run.{run_ids[0]}.placed")
    await join(bus, "gone", 2, ttl_s=1.0)
    for number in range(1, runs):
        least = rng.randint(1, 4)
        body = {**rng.choice([TASK, TASK, COMMAND]), "priority": rng.randint(0, 2)}
        body["slots"] = {"min": least, "max": rng.randint(least, 6)}
        run_ids.append(await request(bus, "train", body, f"run-{number}"))
        if number % 7 == 3:
            await request(bus, "cancel", {"run_id": run_ids[-1]}, f"cancel-{number}")
        if number % 5 == 0:
            await asyncio.sleep(0.1)
        # Whoever asks must not change what is decided.
        await ask(bus, "why", {"run_id": rng.choice(run_ids)})
    await request(bus, "train", {**COMMAND, "slotz": 1}, "bad")
    await request(bus, "train", {**COMMAND, "resume_from": "s3://models/none.json"}, "unknown")
    await request(bus, "restore", {"run_id": run_ids[0], "step": 999}, "never")
    await until(bus, "run.*.rejected", 3)
    await all_over(bus, run_ids)
    return run_ids


async def all_over(bus: Bus, run_ids: list[str], timeout_s: float = 240.0) -> None:
    left = set(run_ids)
    filters = tuple(f"run.*.{fact.fact}" for fact in TERMINAL)
    async with asyncio.timeout(timeout_s):
        async for batch in bus.follow("FACTS", filters, idle_s=0.05):
            left -= {received.event.run_id for received in batch}
            if not left:
                return


def address(settings: Settings) -> StackAddress:
    return StackAddress(nats_url=settings.nats_url)


async def entries_of(settings: Settings) -> list[Entry]:
    async with connect(address(settings)) as link:
        past = BusLog(link, await link.last_sequence(topology.FACTS))
        return [entry async for entry in past.entries()]


@pytest.mark.parametrize("twice", [False, True], ids=["once", "everything twice"])
async def test_what_the_service_decided_is_decided_again_without_a_difference(
    settings: Settings, make_bus: Callable[..., Any], bus: Bus, twice: bool, tmp_path: Path, capsys: Any
) -> None:
    own = settings.model_copy(update={"inject_duplicates": twice})
    async with running(own), agents(bus):
        await lively(bus)
    async with connect(address(settings)) as link:
        past = BusLog(link, await link.last_sequence(topology.FACTS))
        index, remaker, found = await replay_log(past)
        log = [entry async for entry in past.entries()]
    assert found == []
    counts = remaker.counts
    assert index.policies
    assert not index.foreign
    assert counts.decisions == counts.same > 60
    assert counts.answers == 24 + 3
    assert (counts.unchecked, counts.unasked) == (0, 0)
    assert {"queued", "placed", "stopping", "completed", "cancelled"} <= set(counts.by_fact)
    # The same from a file, and with one word changed.
    file = tmp_path / "log.jsonl"
    write(file, log)
    assert await replay_decisions(FileLog(file), limit=5, as_json=True) == 0
    capsys.readouterr()
    place = next(place for place, entry in enumerate(log) if isinstance(entry.fact, RunWaiting))
    changed: Any = log[place].fact
    log[place] = log[place]._replace(fact=changed.model_copy(update={"code": "other"}))
    write(file, log)
    assert await replay_decisions(FileLog(file), limit=5, as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["difference_count"] == 1
    (difference,) = said["differences"]
    assert (difference["sequence"], difference["fields"][0]["field"]) == (log[place].sequence, "code")
    assert difference["fields"][0]["recorded"] == "other"
    assert difference["fields"][0]["replayed"] == changed.code


def write(path: Path, log: list[Entry]) -> None:
    path.write_text("".join(line_of(e.fact, e.sequence, e.time) + "\n" for e in log if e.fact is not None))


async def test_a_leader_that_died_half_way_leaves_no_difference(
    settings: Settings, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two services, of which the leading one is stopped in the middle; what both decided is decided again."""
    async with agents(bus):
        async with running(settings):
            await join(bus, "n1", 2)
            first = [await request(bus, "train", {**TASK, "slots": 2}, f"a{i}") for i in range(6)]
            await until(bus, "run.*.placed")
        async with running(settings):
            second = [await request(bus, "train", {**COMMAND, "slots": 1}, f"b{i}") for i in range(6)]
            await all_over(bus, first + second)
    async with connect(address(settings)) as link:
        _, remaker, found = await replay_log(BusLog(link, await link.last_sequence(topology.FACTS)))
    assert found == []
    assert remaker.counts.decisions == remaker.counts.same > 20


async def test_the_policy_in_force_is_shown(settings: Settings, bus: Bus, capsys: Any, tmp_path: Path) -> None:
    async with serve_clients(settings) as served, AsyncClient(address=served) as client:
        with pytest.raises(TrainbusError, match="no scheduler has adopted"):
            await policy.show(client)
        async with running(settings):
            await until(bus, "policy.*.adopted")
        await policy.show(client, as_json=True)
        told = json.loads(capsys.readouterr().out)
        assert told["name"] == "default"
        assert Policy.model_validate(told["policy"]).digest == told["digest"]
        await policy.show(client)
    # What is shown can be used as a file.
    file = tmp_path / "policy.toml"
    file.write_text(capsys.readouterr().out)
    assert policy.load_policy(str(file)).digest == told["digest"]


async def test_why_at_repeats_the_answer_of_why(settings: Settings, bus: Bus, capsys: Any) -> None:
    async with running(settings):
        await join(bus, "n1", 2)
        first = await request(bus, "train", {**TASK, "slots": 2}, "first")
        await until(bus, f"run.{first}.placed")
        second = await request(bus, "train", {**COMMAND, "slots": 2}, "second")
        await until(bus, f"run.{second}.waiting")
        said = await ask(bus, "why", {"run_id": second})
        entries = await entries_of(settings)
        then = entries[-1].time + timedelta(microseconds=1)
        await bus.publish(RunStarted(run_id=first, generation=1, node_id="n1"))
        await bus.publish(RunExited(run_id=first, generation=1, node_id="n1", outcome="succeeded"))
        await until(bus, f"run.{second}.placed")
    async with serve_clients(settings) as served, AsyncClient(address=served) as client:
        await runs.why(client, second, then.isoformat(), as_json=True)
    answer = json.loads(capsys.readouterr().out)
    for name in ("state", "code", "message", "slots_min"):
        assert answer[name] == said[name], name
    assert answer["sequence"] == entries[-1].sequence
    assert first in answer["message"]
    async with serve_clients(settings) as served, AsyncClient(address=served) as client:
        await runs.why(client, second, then.isoformat(), as_json=False)
    text = capsys.readouterr().out
    assert "was queued at" in text
    assert "policy" in text


async def shadow(settings: Settings, during: str | None = None) -> None:
    async with connect(address(settings)) as bus:
        await scheduler.shadow(bus, "fifo-skip", during=during, as_json=True)


async def test_a_shadow_follows_the_service_and_publishes_apart(settings: Settings, bus: Bus, capsys: Any) -> None:
    async with running(SchedulerSettings(**settings.model_dump(), policy="fifo")):
        await join(bus, "n1", 3)
        first = await request(bus, "train", {**TASK, "slots": 2}, "first")
        await until(bus, f"run.{first}.placed")
        following = asyncio.create_task(shadow(settings))
        await request(bus, "train", {**COMMAND, "slots": 2}, "wide")
        small = await request(bus, "train", {**COMMAND, "slots": 1}, "small")
        said = (await until(bus, f"shadow.*.run.{small}.placed", stream="SHADOW"))[0]
        assert isinstance(said.event, RunPlaced)
        assert said.event.members[0].node_id == "n1"
        assert said.event.decision is not None
        assert said.subject == f"shadow.{said.event.decision.policy}.run.{small}.placed"
        assert await bus.read_history(f"run.{small}.placed") == []
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        # Started again it says nothing that was said, and reports at its end.
        await shadow(settings, "5s")
    told = json.loads(capsys.readouterr().out)
    assert told["candidate"]["name"] == "fifo-skip"
    assert told["would_start_now"] == 1
    assert told["candidate_starts_while"] == {"priority": 1}
    assert len(await bus.read_history(f"shadow.*.run.{small}.placed", stream="SHADOW")) == 1
    assert all(entry.fact is not None for entry in await entries_of(settings))
