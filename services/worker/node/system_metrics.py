"""System metrics: what a node and its ranks use of processor, memory and GPUs."""

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
        """Return values under the names of MLflow's system metrics."""
        memory = psutil.virtual_memory()
        values = {
            "system/cpu_utilization_percentage": float(psutil.cpu_percent(None)),
            "system/system_memory_usage_megabytes": memory.used / MEBIBYTE,
            "system/system_memory_usage_percentage": float(memory.percent),
        }
        cpu_percent = memory_bytes = 0.0
        for process in self._process_tree(pids):
            with contextlib.suppress(psutil.Error):
                cpu_percent += process.cpu_percent(None)
                memory_bytes += process.memory_info().rss
        values["system/ranks_cpu_percentage"] = cpu_percent
        values["system/ranks_memory_usage_megabytes"] = memory_bytes / MEBIBYTE
        if self._gpus:
            values |= measure_gpus([self._gpus[slot] for slot in slots if slot < len(self._gpus)])
        return values

    def _process_tree(self, pids: Iterable[int]) -> list[psutil.Process]:
        """Return the processes and their children, the same objects each time: percentages need the one before."""
        now: dict[int, psutil.Process] = {}
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                parent = self._processes.get(pid) or psutil.Process(pid)
                for process in (parent, *parent.children(recursive=True)):
                    now[process.pid] = self._processes.get(process.pid, process)
        self._processes = now
        return list(now.values())


def measure_gpus(gpus: list[Gpu]) -> dict[str, float]:
    """Return load, memory and power of GPUs."""
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
                # Power is the whole GPU's, also for a MIG slice; the driver reports no load then.
                board = pynvml.nvmlDeviceGetHandleByUUID(gpu.board)
                values[f"system/gpu_{number}_power_usage_watts"] = pynvml.nvmlDeviceGetPowerUsage(board) / 1000
                load = pynvml.nvmlDeviceGetUtilizationRates(board)
                values[f"system/gpu_{number}_utilization_percentage"] = float(load.gpu)
    finally:
        pynvml.nvmlShutdown()
    return values
