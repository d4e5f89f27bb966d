"""The check of a run's devices before its ranks start: by the driver, and by a small computation."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from services.worker import metrics
from services.worker.core.rank_environment import CONTEXT_BYTES
from services.worker.node.inventory import Gpu, NvmlUnavailable, open_nvml

#: Memory of a device that other programs may use before the device counts as taken.
USED_MAX_SHARE = 0.05
USED_MAX_BYTES = 2 * 2**30
MATMUL_TIMEOUT_S = 90.0
#: Seconds after which a device is computed on again.
RECOMPUTE_S = 600.0
RELEASE_PATIENCE_S = 5.0
RELEASE_POLL_S = 0.25
#: A product of integers small enough to be exact in float32 in every order of the sums.
MATMUL = """
import torch
a = (torch.arange(512 * 512, device="cuda") % 7 - 3).reshape(512, 512).float()
b = (torch.arange(512 * 512, device="cuda") % 5 - 2).reshape(512, 512).float()
torch.backends.cuda.matmul.allow_tf32 = False
expected = a.cpu().double() @ b.cpu().double()
for _ in range(3):
    assert torch.equal((a @ b).cpu().double(), expected), "a matrix product is wrong"
"""


class UnfitDeviceError(Exception):
    """Devices of a run failed their check."""

    def __init__(self, problems: Mapping[int, str]) -> None:
        super().__init__("; ".join(problems.values()))
        self.slots = tuple(sorted(problems))


class GpuCheck:
    """Checks devices before a run uses them. One that computed correctly a while ago does not compute again."""

    def __init__(
        self,
        gpus: Sequence[Gpu],
        command: Sequence[str] = (sys.executable, "-c", MATMUL),
        now: Callable[[], float] = time.monotonic,
        patience_s: float = RELEASE_PATIENCE_S,
    ) -> None:
        """``command`` computes on the device in CUDA_VISIBLE_DEVICES and exits with 0 if the result is correct."""
        self._gpus, self._command, self._now, self._patience_s = gpus, command, now, patience_s
        self._computed: dict[str, float] = {}

    async def check(self, slots: Iterable[int], others: Mapping[int, Sequence[float]] | None = None) -> None:
        """Check the devices of these slots; a node of CPU slots has none.

        Args:
            others: slot -> the shares of its device that other runs have; only for devices that are shared. Those runs
                may use that much memory, and nothing is computed on the device meanwhile.

        Raises:
            UnfitDeviceError: one failed.
        """
        devices = {slot: self._gpus[slot] for slot in slots if slot < len(self._gpus)}
        if not devices:
            return
        others = others or {}
        problems = await self._query_driver(devices, others)
        due = {
            slot: gpu
            for slot, gpu in devices.items()
            if slot not in problems and not others.get(slot) and self._is_due(gpu)
        }
        tried = await asyncio.gather(*(_compute(gpu, self._command) for gpu in due.values()))
        problems |= {slot: why for slot, why in zip(due, tried, strict=True) if why}
        for slot, gpu in due.items():
            if slot not in problems:
                self._computed[gpu.uuid] = self._now()
        metrics.DEVICE_CHECKS.labels("failed" if problems else "passed").inc()
        if problems:
            raise UnfitDeviceError(problems)

    def _is_due(self, gpu: Gpu) -> bool:
        return self._now() - self._computed.get(gpu.uuid, -math.inf) > RECOMPUTE_S

    async def _query_driver(self, devices: Mapping[int, Gpu], others: Mapping[int, Sequence[float]]) -> dict[int, str]:
        """Return the problems that the driver reports. Memory of a process that has just ended is freed late."""
        deadline = self._now() + self._patience_s
        queries = [(gpu, others.get(slot, ())) for slot, gpu in devices.items()]
        while True:
            found = await asyncio.to_thread(_driver_problems, queries)
            if not found or self._now() >= deadline:
                return {slot: found[gpu.uuid] for slot, gpu in devices.items() if gpu.uuid in found}
            await asyncio.sleep(RELEASE_POLL_S)


def _driver_problems(gpus: Sequence[tuple[Gpu, Sequence[float]]]) -> dict[str, str]:
    """Return uuid -> the problem of a device of which other runs have those shares."""
    try:
        with open_nvml() as nvml:
            found = {gpu.uuid: _problem(nvml, gpu, shares) for gpu, shares in gpus}
    except NvmlUnavailable as error:
        return {gpu.uuid: f"the driver does not answer: {error}" for gpu, _ in gpus}
    return {uuid: why for uuid, why in found.items() if why}


def _problem(nvml: Any, gpu: Gpu, shares: Sequence[float]) -> str:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
        # A slice has no counters of errors of its own.
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.board)
    except nvml.NVMLError as error:
        return f"{gpu.name} ({gpu.uuid}) is not visible to the driver: {error}"
    name = f"{gpu.name} ({gpu.uuid})"
    others_bytes = sum(share * memory.total + CONTEXT_BYTES for share in shares)
    if memory.used > others_bytes + max(USED_MAX_SHARE * memory.total, USED_MAX_BYTES):
        beyond = f" beyond the {sum(shares):.0%} that other runs have of it" if shares else ""
        return f"{name}: {memory.used / 2**30:.1f} GiB of its memory are in use by another program{beyond}"
    uncorrected = _query(
        nvml,
        nvml.nvmlDeviceGetTotalEccErrors,
        handle,
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
    )
    if uncorrected:
        return f"{name}: {uncorrected} memory errors that could not be corrected since the driver was loaded"
    if _query(nvml, nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle):
        return f"{name}: pages of its memory are pending retirement: reset the GPU"
    remapped = _query(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    if remapped and (remapped[2] or remapped[3]):  # pending, failed
        return f"{name}: rows of its memory are pending remapping, or could not be remapped: reset the GPU"
    return ""


def _query(nvml: Any, query: Any, *arguments: Any) -> Any:
    """Return the answer; None if the device does not support the query."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


async def _compute(gpu: Gpu, command: Sequence[str]) -> str:
    """Compute on the device, in a process of its own; return the problem, '' if the result is correct."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, errors = await asyncio.wait_for(process.communicate(), MATMUL_TIMEOUT_S)
    except TimeoutError:
        return f"{gpu.name} ({gpu.uuid}): a small computation did not end within {MATMUL_TIMEOUT_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return ""
    lines = errors.decode(errors="replace").strip().splitlines()
    return f"{gpu.name} ({gpu.uuid}): a small computation failed: {lines[-1][:500] if lines else process.returncode}"
