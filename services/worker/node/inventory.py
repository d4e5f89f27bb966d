"""The inventory of a node: GPUs by NVML, CPU slots on a machine without."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import structlog

from contracts.machine_limits import usable_cores, usable_cpus, usable_memory_bytes
from services.worker.settings import WorkerSettings

log = structlog.get_logger(__name__)

#: What identifies a model of processor, on x86 and on ARM.
PROCESSOR = {
    "vendor": ("vendor_id", "CPU implementer"),
    "family": ("cpu family", "CPU architecture"),
    "model": ("model", "CPU part"),
    "name": ("model name",),
    "stepping": ("stepping", "CPU revision"),
}
#: Instruction sets that decide which kernels the libraries choose.
ISA_PREFIXES = ("avx", "amx", "sve", "sme")
ISA = {"fma", "f16c", "sse4_2", "asimd", "asimddp", "asimdhp", "asimdfhm", "bf16", "i8mm", "fphp"}

#: Where CUDA looks for the control daemon of MPS, which lets processes share a GPU at the same time.
MPS_PIPE_DIR = "/tmp/nvidia-mps"
GIBIBYTE = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """The device of one slot: a whole GPU, or a MIG slice of one."""

    uuid: str
    name: str
    memory_bytes: int
    #: Profile of the slice (``1g.10gb``) and the uuid of the GPU that it is cut from; '' for a whole GPU.
    mig_profile: str = ""
    parent: str = ""
    #: Number of the GPU in PCI order; slices have that of the GPU that they are cut from.
    number: int = 0

    @property
    def board(self) -> str:
        """The uuid of the whole GPU, which has health, load and power."""
        return self.parent or self.uuid


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """The resources of a node."""

    slots: int
    accelerator: str
    cores: int
    memory_bytes: int
    slot_memory_bytes: int
    #: One for each slot; empty on a node of CPU slots.
    gpus: tuple[Gpu, ...]
    software: dict[str, str]
    #: What decides the last bits of arithmetic here.
    machine: dict[str, str]
    #: Processors for runs that say how many they need.
    cpus: float = 0.0

    @property
    def slot_profiles(self) -> tuple[str, ...]:
        """The MIG profile of each slot, '' for a whole GPU; empty if all are whole."""
        profiles = tuple(gpu.mig_profile for gpu in self.gpus)
        return profiles if any(profiles) else ()

    @property
    def machine_digest(self) -> str:
        return hashlib.sha256(json.dumps(self.machine, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class NvmlUnavailable(Exception):
    """The driver of the GPUs cannot be used."""


def inspect_node(settings: WorkerSettings) -> NodeInventory:
    """Return what the node offers."""
    cores, memory_bytes = usable_cores(), usable_memory_bytes()
    gpus = () if settings.accelerator == "cpu" else visible_gpus(find_gpus(), os.environ)
    if gpus:
        slots = len(gpus) if settings.slots is None else min(settings.slots, len(gpus))
        gpus = gpus[:slots]
    else:
        slots = cores if settings.slots is None else settings.slots
    return NodeInventory(
        slots=slots,
        accelerator=gpus[0].name if gpus else "cpu",
        cores=cores,
        memory_bytes=memory_bytes,
        slot_memory_bytes=min(gpu.memory_bytes for gpu in gpus) if gpus else memory_bytes // max(slots, 1),
        gpus=gpus,
        software=_software(),
        machine=describe_machine(gpus),
        cpus=usable_cpus() if settings.cpus is None else settings.cpus,
    )


def describe_machine(gpus: tuple[Gpu, ...] = (), cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return what decides the last bits of a sum on this machine: processor, instruction sets, GPUs, libraries.

    None of it changes with the load, the number of cores or the name of the machine.
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
        # A slice has fewer multiprocessors, so that libraries choose other kernels.
        found["gpu"] = ", ".join(sorted({f"{gpu.name} {gpu.mig_profile}".strip() for gpu in gpus}))
        found["gpu.driver"] = _driver()
    found |= {package: version for package in ("torch", "numpy") if (version := _version(package))}
    return found


def _first_processor(cpuinfo: str) -> dict[str, str]:
    first = cpuinfo.split("\n\n", 1)[0]
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Yield the driver's library.

    Raises:
        NvmlUnavailable: there is no driver, or it does not answer.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(str(error)) from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _driver() -> str:
    with suppress(NvmlUnavailable), open_nvml() as nvml, suppress(nvml.NVMLError):
        return _text(nvml.nvmlSystemGetDriverVersion())
    return ""


def find_gpus() -> tuple[Gpu, ...]:
    """Return the machine's GPUs in PCI order, with MIG slices in place of partitioned ones; none without a driver."""
    with suppress(NvmlUnavailable), open_nvml() as nvml:
        try:
            return tuple(gpu for number in range(nvml.nvmlDeviceGetCount()) for gpu in _slots_of(nvml, number))
        except nvml.NVMLError as error:
            log.warning("the GPUs cannot be listed, the node offers none", error=str(error))
    return ()


def _slots_of(nvml: Any, number: int) -> list[Gpu]:
    """Return a GPU, or its slices; a GPU in MIG mode without a slice offers nothing."""
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    total_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    whole = Gpu(
        _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)), total_bytes, number=number
    )
    try:
        is_partitioned = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:  # a model that cannot be partitioned
        is_partitioned = False
    return [_slice(nvml, each, whole) for each in _slice_handles(nvml, handle)] if is_partitioned else [whole]


def _slice_handles(nvml: Any, handle: Any) -> Iterator[Any]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError):  # not every place has a slice
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)


def _slice(nvml: Any, handle: Any, whole: Gpu) -> Gpu:
    return Gpu(
        _text(nvml.nvmlDeviceGetUUID(handle)),
        whole.name,
        int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        _profile(nvml, handle, whole.memory_bytes),
        whole.uuid,
        whole.number,
    )


def _profile(nvml: Any, handle: Any, total_bytes: int) -> str:
    """Return the name of a slice's profile, as ``nvidia-smi`` and the Kubernetes device plugin write it.

    The name has the memory in eighths of the GPU's, rounded up, not the usable part.
    """
    attributes = nvml.nvmlDeviceGetAttributes(handle)
    eighths = math.ceil(attributes.memorySizeMB * 2**20 / total_bytes * 8)
    memory_gb = round(eighths / 8 * math.ceil(total_bytes / GIBIBYTE))
    compute, whole = attributes.computeInstanceSliceCount, attributes.gpuInstanceSliceCount
    part = f"{compute}c." if compute != whole else ""
    return f"{part}{whole}g.{memory_gb}gb"


def visible_gpus(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES gives to the agent, in its order, as CUDA reads it.

    A name is the number of a GPU, or its UUID or the beginning of it; what follows an unknown name is not visible. The
    name of a partitioned GPU stands for all its slices.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    names = [name.strip() for name in visible.split(",")]
    if any(name.isdecimal() for name in names):
        _check_numbering(gpus, environment)
    found: dict[Gpu, None] = {}
    for name in names:
        named = [gpu for gpu in gpus if _is_named(gpu, name)]
        if not named:
            if name:
                log.warning("CUDA_VISIBLE_DEVICES names no GPU of this node: what follows is not used", name=name)
            break
        found |= dict.fromkeys(named)
    return tuple(found)


def _is_named(gpu: Gpu, name: str) -> bool:
    if name.isdecimal():
        return gpu.number == int(name)
    return name.startswith(("GPU-", "MIG-")) and any(uuid.startswith(name) for uuid in (gpu.uuid, gpu.board))


def _check_numbering(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> None:
    """Warn of numbers that CUDA and the driver read differently: CUDA puts the fastest model first by default."""
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        log.warning(
            "CUDA_VISIBLE_DEVICES has numbers, on a node with GPUs of several models: they are read as nvidia-smi's; "
            "name the GPUs by UUID, or set CUDA_DEVICE_ORDER=PCI_BUS_ID",
            models=sorted({gpu.name for gpu in gpus}),
        )


def find_mps_pipe(setting: str | None, environment: Mapping[str, str]) -> str:
    """Return the folder in which a control daemon of CUDA MPS listens now, '' if none does.

    ``setting``: the folder; None: where CUDA looks for it; '': MPS is not used.
    """
    folder = environment.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPE_DIR) if setting is None else setting
    return folder if folder and Path(folder, "control").exists() else ""


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
