"""System metrics of a generation: what its ranks and the node use of processor, memory and GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import psutil
import structlog

from contracts.events.run import Member, ProgressPoint, RunPlaced, RunProgress
from contracts.machine_limits import limited_memory
from services.kit.bus import TransientError
from services.worker.node.inventory import Gpu, NvmlUnavailable, open_nvml
from services.worker.ranks.journal_follower import JournalFollower, Publish

log = structlog.get_logger(__name__)

MEBIBYTE = 2**20
#: NVML's reasons for clocks below what was asked for: too much heat or power.
THROTTLING_REASONS = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")


class SystemMeter:
    """Measures the node and a set of processes. Percentages are since the last measurement."""

    def __init__(self, gpus: tuple[Gpu, ...] = ()) -> None:
        self._gpus = gpus
        self._processes: dict[int, psutil.Process] = {}
        psutil.cpu_percent(None)

    def measure(self, pids: Iterable[int], slots: Iterable[int] = ()) -> dict[str, float]:
        """Return values under the names of MLflow's system metrics."""
        values = {"system/cpu_utilization_percentage": float(psutil.cpu_percent(None))} | _measure_memory()
        cpu_percent = memory_bytes = 0.0
        for process in self._process_tree(pids):
            with suppress(psutil.Error):
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
            with suppress(psutil.Error):
                parent = self._processes.get(pid) or psutil.Process(pid)
                for process in (parent, *parent.children(recursive=True)):
                    now[process.pid] = self._processes.get(process.pid, process)
        self._processes = now
        return list(now.values())


def _measure_memory() -> dict[str, float]:
    """Return the use of the machine's memory; in a container with a limit that of the container's."""
    machine, limited = psutil.virtual_memory(), limited_memory()
    used_bytes, percentage = machine.used, float(machine.percent)
    if limited is not None:
        used_bytes, percentage = limited.used_bytes, 100.0 * limited.used_bytes / max(1, limited.limit_bytes)
    return {
        "system/system_memory_usage_megabytes": used_bytes / MEBIBYTE,
        "system/system_memory_usage_percentage": percentage,
    }


def measure_gpus(gpus: list[Gpu]) -> dict[str, float]:
    """Return load, memory, power, temperature and throttling of GPUs."""
    values: dict[str, float] = {}
    with suppress(NvmlUnavailable), open_nvml() as nvml:
        for number, gpu in enumerate(gpus):
            with suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
                values[f"system/gpu_{number}_memory_usage_megabytes"] = memory.used / MEBIBYTE
                values[f"system/gpu_{number}_memory_usage_percentage"] = 100.0 * memory.used / memory.total
            # Power and what follows are the whole GPU's, also for a MIG slice; the driver reports no load then.
            try:
                board = nvml.nvmlDeviceGetHandleByUUID(gpu.board)
            except nvml.NVMLError:
                continue
            with suppress(nvml.NVMLError):
                values[f"system/gpu_{number}_power_usage_watts"] = nvml.nvmlDeviceGetPowerUsage(board) / 1000
                values[f"system/gpu_{number}_utilization_percentage"] = float(
                    nvml.nvmlDeviceGetUtilizationRates(board).gpu
                )
            with suppress(nvml.NVMLError):
                temperature = nvml.nvmlDeviceGetTemperature(board, nvml.NVML_TEMPERATURE_GPU)
                values[f"system/gpu_{number}_temperature_celsius"] = float(temperature)
            with suppress(nvml.NVMLError):
                reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(board)
                throttling = (getattr(nvml, f"nvmlClocksEventReason{name}") for name in THROTTLING_REASONS)
                values[f"system/gpu_{number}_throttled"] = float(any(reasons & reason for reason in throttling))
    return values


async def publish_system_metrics(
    placed: RunPlaced,
    member: Member,
    meter: SystemMeter,
    follower: JournalFollower,
    pids: Callable[[], Sequence[int]],
    publish: Publish,
    now: Callable[[], float],
    interval_s: float,
) -> None:
    """Publish what the node and the ranks of one generation use, until cancelled."""
    state = follower.state
    while True:
        await asyncio.sleep(interval_s)
        values = await asyncio.to_thread(meter.measure, pids(), member.slots)
        # Numbered on disk first: a restarted agent must not publish another sample under the same number.
        state.system_count += 1
        await follower.save()
        step = max((rank.step or 0 for rank in state.ranks.values()), default=0)
        sample = RunProgress(
            run_id=placed.run_id,
            generation=placed.generation,
            node_id=member.node_id,
            rank=member.ranks[0],
            offset=state.system_count,
            points=(ProgressPoint(step=step, time=now(), values=values),),
            kind="system",
            step=step,
        )
        try:
            await publish(sample)
        except TransientError as error:
            log.warning("a system sample is lost", error=str(error))
