"""The services of a node that all its generations share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.kit.bus import Bus
from services.kit.store.objects import ObjectStore
from services.worker.cache.node_cache import NodeCache
from services.worker.checkpoints.known_blobs import KnownBlobs
from services.worker.checkpoints.survivor_memory import SurvivorMemory
from services.worker.launch.executor import Executor
from services.worker.node.gpu_check import GpuCheck
from services.worker.node.inventory import NodeInventory
from services.worker.node.slot_shares import SlotShares
from services.worker.node.system_metrics import SystemMeter
from services.worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What a generation needs of its node."""

    settings: WorkerSettings
    bus: Bus
    objects: ObjectStore
    cache: NodeCache
    executor: Executor
    inventory: NodeInventory
    meter: SystemMeter
    gpu_check: GpuCheck
    memory: SurvivorMemory
    slot_shares: SlotShares = field(default_factory=SlotShares)
    known_blobs: KnownBlobs = field(default_factory=KnownBlobs)
    #: The agent's environment; ranks inherit a few variables of it.
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
