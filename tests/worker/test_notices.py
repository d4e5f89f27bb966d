"""Each source of notices against a stand-in for its endpoint, and the agent's reaction."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from contracts.events.node import NodeNotice
from contracts.events.run import RunReleased
from services.worker.notices import clouds, cluster_managers
from services.worker.notices.clouds import AzureSource, Ec2Source, GcpSource, MetadataServer
from services.worker.notices.cluster_managers import KubernetesSource, SlurmSource
from services.worker.notices.listener import find_sources, forward_notices
from services.worker.notices.notice import Notice, NoticeSource
from tests.worker.conftest import World, until


class Fake:
    """A metadata server. ``answers`` are by path; a token is valid for two requests, and some requests fail."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.changed = asyncio.Event()
        self.url, self.tokens, self.uses, self.failures = "", 0, 0, 0
        self.started: list[str] = []

    def set_answer(self, path: str, body: str) -> None:
        self.answers[path] = body
        self.changed.set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if self.failures:
            self.failures -= 1
            return web.Response(status=503)
        if path == "/latest/api/token":
            assert request.method == "PUT"
            self.tokens, self.uses = self.tokens + 1, 0
            return web.Response(text=f"token-{self.tokens}")
        if path.startswith("/latest/"):
            self.uses += 1
            if request.headers.get("X-aws-ec2-metadata-token") != f"token-{self.tokens}" or self.uses > 2:
                return web.Response(status=401)
        elif path.startswith("/computeMetadata/"):
            assert request.headers["Metadata-Flavor"] == "Google"
            while request.query.get("last_etag") == _etag(self.answers[path]):
                self.changed.clear()
                await self.changed.wait()
            return web.Response(text=self.answers[path], headers={"ETag": _etag(self.answers[path])})
        elif request.method == "POST":
            self.started += [each["EventId"] for each in (await request.json())["StartRequests"]]
            return web.Response()
        else:
            assert request.headers["Metadata"] == "true"
        return web.Response(text=self.answers[path]) if path in self.answers else web.Response(status=404)


def _etag(body: str) -> str:
    return body.lower()


@pytest_asyncio.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fake]:
    monkeypatch.setattr(clouds, "PROBE_TIMEOUT_S", 60.0)
    fake = Fake()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


@pytest_asyncio.fixture
async def metadata(fake: Fake) -> AsyncIterator[MetadataServer]:
    async with aiohttp.ClientSession() as session:
        yield MetadataServer(session, fake.url, 0.02)


async def first(source: NoticeSource, count: int = 1) -> list[Notice]:
    """Return the first notices of a source."""
    found: list[Notice] = []
    async with asyncio.timeout(60):
        async for notice in source.watch():
            found.append(notice)
            if len(found) == count:
                return found
    return found


async def test_ec2_recommends_and_then_interrupts(fake: Fake, metadata: MetadataServer) -> None:
    ec2 = Ec2Source(metadata)
    assert await ec2.applies()
    fake.set_answer(
        "/latest/meta-data/events/recommendations/rebalance", json.dumps({"noticeTime": "2026-11-20T21:00:00Z"})
    )
    watching = asyncio.create_task(first(ec2, 2))
    await until(lambda: fake.uses >= 2, 60)
    fake.failures = 1
    at = datetime.now(UTC) + timedelta(seconds=120)
    fake.set_answer(
        "/latest/meta-data/spot/instance-action", json.dumps({"action": "terminate", "time": at.isoformat()})
    )
    recommended, ordered = await watching
    assert (recommended.kind, recommended.leave, recommended.grace_s) == ("rebalance", False, None)
    assert (ordered.kind, ordered.leave) == ("terminate", True)
    assert ordered.grace_s is not None
    assert 100 < ordered.grace_s <= 120
    assert fake.tokens > 1  # the first was used up


async def test_gcp_request_returns_at_preemption(fake: Fake, metadata: MetadataServer) -> None:
    base = "/computeMetadata/v1/instance/"
    fake.answers = {base + "preempted": "FALSE", base + "maintenance-event": "NONE"}
    gcp = GcpSource(metadata)
    assert await gcp.applies()
    watching = asyncio.create_task(first(gcp, 2))
    fake.set_answer(base + "maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")  # the machine survives that
    await asyncio.sleep(0.05)
    fake.set_answer(base + "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    await asyncio.sleep(0.05)
    fake.set_answer(base + "preempted", "TRUE")
    assert sorted((notice.kind, notice.grace_s) for notice in await watching) == [
        ("maintenance", 60.0),
        ("preempted", 30.0),
    ]


class Node:
    """Stands in for the agent."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.empty = asyncio.Event()

    async def handle_notice(self, notice: Notice) -> None:
        self.notices.append(notice)

    async def wait_until_idle(self) -> None:
        await self.empty.wait()


def _event(name: str, kind: str, *machines: str) -> dict[str, Any]:
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    return {"EventId": name, "EventType": kind, "Resources": machines, "NotBefore": at, "EventStatus": "Scheduled"}


async def test_azure_event_is_acknowledged_once_the_node_is_idle(fake: Fake, metadata: MetadataServer) -> None:
    events = [_event("a", "Freeze", "vm1"), _event("b", "Preempt", "vm2"), _event("c", "Preempt", "vm1")]
    fake.set_answer("/metadata/instance/compute/name", "vm1")
    fake.set_answer("/metadata/scheduledevents", json.dumps({"DocumentIncarnation": 1, "Events": events}))
    azure, node = AzureSource(metadata), Node()
    assert await azure.applies()
    listening = asyncio.create_task(forward_notices(azure, node))
    async with asyncio.timeout(60):
        await until(lambda: bool(node.notices), 60)
        await asyncio.sleep(0.1)
        assert [(notice.kind, notice.token) for notice in node.notices] == [("preempt", "c")]
        assert node.notices[0].grace_s is not None
        assert 20 < node.notices[0].grace_s <= 30
        assert fake.started == []
        node.empty.set()
        await until(lambda: bool(fake.started), 60)
    assert fake.started == ["c"]
    listening.cancel()


async def test_slurm_signal_and_time_limit_are_notices() -> None:
    ends_at = int(time.time()) + 90
    slurm = SlurmSource({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(ends_at)}, leave_before_s=30)
    watching = asyncio.create_task(first(slurm))
    await until(lambda: signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL, 60)  # else it would end the tests
    os.kill(os.getpid(), signal.SIGUSR1)
    (signalled,) = await watching
    assert signalled.kind == "signal"
    assert signalled.grace_s is not None
    assert 80 < signalled.grace_s <= 90
    (over,) = await first(SlurmSource({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(ends_at)}))
    assert over.kind == "time-limit"


async def test_kubernetes_hook_gives_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_managers, "WRITE_TIME_S", 60.0)
    marker = tmp_path / "prestop"
    marker.write_text("5")
    os.utime(marker, (1, 1))  # of another life of the container
    watching = asyncio.create_task(first(KubernetesSource({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, marker, 0.01)))
    await asyncio.sleep(0.05)
    assert not watching.done()
    handle = marker.open("w")  # as a shell does: emptied first, then written
    await asyncio.sleep(0.05)
    assert not watching.done()
    handle.write("120\n")
    handle.close()
    (notice,) = await watching
    assert notice.grace_s is not None
    assert 110 < notice.grace_s <= 120


@pytest.mark.parametrize(
    ("environment", "vendor", "expected"),
    [
        pytest.param({}, "QEMU", [], id="no request on a machine of no known cloud"),
        pytest.param({}, "Amazon EC2", ["ec2"], id="ec2"),
        pytest.param({"SLURM_JOB_ID": "1"}, "Dell Inc.", ["slurm"], id="slurm"),
        pytest.param({"KUBERNETES_SERVICE_HOST": "x"}, "Google", ["kubernetes", "gcp"], id="kubernetes in gcp"),
        pytest.param({}, "Microsoft Corporation", ["azure"], id="azure"),
        pytest.param({}, None, ["ec2", "gcp", "azure"], id="all clouds are tried where the firmware is hidden"),
    ],
)
async def test_sources_of_the_machine_are_found(
    fake: Fake, tmp_path: Path, environment: dict[str, str], vendor: str | None, expected: list[str]
) -> None:
    if vendor is not None:
        (tmp_path / "sys_vendor").write_text(vendor + "\n")
    fake.answers = {"/computeMetadata/v1/instance/preempted": "FALSE", "/metadata/instance/compute/name": "vm1"}
    async with aiohttp.ClientSession() as session:
        found = await find_sources(session, fake.url, 1.0, tmp_path / "prestop", environment, tmp_path)
    assert [source.name for source in found] == expected


async def test_other_machines_are_never_requested() -> None:
    async with aiohttp.ClientSession() as session:
        for url in ("http://metadata.example", "http://10.0.0.1", "http://8.8.8.8/"):
            with pytest.raises(ValueError, match="link-local"):
                MetadataServer(session, url, 1.0)


async def test_notice_is_published_and_runs_stop_with_a_checkpoint(
    world: World, agent: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    marker = tmp_path / "prestop"
    committing = asyncio.create_task(world.commit_all())
    await agent(prestop_file=marker)
    await world.place(params={"steps": 100_000}, grace_s=60)
    await world.wait_steps(3)
    marker.write_text("120")
    released = await world.wait_for(RunReleased)
    committing.cancel()
    assert released.clean
    (noticed,) = [message.event for message in await world.bus.read_history("node.n1.notice")]
    assert isinstance(noticed, NodeNotice)
    assert (noticed.source, noticed.kind) == ("kubernetes", "termination")
    # A placement made before the scheduler read the notice is released untouched.
    await world.place("late", params={"steps": 100_000})
    late = await world.wait_for(RunReleased, "late")
    assert (late.clean, late.detail) == (True, "no rank had been started")
