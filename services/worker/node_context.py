"""The services of a node that all its generations share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.kit.bus import Bus
from services.kit.packages.package_environment import PackageEnvironments
from services.kit.store.objects import ObjectStore
from services.worker.agent.node_term import NodeTerm
from services.worker.cache.node_cache import NodeCache
from services.worker.checkpoints.survivor_state import SurvivorMemory
from services.worker.checkpoints.uploader import KnownBlobs
from services.worker.data_folders.data_folders import DataFolders
from services.worker.launch.executor import Executor
from services.worker.node.address import AddressFinder
from services.worker.node.gpu_check import GpuCheck
from services.worker.node.inventory import NodeInventory
from services.worker.ranks.system_metrics import SystemMeter
from services.worker.settings import WorkerSettings


class SlotShares:
    """Which generation uses which share of which slots."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], tuple[tuple[int, ...], float]] = {}

    def allocate(self, run_id: str, generation: int, slots: Iterable[int], share: float) -> None:
        """Note that a generation uses ``share`` of each of the slots; 0: it uses no device."""
        if share:
            self._held[run_id, generation] = tuple(slots), share

    def release(self, run_id: str, generation: int) -> None:
        """Note that the ranks of a generation have ended."""
        self._held.pop((run_id, generation), None)

    def of_others(self, run_id: str) -> dict[int, list[float]]:
        """Return slot -> the shares of it that other runs use."""
        shares: dict[int, list[float]] = {}
        for (other, _), (slots, share) in self._held.items():
            for slot in slots if other != run_id else ():
                shares.setdefault(slot, []).append(share)
        return shares


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What a generation needs of its node."""

    settings: WorkerSettings
    bus: Bus
    objects: ObjectStore
    cache: NodeCache
    data_folders: DataFolders
    packages: PackageEnvironments
    executor: Executor
    inventory: NodeInventory
    meter: SystemMeter
    gpu_check: GpuCheck
    memory: SurvivorMemory
    term: NodeTerm
    addresses: AddressFinder
    #: Folder for the caches of libraries; '' where they are in the home folder.
    cache_home: str = ""
    slot_shares: SlotShares = field(default_factory=SlotShares)
    known_blobs: KnownBlobs = field(default_factory=KnownBlobs)
    #: The agent's environment; ranks inherit a few variables of it.
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
