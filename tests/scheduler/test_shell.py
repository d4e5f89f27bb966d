"""The scheduler on a real nats-server: answers, leadership, fencing, and what it says when asked."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from nats.errors import NoRespondersError
from prometheus_client import REGISTRY

from contracts import subjects, topology
from contracts.base import request_id_for, run_id_for
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.node import NodeJoined, NodeLost
from contracts.events.run import (
    CheckpointRef,
    RunAccepted,
    RunCancelled,
    RunExited,
    RunPlaced,
    RunReleased,
    RunStarted,
    RunStopping,
)
from contracts.scheduling import Policy
from contracts.state.node import NodeStatement
from services.kit.bus import Bus
from services.kit.concurrency import cancel_and_wait
from services.kit.lease import Lease
from services.kit.service import Service
from services.kit.settings import Settings
from services.scheduler.app import SchedulerSettings, build
from services.scheduler.cluster_cache import ClusterCache
from services.scheduler.leader import Leader
from services.scheduler.policy_in_force import PolicyInForce
from tests.kit.support import until as eventually
from tests.scheduler.world import CODE, spec

SOURCE = "test"
COMMAND = {"name": "hello", "command": ["true"]}


def _ignored_statements() -> float:
    return REGISTRY.get_sample_value("trainbus_scheduler_invalid_statements_total") or 0.0


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Service]:
    """A scheduler in this process, stopped in good order."""
    service = build(settings)
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        service.stopping.set()
        await task


async def request(bus: Bus, verb: str, body: Any, event_id: str = "1") -> str:
    """Publish a request as another system would; returns the run's id."""
    headers = {"ce-id": event_id, "ce-source": SOURCE}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    await bus.js.publish(subjects.request(verb), raw, headers=headers)
    return run_id_for(SOURCE, event_id)


async def until(bus: Bus, subject: str, enough: int = 1, stream: str = "FACTS", timeout_s: float = 90.0) -> list[Any]:
    """Wait until ``enough`` facts stand on ``subject``."""
    found: list[Any] = []
    async with asyncio.timeout(timeout_s):
        async for batch in bus.follow(stream, (subject,), idle_s=0.05):
            found += batch
            if len(found) >= enough:
                return found
    raise AssertionError("unreachable")


async def join(bus: Bus, node_id: str, slots: int, ttl_s: float = 3600.0) -> None:
    await bus.publish(NodeJoined(node_id=node_id, incarnation="1", address="h", slots=slots, lease_ttl_s=ttl_s))


async def ask(bus: Bus, what: str, body: Any = None, timeout_s: float = 90.0) -> dict[str, Any]:
    """The service's answer; nobody answers while it starts."""
    async with asyncio.timeout(timeout_s):
        while True:
            with suppress(NoRespondersError):
                subject, question = subjects.service("scheduler", what), json.dumps(body or {}).encode()
                return dict(json.loads((await bus.nc.request(subject, question, timeout=timeout_s)).data))
            await asyncio.sleep(0.02)


async def test_a_run_from_its_request_to_its_end(settings: Settings, bus: Bus) -> None:
    async with running(settings):
        await join(bus, "n1", 2)
        run_id = await request(bus, "train", {**COMMAND, "slots": 2})
        placed = (await until(bus, f"run.{run_id}.placed"))[0]
        assert placed.event.members[0].slots == (0, 1)
        assert placed.envelope.correlation_id == "1"
        assert placed.envelope.causation_id == f"run/{run_id}/queued/1"
        again = await request(bus, "train", {**COMMAND, "slots": 2})  # the same request, the same run
        assert again == run_id
        await bus.publish(RunStarted(run_id=run_id, generation=1, node_id="n1"))
        await bus.publish(RunExited(run_id=run_id, generation=1, node_id="n1", outcome="succeeded", metrics={"a": 1}))
        completed = (await until(bus, f"run.{run_id}.completed"))[0].event
        assert completed.metrics == {"a": 1}
        assert completed.checkpoint is None
        assert [f.event.fact for f in await bus.read_history(subjects.run(run_id))] == [
            "accepted", "queued", "placed", "started", "exited", "completed",
        ]  # fmt: skip


BAD = {
    "an unknown field": ({**COMMAND, "slotz": 2}, "slotz", "unknown field"),
    "a wrong type": ({**COMMAND, "priority": "high"}, "priority", "a whole number"),
    "a negative size": ({**COMMAND, "slots": -1}, "slots.min", "at least 1"),
    "nothing to run": ({"name": "x"}, "", "exactly one of"),
    "an unknown checkpoint": (
        {**COMMAND, "resume_from": "s3://models/none.json"},
        "resume_from",
        "no committed checkpoint",
    ),
}


async def test_bad_requests_are_answered_and_disturb_nothing(settings: Settings, bus: Bus) -> None:
    async with running(settings):
        for number, (name, (body, field, text)) in enumerate(BAD.items()):
            run_id = await request(bus, "train", body, f"bad-{number}")
            rejected = (await until(bus, f"run.{run_id}.rejected"))[0].event
            problem = rejected.problems[0]
            assert (problem.field, text in problem.message) == (field, True), name
        for verb, body in (
            ("cancel", {"run_id": "rnone"}),
            ("drain", {"node_id": "nnone"}),
        ):
            await request(bus, verb, body, f"{verb}-unknown")
            request_id = request_id_for(SOURCE, f"trainbus.{verb}.requested.v1", f"{verb}-unknown")
            refused = (await until(bus, f"request.{request_id}.refused"))[0].event
            assert refused.ce_id == f"{verb}-unknown"
            assert ("no run has the id 'rnone'" if verb != "drain" else "no node 'nnone' to drain") in refused.reason
        restored = await request(bus, "restore", {"run_id": "rnone", "step": 1}, "restore-unknown")
        assert "no run has the id 'rnone'" in (await until(bus, f"run.{restored}.rejected"))[0].event.reason
        await join(bus, "n1", 1)
        good = await request(bus, "train", COMMAND, "good")
        await until(bus, f"run.{good}.placed")


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b"this is no JSON", {}, "not JSON"),
        (b'"' + b"x" * 1_100_000 + b'"', {}, "1,100,002 bytes"),
        (b'{"name": "a", "command": ["x"]}', {"ce-specversion": "0.3"}, "specversion"),
        (b'{"name": "a", "command": ["x"]}', {"ce-time": "9999-12-31T23:59:59-23:59"}, "year 9999"),
    ],
    ids=["no JSON", "too large", "another version", "no such time"],
)
async def test_a_request_that_cannot_be_read_is_rejected_and_is_no_dead_letter(
    settings: Settings, bus: Bus, body: bytes, headers: dict[str, str], words: str
) -> None:
    async with running(settings):
        await bus.js.publish("train.requested", body, headers={"ce-source": "shop", "ce-id": "17", **headers})
        rejected = (await until(bus, f"run.{run_id_for('shop', '17')}.rejected"))[0].event
        assert words in rejected.reason
        assert (await bus.js.stream_info(topology.DEAD_LETTERS.name)).state.messages == 0


async def test_cancel_restore_and_questions(settings: Settings, bus: Bus) -> None:
    async with running(settings):
        await join(bus, "n1", 2)
        task = {"name": "digits", "task": "m:T", "code": CODE, "training": {"epochs": 2}, "slots": {"min": 1, "max": 2}}
        first = await request(bus, "train", task, "first")
        await until(bus, f"run.{first}.placed")
        second = await request(bus, "train", {**COMMAND, "slots": 2}, "second")
        huge = await request(bus, "train", {**COMMAND, "slots": 64}, "huge")
        await until(bus, f"run.{second}.waiting")
        await until(bus, f"run.{huge}.waiting")
        why = await ask(bus, "why", {"run_id": second})
        assert why["state"] == "queued"
        assert why["code"] == "slots"
        assert first in why["message"]
        why = await ask(bus, "why", {"run_id": huge})
        assert why["code"] == "infeasible"
        assert "62 more" in why["message"]
        assert (await ask(bus, "why", {"run_id": first}))["state"] == "placed"
        assert (await ask(bus, "why", {"run_id": "none"}))["state"] == "unknown"
        state = await ask(bus, "state")
        assert state["nodes"][0]["used"] == 2
        assert state["queue_length"] == 2
        assert state["leads"]
        # A queued run is cancelled at once; a running one once its ranks have ended.
        await request(bus, "cancel", {"run_id": second}, "c1")
        assert isinstance((await until(bus, f"run.{second}.cancelled"))[0].event, RunCancelled)
        ref = CheckpointRef(uri="s3://models/e/r/7.json", step=7, epoch=1, samples_consumed=56)
        await bus.publish(CheckpointCommitted(run_id=first, generation=1, checkpoint=ref, size_bytes=1))
        await request(bus, "cancel", {"run_id": first, "reason": "enough"}, "c2")
        stop = (await until(bus, f"run.{first}.stopping"))[0].event
        assert isinstance(stop, RunStopping)
        assert stop.then == "cancel"
        await bus.publish(RunReleased(run_id=first, generation=1, node_id="n1"))
        assert (await until(bus, f"run.{first}.cancelled"))[0].event.reason == "enough"
        # A new run from its checkpoint; and from one that does not exist.
        restored = await request(bus, "restore", {"run_id": first, "epoch": 1}, "again")
        accepted = (await until(bus, f"run.{restored}.accepted"))[0].event
        assert isinstance(accepted, RunAccepted)
        assert accepted.parent_run_id == first
        placed = (await until(bus, f"run.{restored}.placed"))[0].event
        assert placed.generation == 1
        assert placed.resume == ref
        wrong = await request(bus, "restore", {"run_id": first, "step": 8}, "wrong")
        problem = (await until(bus, f"run.{wrong}.rejected"))[0].event.problems[0]
        assert problem.field == "step"
        assert "step 7 (epoch 1)" in problem.message


async def test_a_drain_outlives_the_agent_and_the_scheduler(settings: Settings, bus: Bus) -> None:
    async with running(settings):
        await join(bus, "n1", 1)
        asked = {"node_id": "n1", "reason": "a fan is loud"}
        await request(bus, "drain", {**asked, "user": "ada"}, "d1")
        drained = (await until(bus, "node.n1.draining"))[0].event
        assert (drained.user, drained.reason, drained.scope) == ("ada", "a fan is loud", "node")
        assert drained.requested_at is not None
        await bus.publish(NodeLost(node_id="n1", incarnation="1"))
        # A drain of a node that is away is remembered, and a second one changes nothing but the name.
        await request(bus, "drain", asked, "d2")
        assert (await until(bus, "node.n1.draining", 2))[1].event.user == SOURCE
    async with running(settings):
        await bus.publish(NodeJoined(node_id="n1", incarnation="2", address="h", slots=1, lease_ttl_s=3600.0))
        run_id = await request(bus, "train", COMMAND, "waits")
        assert (await until(bus, f"run.{run_id}.waiting"))[0].event.code == "draining"
        for event_id in ("u1", "u2"):
            await request(bus, "undrain", {"node_id": "n1", "user": "ada"}, event_id)
        placed = (await until(bus, f"run.{run_id}.placed"))[0]
        assert [fact.event.user for fact in await until(bus, "node.n1.undrained", 2)] == ["ada", "ada"]
        assert placed.sequence > (await until(bus, "node.n1.undrained"))[0].sequence


async def test_a_node_whose_lease_runs_out_is_lost_and_its_run_moves(settings: Settings, bus: Bus) -> None:
    async with running(settings):
        bucket = await bus.open_bucket(topology.LEASES)
        # Its lease ends when the run is there, however long that takes.
        async with Lease(bucket, "node.n1", "n1", 10.0).leadership():
            await join(bus, "n1", 1, ttl_s=10.0)
            run_id = await request(bus, "train", COMMAND)
            await until(bus, f"run.{run_id}.placed")
        async with Lease(bucket, "node.n2", "n2", 60.0).leadership():
            await join(bus, "n2", 1, ttl_s=60.0)
            assert isinstance((await until(bus, "node.n1.lost"))[0].event, NodeLost)
            moved = (await until(bus, f"run.{run_id}.placed", 2))[1].event
            assert moved.generation == 2
            assert [member.node_id for member in moved.members] == ["n2"]


async def test_what_an_agent_does_not_run_is_freed_and_what_it_should_not_run_is_ended(
    settings: Settings, bus: Bus
) -> None:
    said: dict[str, str] = {}
    async with running(settings):
        bucket = await bus.open_bucket(topology.LEASES)
        async with Lease(bucket, "node.n1", "1", 2.0, data=lambda: said).leadership():
            await join(bus, "n1", 1)
            run_id = await request(bus, "train", COMMAND)
            placed = (await until(bus, f"run.{run_id}.placed"))[0]
            # It has not come to the placement yet, and an agent of an older version says nothing at all.
            said |= NodeStatement(placed.sequence - 1, ()).as_lease_data()
            said |= NodeStatement(placed.sequence, (("stray", 3),)).as_lease_data()
            [freed] = await until(bus, f"run.{run_id}.released")
            [ended] = await until(bus, "run.stray.released")
            assert (freed.event.node_id, freed.event.generation, freed.event.clean) == ("n1", 1, False)
            assert (ended.event.node_id, ended.event.generation) == ("n1", 3)
            assert freed.event.detail == "its agent does not run it"
            again = (await until(bus, f"run.{run_id}.placed", 2))[1]
            assert again.event.generation == 2


async def test_a_lease_that_names_what_cannot_be_or_another_node_frees_nothing(settings: Settings, bus: Bus) -> None:
    said: dict[str, str] = {}
    async with running(settings):
        bucket = await bus.open_bucket(topology.LEASES)
        for number, nonsense in enumerate((b"[" * 100_000, b"[]", b'{"holder": "1", "ttl_s": Infinity}')):
            await bucket.put(f"node.x{number}", nonsense)
        async with (
            Lease(bucket, "node.n1", "1", 60.0).leadership(),
            Lease(bucket, "node.n2", "1", 0.5, data=lambda: said).leadership(),
        ):
            await join(bus, "n1", 1)
            run_id = await request(bus, "train", COMMAND)
            placed = (await until(bus, f"run.{run_id}.placed"))[0]
            # What n2 says is about n2 alone, whatever it calls itself.
            said |= {**NodeStatement(placed.sequence, ()).as_lease_data(), "node_id": "n1"}
            await join(bus, "n2", 1)
            ignored = _ignored_statements()
            said["running"] = json.dumps([["not.a run", 1]])
            await eventually(lambda: _ignored_statements() > ignored, "a statement that is ignored")
            # The one who reads it decides on.
            said["running"] = json.dumps([["stray", 3]])
            [ended] = await until(bus, "run.stray.released")
            assert ended.event.node_id == "n2"
            assert await bus.read_history(f"run.{run_id}.released") == []


async def test_a_node_that_does_not_release_a_run_is_lost_after_its_lease(settings: Settings, bus: Bus) -> None:
    """Its ranks may still run, and its agent renews: it must have lost its lease before, and know it."""
    ttl_s, renewed_at = 2.0, 0.0

    async def note(_: float) -> None:
        nonlocal renewed_at
        renewed_at = asked_at

    bucket = await bus.open_bucket(topology.LEASES)
    async with running(SchedulerSettings(**settings.model_dump(), release_deadline_s=0.1)):
        lease = Lease(bucket, "node.n1", "1", ttl_s, on_confirmed=note)
        asked_at = time.time()
        assert await lease.try_acquire()
        await join(bus, "n1", 1, ttl_s=ttl_s)
        run_id = await request(bus, "train", {**COMMAND, "grace_s": 0})
        await until(bus, f"run.{run_id}.placed")
        await request(bus, "cancel", {"run_id": run_id, "reason": "no longer wanted"})
        async with asyncio.timeout(60):
            while True:
                asked_at = time.time()
                if not await lease.renew():
                    break
                await asyncio.sleep(0.05)
        lost = (await until(bus, "node.n1.lost"))[0]
        assert run_id in lost.event.reason
        assert lost.stored_at.timestamp() >= renewed_at + ttl_s
        await eventually(Lease(bucket, "node.n1", "2", ttl_s).try_acquire, "the lease to be free")


async def test_undecodable_facts_stop_no_scheduler(settings: Settings, bus: Bus) -> None:
    """What cannot be read counts for the server's expectations; a scheduler that left it out would never place."""
    nonsense = (b"no json", b'{"run_id": 7}', b"[]", json.dumps({"run_id": "r1", "reason": "wrong subject"}).encode())

    async def babble(run_id: str) -> None:
        for body in nonsense:
            for name in ("placed", "exited", "no_such_fact"):
                await bus.js.publish(f"run.{run_id}.{name}", body, headers={"ce-type": "trainbus.run.cancelled.v1"})
                await bus.js.publish(f"run.{run_id}.{name}", body)

    await babble("stranger")  # the last word on every subject, also while a leader is still coming up
    async with running(settings):
        await join(bus, "n1", 1)
        run_id = await request(bus, "train", COMMAND)
        await until(bus, f"run.{run_id}.placed")
        await babble(run_id)
        await bus.js.publish("node.n1.joined", b"no json")
        second = await request(bus, "train", COMMAND, "2")
        await bus.publish(RunExited(run_id=run_id, generation=1, node_id="n1", outcome="succeeded"))
        await until(bus, f"run.{run_id}.completed")
        await until(bus, f"run.{second}.placed")


async def test_two_that_both_believe_to_lead_never_place_twice(
    settings: Settings, make_bus: Callable[..., Any], bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases are advice; the fence is the log. Both decide from their own cache as fast as they can."""
    monkeypatch.setattr(Leader, "leads", property(lambda self: True))
    total, slots = 24, 3
    await join(bus, "n1", slots)
    for number in range(total):
        run_id = f"r{number}"
        await bus.publish(RunAccepted(run_id=run_id, spec=spec(command=True), request_id=run_id, request_source=SOURCE))
    tasks = []
    for name in ("a", "b"):
        own = await make_bus(name)
        cache = ClusterCache(own)
        leader = Leader(own, cache, PolicyInForce(Policy()), settings)
        tasks += [asyncio.create_task(cache.follow()), asyncio.create_task(leader._decide_while_held())]
    used: dict[int, str] = {}
    placed: dict[str, int] = {}
    async with asyncio.timeout(120):
        async for batch in bus.follow("FACTS", ("run.*.*",), idle_s=0.05):
            for received in batch:
                fact = received.event
                if isinstance(fact, RunPlaced):
                    assert fact.run_id not in placed, "placed twice"
                    placed[fact.run_id] = received.sequence
                    for slot in fact.members[0].slots:
                        assert slot not in used, "a slot was given away twice"
                        used[slot] = fact.run_id
                    ended = RunExited(run_id=fact.run_id, generation=1, node_id="n1", outcome="succeeded")
                    tasks.append(asyncio.create_task(_publish(bus, ended)))
                elif isinstance(fact, RunExited):
                    used = {slot: run_id for slot, run_id in used.items() if run_id != fact.run_id}
            if len(placed) == total:
                break
    await cancel_and_wait(*tasks)


async def _publish(bus: Bus, fact: RunExited) -> None:
    await bus.publish(fact)


async def test_a_standby_takes_over_from_a_killed_leader(settings: Settings, bus: Bus) -> None:
    """SIGKILL of the process that leads: the standby has folded all along, and places when the lease runs out."""
    env = {
        **os.environ,
        "TRAINBUS_NATS_URL": settings.nats_url,
        "TRAINBUS_HTTP_PORT": "-1",
        "TRAINBUS_LEASE_TTL_S": "3",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.scheduler", env=env, stderr=subprocess.DEVNULL
    )
    try:
        await join(bus, "n1", 1)
        first = await request(bus, "train", COMMAND, "first")
        await until(bus, f"run.{first}.placed")
        resident_bytes = _resident_bytes(process.pid)
        async with running(settings.model_copy(update={"lease_ttl_s": 3.0})) as standby:
            async with asyncio.timeout(90):
                while not standby.check_readiness()["folded"]:  # noqa: ASYNC110 (what /ready says is what counts)
                    await asyncio.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await bus.publish(RunExited(run_id=first, generation=1, node_id="n1", outcome="succeeded"))
            second = await request(bus, "train", COMMAND, "second")
            await until(bus, f"run.{second}.placed")
            assert len(await bus.read_history("run.*.placed")) == 2
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    assert resident_bytes < 120e6, f"{resident_bytes / 1e6:.0f} MB resident"


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024
