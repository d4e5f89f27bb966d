"""The worker service: the agent of one node, wired to its bus, store and devices."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from contracts.ranks import INHERITED
from services.kit.packages.package_environment import PackageEnvironments
from services.kit.service import Service
from services.kit.settings import Settings
from services.kit.socket_files import socket_path
from services.kit.store.objects import ObjectStore
from services.kit.store.ranged_download import RangedDownloader
from services.kit.warm_server import WarmServer
from services.kit.workdir import Workdir
from services.worker import metrics
from services.worker.agent.agent import Agent
from services.worker.agent.node_term import NodeTerm
from services.worker.cache.file_cache import FileCache
from services.worker.cache.node_cache import SHARDS_FOLDER, NodeCache
from services.worker.cache.shard_cache import ShardCache
from services.worker.cache.shard_files import ShardFiles
from services.worker.checkpoints.survivor_state import SurvivorMemory, default_folder
from services.worker.core.rank_environment import cache_variables
from services.worker.data_folders.data_folders import DataFolders
from services.worker.launch.executor import PYTHON_ROOT, Executor, ProcessExecutor
from services.worker.node.address import AddressFinder
from services.worker.node.gpu_check import GpuCheck
from services.worker.node.home import find_cache_home
from services.worker.node.inventory import inspect_node
from services.worker.node_context import NodeContext
from services.worker.notices.listener import listen_for_notices
from services.worker.ranks.system_metrics import SystemMeter
from services.worker.settings import GIB, WorkerSettings

PR_SET_DUMPABLE = 4
#: Folder of the projects' packages in the cache's folder.
PACKAGES_FOLDER = "packages"


def protect_credentials() -> None:
    """Deny access to this process's environment and memory to all but root; processes that it starts are not protected.

    Without it every process of the agent's user reads the store's keys from ``/proc/<agent>/environ``. On Linux only.

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the agent's memory cannot be protected from its ranks")


def build(settings: Settings, executor: Executor | None = None) -> Service:
    """Build the node's agent as a service. ``executor``: another way to run ranks than as processes."""
    if not isinstance(settings, WorkerSettings):
        settings = WorkerSettings(**settings.model_dump())
    service = Service("worker", settings)
    objects = service.add_object_store(ObjectStore(settings))
    cache_home = find_cache_home(os.environ, settings.data_dir)
    warm_server = _warm_server(settings, cache_home) if settings.warm and executor is None else None
    executor = executor or ProcessExecutor(warm_server)
    inventory = inspect_node(settings)
    cache = _cache(settings, service, objects)
    agent = Agent(
        NodeContext(
            settings=settings,
            bus=service.bus,
            objects=objects,
            cache=cache,
            data_folders=_data_folders(settings, service, cache),
            packages=_packages(settings, objects),
            executor=executor,
            inventory=inventory,
            meter=SystemMeter(inventory.gpus),
            gpu_check=GpuCheck(inventory.gpus),
            memory=_memory(settings, inventory.memory_bytes),
            term=NodeTerm(settings.data_dir, settings.lease_ttl_s),
            cache_home=cache_home,
            addresses=service.add_resource(AddressFinder(settings.address, settings.nats_servers)),
        )
    )

    async def keep_warm_server() -> None:
        if warm_server is not None:
            await warm_server.run()
        await asyncio.Event().wait()

    service.add_background_task(agent.run)
    service.add_background_task(agent.watch_lease)
    service.add_background_task(keep_warm_server)
    service.add_background_task(lambda: listen_for_notices(settings, agent))
    service.add_stop_action(
        _then_close(agent.shut_down, executor), before_start=_then_close(agent.end_offline, executor)
    )
    service.add_readiness_check("joined", agent.joined.is_set)
    return service


def _then_close(end_agent: Callable[[], Awaitable[None]], executor: Executor) -> Callable[[], Awaitable[None]]:
    """Return what ends the agent, and after it the executor."""

    async def end_both() -> None:
        try:
            await end_agent()
        finally:
            with suppress(OSError):
                await executor.close()

    return end_both


def _cache(settings: WorkerSettings, service: Service, objects: ObjectStore) -> NodeCache:
    folder = _cache_folder(settings)
    downloader = RangedDownloader(objects.reader, stall_s=settings.cache_stall_s)
    files = FileCache(folder, objects, excluded=(folder / SHARDS_FOLDER, folder / PACKAGES_FOLDER))
    shard_files = ShardFiles(folder / SHARDS_FOLDER, objects, downloader, settings.cache_warm_dir)
    max_bytes = settings.cache_max_bytes
    shards = service.add_resource(ShardCache(shard_files, max_bytes, ahead_s=settings.cache_ahead_s, other_files=files))
    return NodeCache(files, objects, max_bytes, shards)


def _data_folders(settings: WorkerSettings, service: Service, cache: NodeCache) -> DataFolders:
    trees = cache.files.trees
    return DataFolders(cache, trees, service.add_resource(Workdir(trees.folder / ".work")))


def _packages(settings: WorkerSettings, objects: ObjectStore) -> PackageEnvironments:
    return PackageEnvironments(
        _cache_folder(settings) / PACKAGES_FOLDER,
        settings.data_dir.resolve() / "runs",
        objects,
        settings.bucket_code,
        max_bytes=settings.packages_max_bytes,
        timeout_s=settings.packages_timeout_s,
        may_build=settings.packages_build,
        count_lookup=lambda outcome: metrics.CACHE_LOOKUPS.labels(outcome).inc(),
    )


def _cache_folder(settings: WorkerSettings) -> Path:
    return (settings.cache_dir or settings.data_dir / "cache").resolve()


def _memory(settings: WorkerSettings, node_bytes: int) -> SurvivorMemory:
    if settings.memory_dir is None:
        folder = default_folder(settings.node_id, settings.data_dir)
    else:
        folder = Path(settings.memory_dir) if settings.memory_dir else None
    # Files in memory count against a container's limit, as what the ranks compute with does.
    max_bytes = min(16 * GIB, node_bytes // 4) if settings.memory_max_bytes is None else settings.memory_max_bytes
    return SurvivorMemory(folder, max_bytes, settings.data_dir.resolve() / "runs")


def _warm_server(settings: WorkerSettings, cache_home: str) -> WarmServer:
    folder = settings.data_dir.resolve() / "agent"
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ} | cache_variables(cache_home)
    # One thread: forks must not have more, and ranks share the cores.
    environment |= {"PYTHONPATH": str(PYTHON_ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return WarmServer(socket_path(folder, "warm.sock"), folder / "warm.log", environment)
