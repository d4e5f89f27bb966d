"""The inventory of a node: GPUs, MIG slices, processors, datasets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing
from pydantic import ValidationError

from contracts.events.node import NodeJoined
from contracts.machine_limits import MemoryUse
from services.worker.cache.file_cache import FileCache
from services.worker.cache.node_cache import NodeCache
from services.worker.cache.shard_files import shard_path
from services.worker.node import inventory as node
from services.worker.node.inventory import Gpu, find_gpus, inspect_node, visible_gpus
from services.worker.ranks import system_metrics
from services.worker.ranks.system_metrics import measure_gpus
from services.worker.settings import WorkerSettings
from tests.worker.conftest import World

MIB = 2**20
#: An H100 as its driver gives its memory, and the slices' as they are left for use.
BOARD_BYTES = 81_559 * MIB
SLICES = {0: ("1g.10gb", 9_984, 1, 1), 1: ("3g.40gb", 40_448, 3, 3), 4: ("1c.3g.40gb", 40_448, 3, 1)}


class FakeNvml:
    """NVML of two GPUs, the second one cut into slices that do not fill all places."""

    NVML_DEVICE_MIG_ENABLE = 1
    NVML_TEMPERATURE_GPU = 0
    nvmlClocksEventReasonGpuIdle = 0x01
    nvmlClocksEventReasonSwPowerCap = 0x04
    nvmlClocksEventReasonHwSlowdown = 0x08
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80

    class NVMLError(Exception): ...

    def __init__(self, cut_up: bool = True) -> None:
        self.cut_up = cut_up

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:
        return f"GPU-{number}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return handle.encode()

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle == "GPU-0":
            raise self.NVMLError("Not Supported")
        return [int(self.cut_up), int(self.cut_up)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index not in SLICES:
            raise self.NVMLError("Not Found")
        return f"MIG-{index}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        total = SLICES[int(handle[4:])][1] * MIB if handle.startswith("MIG") else BOARD_BYTES
        return SimpleNamespace(total=total, used=total // 2)

    def nvmlDeviceGetAttributes(self, handle: str) -> Any:
        _, memory_mib, whole, compute = SLICES[int(handle[4:])]
        return SimpleNamespace(memorySizeMB=memory_mib, gpuInstanceSliceCount=whole, computeInstanceSliceCount=compute)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 300_000

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 66

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.nvmlClocksEventReasonHwThermalSlowdown if handle == "GPU-1" else self.nvmlClocksEventReasonGpuIdle

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle == "GPU-1":
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=40)


def test_mig_slices_replace_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    whole, *slices = find_gpus()
    assert (whole.uuid, whole.mig_profile, whole.board) == ("GPU-0", "", "GPU-0")
    assert [each.uuid for each in slices] == ["MIG-0", "MIG-1", "MIG-4"]
    assert [each.mig_profile for each in slices] == [profile for profile, *_ in SLICES.values()]
    assert {each.board for each in slices} == {"GPU-1"}
    assert {each.name for each in slices} == {whole.name}


def test_inventory_describes_mig_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = inspect_node(WorkerSettings(node_id="n"))
    assert found.slots == 4
    assert found.slot_profiles == ("", "1g.10gb", "3g.40gb", "1c.3g.40gb")
    assert found.slot_memory_bytes == 9_984 * MIB
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(cut_up=False))
    plain = inspect_node(WorkerSettings(node_id="n"))
    assert (plain.slots, plain.slot_profiles) == (2, ())
    assert plain.machine_digest != found.machine_digest  # other kernels, other last bits


def test_mig_slice_reports_what_the_driver_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    values = measure_gpus([find_gpus()[1]])
    assert values["system/gpu_0_memory_usage_percentage"] == 50
    assert values["system/gpu_0_power_usage_watts"] == 300
    assert "system/gpu_0_utilization_percentage" not in values
    assert (values["system/gpu_0_temperature_celsius"], values["system/gpu_0_throttled"]) == (66, 1)


def test_idle_clocks_are_no_throttling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert measure_gpus([find_gpus()[0]])["system/gpu_0_throttled"] == 0


GPUS = (
    Gpu("GPU-0", "H", 1, number=0),
    Gpu("MIG-0", "H", 1, "1g.10gb", "GPU-1", 1),
    Gpu("MIG-1", "H", 1, "1g.10gb", "GPU-1", 1),
)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        pytest.param(None, "GPU-0 MIG-0 MIG-1", id="all"),
        pytest.param("1", "MIG-0 MIG-1", id="by number, cut up"),
        pytest.param("GPU-1,0", "MIG-0 MIG-1 GPU-0", id="by uuid, in this order"),
        pytest.param("MIG-1", "MIG-1", id="one slice"),
        pytest.param("1,MIG-1", "MIG-0 MIG-1", id="named twice"),
        pytest.param("GPU-, MIG-1", "GPU-0 MIG-0 MIG-1", id="by the beginning of a uuid"),
        pytest.param("0,-1,1", "GPU-0", id="nothing after an unknown name, as in CUDA"),
        pytest.param("NoDevFiles", "", id="no such name"),
        pytest.param("", "", id="none"),
    ],
)
def test_agent_offers_visible_devices_only(visible: str | None, expected: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert " ".join(gpu.uuid for gpu in visible_gpus(GPUS, environment)) == expected


@pytest.mark.parametrize(
    ("names", "environment", "warned"),
    [
        pytest.param("HH", {}, False, id="one model"),
        pytest.param("HA", {}, True, id="CUDA puts the fastest first"),
        pytest.param("HA", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False, id="as nvidia-smi"),
    ],
)
def test_numbers_that_cuda_may_read_otherwise_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, names: str, environment: dict[str, str], warned: bool
) -> None:
    log = structlog.testing.CapturingLogger()
    monkeypatch.setattr(node, "log", log)
    gpus = tuple(Gpu(f"GPU-{number}", name, 1, number=number) for number, name in enumerate(names))
    assert visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "1", **environment}) == (gpus[1],)
    assert [call.method_name for call in log.calls] == ["warning"] * warned


def test_a_node_offers_what_its_control_group_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "usable_cpus", lambda: 2.5)
    monkeypatch.setattr(node, "usable_cores", lambda: 2)
    monkeypatch.setattr(node, "usable_memory_bytes", lambda: 6 * MIB)
    found = inspect_node(WorkerSettings(node_id="n", accelerator="cpu"))
    assert (found.slots, found.cpus, found.cores) == (2, 2.5, 2)
    assert (found.memory_bytes, found.slot_memory_bytes) == (6 * MIB, 3 * MIB)
    assert inspect_node(WorkerSettings(node_id="n", accelerator="cpu", cpus=12)).cpus == 12


def test_memory_is_measured_against_the_limit_of_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "limited_memory", lambda: MemoryUse(MIB, 4 * MIB))
    found = system_metrics.SystemMeter().measure([])
    assert found["system/system_memory_usage_megabytes"] == 1
    assert found["system/system_memory_usage_percentage"] == 25


def test_unknown_capacity_label_is_refused() -> None:
    with pytest.raises(ValidationError, match="on-demand or spot"):
        WorkerSettings(node_id="n", labels={"capacity": "cheap"})


def test_datasets_lists_complete_training_splits(tmp_path: Path) -> None:
    cache = NodeCache(FileCache(tmp_path, None), None, 0)  # type: ignore[arg-type]  # nothing is fetched
    for name, shards in (("a", 2), ("b", 1), ("c", 0)):
        folder = tmp_path / "datasets" / name
        folder.mkdir(parents=True)
        content = {"splits": {"train": {"shards": [{"sha256": f"{name}{number}" * 32} for number in range(2)]}}}
        (folder / "manifest.json").write_text(json.dumps(content) if shards else "cut sho")
        for number in range(shards):
            path = shard_path(tmp_path / "shards", f"{name}{number}" * 32)
            path.parent.mkdir(parents=True)
            path.touch()
    assert cache.datasets() == ("a",)


async def test_joined_describes_the_node(world: World, agent: Any) -> None:
    labels = {"cluster": "a", "zone": "z1", "switch": "s1", "pool": "burst", "capacity": "spot"}
    dataset = world.settings.data_dir / "cache" / "datasets" / ("d" * 64)
    dataset.mkdir(parents=True)
    (dataset / "manifest.json").write_text(json.dumps({"splits": {"train": {"shards": []}}}))
    await agent(labels=labels, cpus=3)
    (joined,) = [message.event for message in await world.bus.read_history("node.n1.joined")]
    assert isinstance(joined, NodeJoined)
    assert (joined.labels, joined.cpus, joined.datasets) == (labels, 3, ("d" * 64,))
