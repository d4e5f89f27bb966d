"""What this node has: GPUs by NVML, CPU slots on a machine without."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

import psutil
import structlog

from services.worker.settings import WorkerSettings

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a node offers."""

    slots: int
    accelerator: str
    cores: int
    memory_bytes: int
    slot_memory_bytes: int
    #: One for each slot; empty on a node of CPU slots.
    gpus: tuple[Gpu, ...]
    software: dict[str, str]


def inventory(settings: WorkerSettings) -> Inventory:
    """Look the machine over."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    memory_bytes = int(psutil.virtual_memory().total)
    gpus = () if settings.accelerator == "cpu" else visible_gpus(find_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus:
        slots = len(gpus) if settings.slots is None else min(settings.slots, len(gpus))
        gpus = gpus[:slots]
    else:
        slots = cores if settings.slots is None else settings.slots
    return Inventory(
        slots=slots,
        accelerator=gpus[0].name if gpus else "cpu",
        cores=cores,
        memory_bytes=memory_bytes,
        slot_memory_bytes=min(gpu.memory_bytes for gpu in gpus) if gpus else memory_bytes // max(slots, 1),
        gpus=gpus,
        software=_software(),
    )


def find_gpus() -> tuple[Gpu, ...]:
    """The machine's GPUs in PCI order, none when there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(
                _text(pynvml.nvmlDeviceGetUUID(handle)),
                _text(pynvml.nvmlDeviceGetName(handle)),
                int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in handles
        )
    except pynvml.NVMLError as error:
        log.warning("the GPUs cannot be listed, none is offered", error=str(error))
        return ()
    finally:
        pynvml.nvmlShutdown()


def visible_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Those GPUs that whoever started the agent meant it to have (CUDA_VISIBLE_DEVICES)."""
    if visible is None:
        return gpus
    by_name = {str(number): gpu for number, gpu in enumerate(gpus)} | {gpu.uuid: gpu for gpu in gpus}
    return tuple(by_name[name] for part in visible.split(",") if (name := part.strip()) in by_name)


def interface_of(address: str) -> str:
    """The network interface that has ``address``, '' if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _software() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("trainbus", "torch", "deepspeed"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
