"""What ``trainbus doctor`` finds out on the bus: which services are there, and which are away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from contracts.events.capacity import PolicyAdopted
from contracts.events.run import RunCompleted
from contracts.scheduling import Policy
from contracts.topology import TRACKING
from services.kit.bus import Bus
from services.kit.concurrency import cancel_and_wait
from services.kit.service import Service
from services.kit.settings import Settings
from services.scheduler.app import SchedulerSettings, build
from trainbus.client.address import StackAddress
from trainbus.commands import doctor
from trainbus.commands.doctor import CheckResult, _check_bus
from trainbus.embedded import registry
from trainbus.embedded.layout import SERVICES
from trainbus.embedded.servers import NatsServer


@asynccontextmanager
async def running(name: str, settings: Settings, *, is_ready: bool = True) -> AsyncIterator[None]:
    service = Service(name, settings)
    service.add_readiness_check("folded", lambda: is_ready)
    task = asyncio.create_task(service.run())
    try:
        while not service.check_readiness()["started"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield
    finally:
        service.stopping.set()
        await task


async def check(settings: Settings) -> dict[str, CheckResult]:
    found = await _check_bus(StackAddress(nats_url=settings.nats_url), set())
    return {each.what: each for each in found}


async def test_every_service_has_a_line(settings: Settings, bus: Bus) -> None:
    async with running("sharding", settings), running("scheduler", settings, is_ready=False):
        found = await check(settings)
    assert found.keys() >= {*SERVICES, "autoscaler", "nodes"}
    assert (found["sharding"].grade, found["sharding"].found) == ("ok", "ready")
    assert (found["scheduler"].grade, found["scheduler"].found) == ("missing", "not ready: folded")
    away = found["ingestion"]
    assert (away.grade, away.found, away.remedy) == (
        "missing",
        "does not answer",
        "start it: trainbus service ingestion",
    )
    assert all(each.remedy for each in found.values() if each.grade != "ok")


async def test_a_message_that_nobody_acknowledged_is_no_service(settings: Settings, bus: Bus) -> None:
    tracking = await bus.js.pull_subscribe_bind(TRACKING.name, TRACKING.stream)
    await bus.publish(RunCompleted(run_id="r1", generation=1))
    taken = asyncio.create_task(tracking.fetch(1, timeout=60))
    try:
        assert len(await taken) == 1
    finally:
        await cancel_and_wait(taken)
    info = await bus.js.consumer_info(TRACKING.stream, TRACKING.name)
    assert info.num_ack_pending == 1
    found = (await check(settings))["tracking"]
    assert (found.grade, found.found) == ("missing", "does not answer; 1 message not handled")


async def test_an_autoscaler_is_needed_where_a_policy_has_pools(settings: Settings, bus: Bus) -> None:
    assert (await check(settings))["autoscaler"].grade == "note"
    policy = Policy.model_validate({"pools": {"pools": [{"name": "spot", "max_nodes": 2, "slots_per_node": 1}]}})
    await bus.publish(PolicyAdopted(digest=policy.digest, policy=policy))
    assert (await check(settings))["autoscaler"].grade == "missing"


async def test_a_policy_without_effect_is_named(settings: Settings, bus: Bus) -> None:
    policy = Policy(name="chosen")
    await bus.publish(PolicyAdopted(digest=policy.digest, policy=policy))
    scheduler = build(SchedulerSettings(**settings.model_dump(), policy="fifo"))
    task = asyncio.create_task(scheduler.run())
    try:
        while not all(scheduler.check_readiness().values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        found = (await check(settings))["policy"]
        assert found.grade == "note"
        assert "TRAINBUS_POLICY: fifo" in found.found
        assert "chosen" in found.found
    finally:
        scheduler.stopping.set()
        await task


def test_a_cluster_in_the_environment_needs_nothing_of_this_machine(
    nats_server: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINBUS_NATS_URL", nats_server.url.replace("://", "://me:secret@"))
    for name in ("S3_ENDPOINT", "GATEWAY_URL", "SERVING_URL", "STACK"):
        monkeypatch.delenv(f"TRAINBUS_{name}", raising=False)
    # Several stacks run here, and none of them is meant.
    several = SimpleNamespace(name="one", data_dir=tmp_path), SimpleNamespace(name="two", data_dir=tmp_path)
    monkeypatch.setattr(registry, "list_stacks", lambda: list(several))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "find_binary", lambda *_: pytest.fail("the cluster's programs are not here"))
    found = {each.what: each for each in doctor.check_all(None)}
    assert found["NATS"].grade == "ok"
    assert found["scheduler"].grade == "missing"
    assert not any("secret" in each.found for each in found.values())
    assert found["a node's address"].grade == "ok"
    assert found["a node's address"].found.startswith("127.0.0.1 (")
    monkeypatch.setenv("TRAINBUS_ADDRESS", "127.0.0.1")
    monkeypatch.setenv("TRAINBUS_NATS_URL", "nats://192.0.2.77")
    assert next(doctor._node_address()).grade == "note"
