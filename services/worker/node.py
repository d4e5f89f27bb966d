"""What this node has: GPUs by NVML, CPU slots on a machine without."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import structlog

from services.worker.settings import WorkerSettings

log = structlog.get_logger(__name__)

#: What tells a kind of processor from others, on x86 and on ARM.
PROCESSOR = {
    "vendor": ("vendor_id", "CPU implementer"),
    "family": ("cpu family", "CPU architecture"),
    "model": ("model", "CPU part"),
    "name": ("model name",),
    "stepping": ("stepping", "CPU revision"),
}
#: Instructions that decide which kernels the libraries choose.
ISA_PREFIXES = ("avx", "amx", "sve", "sme")
ISA = {"fma", "f16c", "sse4_2", "asimd", "asimddp", "asimdhp", "asimdfhm", "bf16", "i8mm", "fphp"}


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
    #: What decides the last bits of arithmetic here, and a hash of it.
    machine: dict[str, str]

    @property
    def machine_digest(self) -> str:
        return hashlib.sha256(json.dumps(self.machine, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
        machine=machine(gpus),
    )


def machine(gpus: tuple[Gpu, ...] = (), cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What decides the last bits of a sum on this machine: processor, what it can do, GPUs, libraries.

    Nothing of it changes with the load, the number of cores or the name of the machine.
    """
    try:
        processor = _first_processor(cpuinfo.read_text())
    except OSError:
        processor = {}
    found = {"arch": platform.machine()}
    for name, keys in PROCESSOR.items():
        if value := next((processor[key] for key in keys if processor.get(key)), ""):
            found[f"cpu.{name}"] = value
    flags = set((processor.get("flags") or processor.get("Features") or "").split())
    found["cpu.isa"] = " ".join(sorted(flag for flag in flags if flag.startswith(ISA_PREFIXES) or flag in ISA))
    if gpus:
        found["gpu"] = ", ".join(sorted({gpu.name for gpu in gpus}))
        found["gpu.driver"] = _driver()
    found |= {package: version for package in ("torch", "numpy") if (version := _version(package))}
    return found


def _first_processor(cpuinfo: str) -> dict[str, str]:
    first = cpuinfo.split("\n\n", 1)[0]
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def _driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""
    finally:
        pynvml.nvmlShutdown()


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
    return found | {
        package: version for package in ("trainbus", "torch", "deepspeed") if (version := _version(package))
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
