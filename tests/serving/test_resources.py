"""The devices of model processes, and the memory that there must be for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from prometheus_client import REGISTRY

from contracts.events.model import ModelDeployDelayed
from contracts.topology import FACTS
from services.serving import deployer, memory
from services.serving.devices import DevicePool
from services.serving.settings import ServingSettings
from tests.serving.conftest import PATIENCE_S, House


def test_a_process_gets_the_device_that_has_the_fewest() -> None:
    pool = DevicePool(ServingSettings(serving_device="cuda:0, cuda:1").devices)
    assert [pool.take_device() for _ in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    pool.give_back("cuda:0")
    pool.give_back("cuda:0")
    assert pool.take_device() == "cuda:0"
    assert ServingSettings().devices == ("auto",)


def test_what_is_free_is_bounded_by_the_container(tmp_path: Path) -> None:
    free = psutil.virtual_memory().available
    assert memory.available_bytes(tmp_path) == pytest.approx(free, rel=0.2)
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 200\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes(tmp_path) == pytest.approx(free, rel=0.2)
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.available_bytes(tmp_path) == 300


async def follow_delays(house: House) -> AsyncIterator[ModelDeployDelayed]:
    async for batch in house.bus.follow(FACTS.name, (ModelDeployDelayed.subject_filter(),), 1):
        for message in batch:
            yield message.event


@pytest.mark.shell
async def test_a_version_waits_until_there_is_memory_for_it(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    await house.deploy("r1")
    monkeypatch.setattr(deployer, "HOST_RETRY_DELAYS_S", (0.2,))
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**20)
    version, delays = await house.promote("r2"), follow_delays(house)
    async with asyncio.timeout(PATIENCE_S):
        delay = await anext(delays)
    assert (delay.stage, delay.version) == ("memory", version)
    assert "256 MiB, and 1 MiB are free" in delay.reason
    monkeypatch.undo()
    assert (await house.conclusion(version)).replaced_version == 1  # type: ignore[union-attr]
    (shown,) = await house.models()
    assert [(each["version"], each["device"]) for each in shown["processes"]] == [(2, "auto"), (1, "auto")]
    measured = REGISTRY.get_sample_value("trainbus_serving_process_bytes", {"model": "sums"})
    assert measured is not None
    assert min(measured, shown["processes"][0]["memory_bytes"]) > 2**20
