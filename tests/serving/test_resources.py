"""The devices of model processes, and the memory that there must be for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from prometheus_client import REGISTRY

from contracts.events.model import ModelDeployDelayed
from contracts.topology import FACTS
from services.serving import deployer, memory
from services.serving.devices import DevicePool
from services.serving.settings import ServingSettings
from tests.contracts.test_machine_limits import DOCKER_V1, GIB, OWN_V1, V2, machine
from tests.serving.conftest import PATIENCE_S, House


def test_a_process_gets_the_device_that_has_the_fewest() -> None:
    pool = DevicePool(ServingSettings(serving_device="cuda:0, cuda:1").devices)
    assert [pool.take_device() for _ in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    pool.give_back("cuda:0")
    pool.give_back("cuda:0")
    assert pool.take_device() == "cuda:0"
    assert ServingSettings().devices == ("auto",)


@pytest.mark.parametrize(
    ("mounts", "own", "files", "free_bytes"),
    [
        pytest.param("", "", {}, 8 * GIB, id="no control groups"),
        pytest.param(V2, "0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, 8 * GIB, id="no limit"),
        pytest.param(
            V2,
            "0::/\n",
            {"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": "anon 600\ninactive_file 200\n"},
            300,
            id="v2, container",
        ),
        pytest.param(
            V2, "0::/pod/c\n", {"pod/memory.max": "1000", "pod/memory.current": "900"}, 100, id="v2, the parent's limit"
        ),
        pytest.param(
            DOCKER_V1,
            OWN_V1.format("/docker/abc"),
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "900\n",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 200\n",
            },
            300,
            id="v1, container",
        ),
        pytest.param(
            V2, "0::/\n", {"memory.max": f"{32 * GIB}", "memory.current": "0"}, 8 * GIB, id="the machine has less"
        ),
    ],
)
def test_what_is_free_is_bounded_by_the_container(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mounts: str,
    own: str,
    files: Mapping[str, str],
    free_bytes: int,
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    assert memory.available_bytes(machine(tmp_path, mounts, own, files)) == free_bytes


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
