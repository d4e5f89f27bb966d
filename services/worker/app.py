"""Wires the agent of one node."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from services.kit.service import Service
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.kit.store.ranged import RangedDownloader
from services.worker.agent.agent import Agent
from services.worker.cache.node_cache import SHARDS_FOLDER, NodeCache
from services.worker.cache.shard_cache import ShardCache
from services.worker.cache.shard_files import ShardFiles
from services.worker.checkpoints.survivor_memory import SurvivorMemory, default_folder
from services.worker.core.rank_environment import INHERITED
from services.worker.launch.executor import Executor, ProcessExecutor
from services.worker.launch.warm_server import WarmServer
from services.worker.node.gpu_check import GpuCheck
from services.worker.node.inventory import inventory
from services.worker.node.system_metrics import SystemMeter
from services.worker.node_context import NodeContext, python_root
from services.worker.notices.listener import listen_for_notices
from services.worker.ranks.control_socket import socket_path
from services.worker.settings import WorkerSettings


def build(settings: Settings, executor: Executor | None = None) -> Service:
    """The node's agent as a service. ``executor``: another way to run ranks than as processes."""
    if not isinstance(settings, WorkerSettings):
        settings = WorkerSettings(**settings.model_dump())
    service = Service("worker", settings)
    objects = service.add_resource(ObjectStore(settings))
    cache_folder = (settings.cache_dir or settings.data_dir / "cache").resolve()
    shard_files = ShardFiles(
        cache_folder / SHARDS_FOLDER,
        objects,
        RangedDownloader(objects.reader, stall_s=settings.cache_stall_s),
        settings.cache_warm_dir,
    )
    shards = service.add_resource(ShardCache(shard_files, settings.cache_max_bytes, ahead_s=settings.cache_ahead_s))
    found = inventory(settings)
    agent_folder = settings.data_dir.resolve() / "agent"
    warm = _warm(settings) if settings.warm and executor is None else None
    context = NodeContext(
        settings=settings,
        bus=service.bus,
        objects=objects,
        cache=NodeCache(cache_folder, objects, settings.cache_max_bytes, shards),
        executor=executor or ProcessExecutor(warm),
        inventory=found,
        meter=SystemMeter(found.gpus),
        gpu_check=GpuCheck(found.gpus),
        memory=_memory(settings),
    )
    agent = Agent(context)

    async def keep_warm() -> None:
        if warm is not None:
            agent_folder.mkdir(parents=True, exist_ok=True)
            await warm.run()
        else:
            await asyncio.Event().wait()

    async def leave() -> None:
        try:
            await agent.shut_down()
        finally:
            with suppress(OSError):
                await context.executor.close()

    service.add_background_task(agent.run)
    service.add_background_task(keep_warm)
    service.add_background_task(lambda: listen_for_notices(settings, agent))

    async def leave_unheard() -> None:
        try:
            await agent.end_unheard()
        finally:
            with suppress(OSError):
                await context.executor.close()

    service.add_stop_action(leave, before_start=leave_unheard)
    service.add_readiness_check("joined", agent.joined.is_set)
    return service


def _memory(settings: WorkerSettings) -> SurvivorMemory:
    named = settings.memory_dir
    folder = default_folder(settings.node_id, settings.data_dir) if named is None else Path(named) if named else None
    return SurvivorMemory(folder, settings.memory_max_bytes)


def _warm(settings: WorkerSettings) -> WarmServer:
    folder = settings.data_dir.resolve() / "agent"
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    # One thread: what forks must not have more, and ranks share the cores.
    environment |= {"PYTHONPATH": str(python_root()), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return WarmServer(socket_path(folder, "warm.sock"), folder / "warm.log", environment)
