"""Devices are checked before a run uses them; an unfit one leaves the pool, and the run is not at fault."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from contracts.events.node import NodeUnfit
from contracts.events.run import RunExited
from services.worker.node.gpu_check import GpuCheck, UnfitDeviceError
from services.worker.node.inventory import Gpu
from tests.worker.conftest import World

GPUS = tuple(Gpu(f"GPU-{n}", "H200", 100 * 2**30) for n in range(2))
RIGHT = (sys.executable, "-c", "import os; assert os.environ['CUDA_VISIBLE_DEVICES'].startswith('GPU-')")
WRONG = (sys.executable, "-c", "raise AssertionError('a matrix product came out wrong')")


class FakeNvml:
    """NVML of two devices; ``fault`` is the problem of the second."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    class NVMLError(Exception): ...

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def nvmlInit(self) -> None:
        if self.fault == "no driver":
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if self._is(uuid, "invisible"):
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=100 * 2**30, used=(60 if self._is(handle, "in use") else 1) * 2**30)

    def nvmlDeviceGetTotalEccErrors(self, handle: str, *_: int) -> int:
        return 3 if self._is(handle, "ecc") else 0

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: str) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        return (1, 0, int(self._is(handle, "remapping")), 0)

    def _is(self, uuid: str, fault: str) -> bool:
        return uuid == "GPU-1" and self.fault == fault


@pytest.mark.parametrize(
    ("fault", "command", "why"),
    [
        pytest.param("invisible", RIGHT, "not visible", id="fell off the bus"),
        pytest.param("in use", RIGHT, "60.0 GiB", id="memory in use"),
        pytest.param("ecc", RIGHT, "3 memory errors", id="uncorrectable errors"),
        pytest.param("remapping", RIGHT, "remapped", id="rows to be remapped"),
        pytest.param("", WRONG, "came out wrong", id="computes wrongly"),
        pytest.param("", RIGHT, "", id="sound"),
    ],
)
async def test_problems_of_a_device_are_reported(
    monkeypatch: pytest.MonkeyPatch, fault: str, command: tuple[str, ...], why: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(fault))
    check = GpuCheck(GPUS, command, patience_s=0)
    if not why:
        await check.check((0, 1))
        return
    with pytest.raises(UnfitDeviceError, match=why) as caught:
        await check.check((1,))
    assert caught.value.slots == (1,)
    if command is RIGHT:
        await check.check((0,))  # the other one is as good as it was


async def test_recently_checked_device_is_queried_but_not_computed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(""))
    now = 0.0
    check = GpuCheck(GPUS, RIGHT, now=lambda: now, patience_s=0)
    await check.check((0,))
    check._command = WRONG
    await check.check((0,))
    now = 10_000.0
    with pytest.raises(UnfitDeviceError):
        await check.check((0,))


async def test_unfit_device_is_an_infrastructure_failure(
    world: World, agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("ecc"))
    monkeypatch.setattr("services.worker.app.GpuCheck", lambda gpus: GpuCheck(GPUS, RIGHT, patience_s=0))
    await agent()
    await world.place(slots=(0, 1), params={"steps": 3})
    exited = await world.wait_for(RunExited)
    assert (exited.outcome, exited.infrastructure_failure) == ("failed", True)
    assert "memory errors" in exited.reason
    (unfit,) = [message.event for message in await world.bus.read_history("node.n1.unfit")]
    assert isinstance(unfit, NodeUnfit)
    assert unfit.slots == (1,)
