"""The policy in force is the log's: no start and no takeover changes it, a request does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from contracts.base import request_id_for
from contracts.earlier_events import AdoptPolicyRequestedV1
from contracts.events.capacity import PolicyAdopted
from contracts.events.train import AdoptPolicyRequested
from contracts.scheduling import Policy
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.scheduler import policies
from services.scheduler.app import Scheduler, SchedulerSettings, assemble
from tests.scheduler.test_shell import COMMAND, SOURCE, ask, join, request, until

ADOPTED = PolicyAdopted.subject_filter()
FIFO = policies.load("fifo")
SKIP = policies.load("fifo-skip")


@asynccontextmanager
async def started(settings: Settings, **own: Any) -> AsyncIterator[Scheduler]:
    """A scheduler that has folded the log, stopped in good order."""
    scheduler = assemble(SchedulerSettings(**settings.model_dump(), **own))
    task = asyncio.create_task(scheduler.service.run())
    try:
        await scheduler.cache.caught_up.wait()
        yield scheduler
    finally:
        scheduler.service.stopping.set()
        await task


def body(policy: Policy, replaces: str | None = None) -> dict[str, Any]:
    made = AdoptPolicyRequested(policy=policy, replaces=replaces, user="ada", reason="large gangs wait too long")
    return made.model_dump(mode="json")


async def refusal(bus: Bus, event_id: str) -> str:
    """Wait until a request is refused; return why."""
    request_id = request_id_for(SOURCE, AdoptPolicyRequested.type, event_id)
    return str((await until(bus, f"request.{request_id}.refused"))[0].event.reason)


async def place(bus: Bus, event_id: str) -> str:
    """Request a run; return the digest of the policy that placed it."""
    run_id = await request(bus, "train", COMMAND, event_id)
    return str((await until(bus, f"run.{run_id}.placed"))[0].event.decision.policy)


@pytest.fixture
def team_file(tmp_path: Path) -> Path:
    file = tmp_path / "team.toml"
    file.write_text('name = "team"\n[[admit.quotas]]\nteam = "research"\nslots = 1\n')
    return file


async def test_a_takeover_keeps_the_policy_in_force(settings: Settings, bus: Bus, team_file: Path) -> None:
    await join(bus, "n1", 2)
    async with started(settings, policy=str(team_file)) as first:
        adopted = (await until(bus, ADOPTED))[0].event
        assert (adopted.policy.name, adopted.origin) == ("team", "setting")
        async with started(settings, policy="fifo") as standby:
            assert "TRAINBUS_POLICY: fifo" in standby.leader.unused_settings
            first.service.stopping.set()
            assert await place(bus, "1") == adopted.digest
            assert standby.leader.leads
            state = await ask(bus, "state")
            assert state["policy"] == "team"
            assert "`trainbus policy apply FILE`" in state["unused_settings"]
    assert len(await bus.read_history(ADOPTED)) == 1


async def test_a_request_changes_the_policy_of_all_without_a_restart(settings: Settings, bus: Bus) -> None:
    await join(bus, "n1", 4)
    async with started(settings, policy="fifo") as first:
        assert await place(bus, "before") == FIFO.digest
        async with started(settings, policy="default") as standby:
            await request(bus, "adopt_policy", body(SKIP, FIFO.digest), "a1")
            adopted = (await until(bus, ADOPTED, 2))[1]
            assert (adopted.event.user, adopted.event.reason) == ("ada", "large gangs wait too long")
            assert adopted.envelope.causation_id == "a1"
            assert adopted.event.policy == SKIP
            assert await place(bus, "after") == SKIP.digest
            assert first.leader.leads
            first.service.stopping.set()
            assert await place(bus, "taken over") == SKIP.digest
            assert standby.leader.leads
    assert [each.event.digest for each in await bus.read_history(ADOPTED)] == [FIFO.digest, SKIP.digest]


async def test_a_request_that_is_stale_or_invalid_is_refused_with_the_reason(settings: Settings, bus: Bus) -> None:
    async with started(settings, policy="fifo"):
        await until(bus, ADOPTED)
        await request(bus, "adopt_policy", body(SKIP, FIFO.digest), "first")
        await until(bus, ADOPTED, 2)
        # Somebody else read the same policy, and changes it in another way.
        await request(bus, "adopt_policy", body(policies.load("fgd"), FIFO.digest), "second")
        reason = await refusal(bus, "second")
        assert f"policy fifo-skip ({SKIP.digest}) in force, by ada: large gangs wait too long" in reason
        await request(bus, "adopt_policy", {"policy": {"order": {"skipp": True}}}, "typo")
        assert "policy.order.skipp" in await refusal(bus, "typo")
        # The policy in force may be adopted once more: then somebody has chosen it.
        await request(bus, "adopt_policy", body(SKIP), "again")
        assert (await until(bus, ADOPTED, 3))[2].event.origin == "request"
    assert [each.event.digest for each in await bus.read_history(ADOPTED)] == [FIFO.digest, SKIP.digest, SKIP.digest]


async def test_a_request_that_another_instance_gets_again_is_answered_once(settings: Settings, bus: Bus) -> None:
    """Redelivered after its answer, by another instance, when its answer would be another one."""
    noisy = settings.model_copy(update={"inject_duplicates": True})
    async with started(noisy, policy="fifo"):
        await until(bus, ADOPTED)
        await request(bus, "adopt_policy", body(SKIP, FIFO.digest), "a1")
        await until(bus, ADOPTED, 2)
        await request(bus, "adopt_policy", body(FIFO, FIFO.digest), "r1")
        await refusal(bus, "r1")
        await request(bus, "adopt_policy", body(FIFO, SKIP.digest), "a2")
        await until(bus, ADOPTED, 3)
    async with started(noisy):
        # What was adopted is stale by now, and what was refused would do.
        await request(bus, "adopt_policy", body(SKIP, FIFO.digest), "a1")
        await request(bus, "adopt_policy", body(FIFO, FIFO.digest), "r1")
        # Two of the same policy at once: each has an answer of its own.
        await asyncio.gather(*(request(bus, "adopt_policy", body(SKIP, FIFO.digest), each) for each in ("b1", "b2")))
        await until(bus, "request.*.refused", 2)
        await until(bus, ADOPTED, 4)
        await join(bus, "n1", 1)
        await place(bus, "later")
    history = [each.event.digest for each in await bus.read_history(ADOPTED)]
    assert history == [FIFO.digest, SKIP.digest, FIFO.digest, SKIP.digest]
    assert len(await bus.read_history("request.*.refused")) == 2


async def test_a_request_of_version_1_is_adopted(settings: Settings, bus: Bus) -> None:
    headers = {"ce-id": "a1", "ce-source": SOURCE, "ce-type": AdoptPolicyRequestedV1.type}
    policy = {"name": "team", "reclaim": {"min_run_s": 600}}
    async with started(settings, policy="fifo"):
        await until(bus, ADOPTED)
        for event_id, replaces in (("a1", FIFO.digest), ("r1", FIFO.digest)):
            data = json.dumps({"policy": policy, "replaces": replaces}).encode()
            await bus.js.publish(AdoptPolicyRequested.subject_filter(), data, headers={**headers, "ce-id": event_id})
        adopted = (await until(bus, ADOPTED, 2))[1].event
        # Its sender computes where it is answered from the type that it knows.
        refused = request_id_for(SOURCE, AdoptPolicyRequestedV1.type, "r1")
        await until(bus, f"request.{refused}.refused")
    assert adopted.policy.preemption.min_run_s == 600
    assert adopted.request_id == request_id_for(SOURCE, AdoptPolicyRequestedV1.type, "a1")


async def test_what_nobody_can_read_holds_up_no_adoption(settings: Settings, bus: Bus) -> None:
    await bus.js.publish(ADOPTED.replace("*", "x"), b"no json")
    await join(bus, "n1", 2)
    async with started(settings, policy="fifo"):
        assert await place(bus, "1") == FIFO.digest
        await bus.js.publish(ADOPTED.replace("*", "x"), b"no json")
        await request(bus, "adopt_policy", body(SKIP, FIFO.digest), "a1")
        await until(bus, ADOPTED, 2)
        assert await place(bus, "2") == SKIP.digest
