"""Whether the devices that a run is to use are fit for it: asked of the driver, and tried."""

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
from services.worker.node.inventory import Gpu

#: Memory that somebody else may hold on a device before it is not ours.
USED_MAX_SHARE = 0.05
USED_MAX_BYTES = 2 * 2**30
MATMUL_TIMEOUT_S = 90.0
#: Seconds after which a device must compute once more.
RECOMPUTE_S = 600.0
RELEASE_PATIENCE_S = 5.0
RELEASE_POLL_S = 0.25
#: A product of whole numbers small enough to be exact in float32 whatever the order of the sums.
MATMUL = """
import torch
a = (torch.arange(512 * 512, device="cuda") % 7 - 3).reshape(512, 512).float()
b = (torch.arange(512 * 512, device="cuda") % 5 - 2).reshape(512, 512).float()
torch.backends.cuda.matmul.allow_tf32 = False
expected = a.cpu().double() @ b.cpu().double()
for _ in range(3):
    assert torch.equal((a @ b).cpu().double(), expected), "a matrix product came out wrong"
"""


class UnfitDeviceError(Exception):
    """Devices that a run was to use failed their check."""

    def __init__(self, problems: Mapping[int, str]) -> None:
        super().__init__("; ".join(problems.values()))
        self.slots = tuple(sorted(problems))


class GpuCheck:
    """Checks devices before a run touches them. What was computed right a while ago is not computed again."""

    def __init__(
        self,
        gpus: Sequence[Gpu],
        command: Sequence[str] = (sys.executable, "-c", MATMUL),
        now: Callable[[], float] = time.monotonic,
        patience_s: float = RELEASE_PATIENCE_S,
    ) -> None:
        """``command`` computes on the device named in CUDA_VISIBLE_DEVICES and exits with 0 if that came out right."""
        self._gpus, self._command, self._now, self._patience_s = gpus, command, now, patience_s
        self._computed: dict[str, float] = {}

    async def check(self, slots: Iterable[int], held: Mapping[int, Sequence[float]] | None = None) -> None:
        """Return if the devices of these slots are fit; a node of CPU slots has none to be checked.

        Args:
            held: slot -> the shares of its device that other runs have; only given for devices that are shared.
                They may use so much memory of it, and nothing is tried out on it in between.

        Raises:
            Unfit: they are not.
        """
        wanted = {slot: self._gpus[slot] for slot in slots if slot < len(self._gpus)}
        if not wanted:
            return
        held = held or {}
        problems = await self._ask(wanted, held)
        sound = {
            slot: gpu
            for slot, gpu in wanted.items()
            if slot not in problems and not held.get(slot) and self._is_due(gpu)
        }
        tried = await asyncio.gather(*(_tried(gpu, self._command) for gpu in sound.values()))
        problems |= {slot: why for slot, why in zip(sound, tried, strict=True) if why}
        for slot, gpu in sound.items():
            if slot not in problems:
                self._computed[gpu.uuid] = self._now()
        metrics.DEVICE_CHECKS.labels("failed" if problems else "passed").inc()
        if problems:
            raise UnfitDeviceError(problems)

    def _is_due(self, gpu: Gpu) -> bool:
        return self._now() - self._computed.get(gpu.uuid, -math.inf) > RECOMPUTE_S

    async def _ask(self, wanted: Mapping[int, Gpu], held: Mapping[int, Sequence[float]]) -> dict[int, str]:
        """What the driver says. Memory of a process that has just ended may take a moment to be free."""
        deadline = self._now() + self._patience_s
        asked = [(gpu, held.get(slot, ())) for slot, gpu in wanted.items()]
        while True:
            found = await asyncio.to_thread(_asked, asked)
            if not found or self._now() >= deadline:
                return {slot: found[gpu.uuid] for slot, gpu in wanted.items() if gpu.uuid in found}
            await asyncio.sleep(RELEASE_POLL_S)


def _asked(gpus: Sequence[tuple[Gpu, Sequence[float]]]) -> dict[str, str]:
    """By uuid, what the driver says against a device of which others have those shares."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {gpu.uuid: f"the driver does not answer: {error}" for gpu, _ in gpus}
    try:
        found = {gpu.uuid: _problem(pynvml, gpu, held) for gpu, held in gpus}
        return {uuid: why for uuid, why in found.items() if why}
    finally:
        pynvml.nvmlShutdown()


def _problem(nvml: Any, gpu: Gpu, held: Sequence[float]) -> str:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
        # A slice has no counters of errors of its own.
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.board)
    except nvml.NVMLError as error:
        return f"{gpu.name} ({gpu.uuid}) is not visible any more: {error}"
    name = f"{gpu.name} ({gpu.uuid})"
    others_bytes = sum(share * memory.total + CONTEXT_BYTES for share in held)
    if memory.used > others_bytes + max(USED_MAX_SHARE * memory.total, USED_MAX_BYTES):
        beside = f" beyond the {sum(held):.0%} that other runs have of it" if held else ""
        return f"{name}: {memory.used / 2**30:.1f} GiB of its memory are in use by somebody else{beside}"
    uncorrected = _asking(
        nvml,
        nvml.nvmlDeviceGetTotalEccErrors,
        handle,
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
    )
    if uncorrected:
        return f"{name}: {uncorrected} memory errors that could not be corrected since the driver was loaded"
    if _asking(nvml, nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle):
        return f"{name}: pages of its memory are to be retired, which takes a reset"
    remapped = _asking(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    if remapped and (remapped[2] or remapped[3]):  # pending, failed
        return f"{name}: rows of its memory are to be remapped, which takes a reset, or could not be"
    return ""


def _asking(nvml: Any, question: Any, *arguments: Any) -> Any:
    """The answer, None where the device knows no such thing."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


async def _tried(gpu: Gpu, command: Sequence[str]) -> str:
    """Compute something on the device, in a process of its own: '' if it came out right."""
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
    said = errors.decode(errors="replace").strip().splitlines()
    return f"{gpu.name} ({gpu.uuid}): a small computation failed: {said[-1][:500] if said else process.returncode}"
