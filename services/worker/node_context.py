"""What the placements of a node share."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import contracts
from contracts.base import Fact
from contracts.events.run import RunPlaced
from services.kit.bus import Bus
from services.kit.store.objects import ObjectStore
from services.worker.cache.node_cache import NodeCache
from services.worker.checkpoints.known_blobs import KnownBlobs
from services.worker.checkpoints.survivor_memory import SurvivorMemory
from services.worker.core.rank_environment import NodeEnvironment
from services.worker.launch.executor import Executor
from services.worker.node.gpu_check import GpuCheck
from services.worker.node.inventory import NodeInventory, interface_of
from services.worker.node.system_metrics import SystemMeter
from services.worker.settings import WorkerSettings

#: Where CUDA looks for the daemon if nothing else is said.
MPS_PIPE_DIR = "/tmp/nvidia-mps"


class Meeting(Protocol):
    """What the environment needs to know of a prepared placement."""

    @property
    def code_folder(self) -> Path | None: ...
    @property
    def master(self) -> tuple[str, int]: ...


@dataclass(slots=True)
class NodeContext:
    settings: WorkerSettings
    bus: Bus
    objects: ObjectStore
    cache: NodeCache
    executor: Executor
    inventory: NodeInventory
    meter: SystemMeter
    memory: SurvivorMemory = field(default_factory=lambda: SurvivorMemory(None, 0))
    gpu_check: GpuCheck = field(default_factory=lambda: GpuCheck(()))
    #: Told when devices are unfit: the slots, and why.
    on_unfit: Callable[[tuple[int, ...], str], Awaitable[None]] | None = None
    #: Slot -> the shares of it that other runs have on this node than the one that was placed.
    held_beside: Callable[[RunPlaced], Mapping[int, Sequence[float]]] = lambda placed: {}
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    known: KnownBlobs = field(default_factory=KnownBlobs)

    def place(self, launch_path: Path, prepared: Meeting) -> NodeEnvironment:
        """Where the ranks of one placement run."""
        address, port = prepared.master
        code = (str(prepared.code_folder),) if prepared.code_folder is not None else ()
        return NodeEnvironment(
            launch_path=str(launch_path),
            master_address=address,
            master_port=port,
            python_path=(*code, str(python_root())),
            bin_folder=str(Path(sys.executable).parent),
            cores=self.inventory.cores,
            slots=self.inventory.slots,
            interface=interface_of(self.settings.address),
            gpus=tuple(gpu.uuid for gpu in self.inventory.gpus),
            profiles=self.inventory.slot_profiles,
            slot_memory_bytes=self.inventory.slot_memory_bytes,
            mps_pipe=self.mps_pipe(),
        )

    def mps_pipe(self) -> str:
        """Where a control daemon of CUDA MPS listens now, '' if none does."""
        named = self.settings.mps_pipe_dir
        folder = self.environment.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPE_DIR) if named is None else named
        return folder if folder and Path(folder, "control").exists() else ""

    async def said(self, fact: Fact) -> bool:
        """Whether the stream has this very fact already."""
        return any(each.envelope.id == fact.event_id for each in await self.bus.read_history(fact.subject))


def python_root() -> Path:
    """The folder from which ``trainbus`` and ``contracts`` are imported."""
    return Path(contracts.__file__).resolve().parent.parent
