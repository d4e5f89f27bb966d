"""What the node and the ranks use, measured from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

from services.worker.node.inventory import Gpu

MEBIBYTE = 2**20


class SystemMeter:
    """Measures the node and a set of processes. Percentages are since the last measurement."""

    def __init__(self, gpus: tuple[Gpu, ...] = ()) -> None:
        self._gpus = gpus
        self._processes: dict[int, psutil.Process] = {}
        psutil.cpu_percent(None)

    def measure(self, pids: Iterable[int], slots: Iterable[int] = ()) -> dict[str, float]:
        """Named as MLflow names its system metrics, so that they stand beside those of other runs."""
        memory = psutil.virtual_memory()
        values = {
            "system/cpu_utilization_percentage": float(psutil.cpu_percent(None)),
            "system/system_memory_usage_megabytes": memory.used / MEBIBYTE,
            "system/system_memory_usage_percentage": float(memory.percent),
        }
        cpu_percent = memory_bytes = 0.0
        for process in self._family(pids):
            with contextlib.suppress(psutil.Error):
                cpu_percent += process.cpu_percent(None)
                memory_bytes += process.memory_info().rss
        values["system/ranks_cpu_percentage"] = cpu_percent
        values["system/ranks_memory_usage_megabytes"] = memory_bytes / MEBIBYTE
        if self._gpus:
            values |= gpu_values([self._gpus[slot] for slot in slots if slot < len(self._gpus)])
        return values

    def _family(self, pids: Iterable[int]) -> list[psutil.Process]:
        """The processes and their children; objects are kept, for their percentages need a before."""
        now: dict[int, psutil.Process] = {}
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                parent = self._processes.get(pid) or psutil.Process(pid)
                for process in (parent, *parent.children(recursive=True)):
                    now[process.pid] = self._processes.get(process.pid, process)
        self._processes = now
        return list(now.values())


def gpu_values(gpus: list[Gpu]) -> dict[str, float]:
    """Load, memory and power of some GPUs."""
    import pynvml

    values: dict[str, float] = {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return values
    try:
        for number, gpu in enumerate(gpus):
            with contextlib.suppress(pynvml.NVMLError):
                memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
                values[f"system/gpu_{number}_memory_usage_megabytes"] = memory.used / MEBIBYTE
                values[f"system/gpu_{number}_memory_usage_percentage"] = 100.0 * memory.used / memory.total
            with contextlib.suppress(pynvml.NVMLError):
                # Of a MIG slice: of the whole GPU, which nobody tells for the slice alone. Load not even that.
                board = pynvml.nvmlDeviceGetHandleByUUID(gpu.board)
                values[f"system/gpu_{number}_power_usage_watts"] = pynvml.nvmlDeviceGetPowerUsage(board) / 1000
                load = pynvml.nvmlDeviceGetUtilizationRates(board)
                values[f"system/gpu_{number}_utilization_percentage"] = float(load.gpu)
    finally:
        pynvml.nvmlShutdown()
    return values
