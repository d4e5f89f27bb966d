"""What a placement needs before its ranks can start: code, data, checkpoint, and where to meet."""

from __future__ import annotations

import asyncio
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import nats.errors
import structlog
from nats.js.errors import APIError, BadRequestError

from contracts import topology
from contracts.datasets import SPLITS
from contracts.events.run import CheckpointRef, Member, RunPlaced
from services.kit.bus import TransientError
from services.worker.cache.node_cache import CacheError, CachePins
from services.worker.cache.shard_cache import DatasetView
from services.worker.core.rank_environment import slot_problem
from services.worker.launch.code_package import unpack
from services.worker.node.gpu_check import UnfitDeviceError
from services.worker.node_context import NodeContext
from services.worker.together import together

log = structlog.get_logger(__name__)

#: Seconds until the bus is tried again.
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class GenerationInputs:
    """All that is needed to start the ranks."""

    code_folder: Path | None
    dataset: DatasetView | None
    resume_folder: Path | None
    resume: CheckpointRef | None
    init_folder: Path | None
    master: tuple[str, int]


async def prepare_inputs(
    context: NodeContext, placed: RunPlaced, member: Member, folder: Path, hold: CachePins
) -> GenerationInputs:
    """Fetch everything, in parallel.

    Raises:
        PackageError, CacheError: what was asked for cannot be used; the text says what to change.
        TransientError: the store or the bus was away for too long.
        Unfit: the node's devices are not; the scheduler knows.
    """
    problem = slot_problem(placed.spec, member, context.inventory.slots, context.inventory.slot_profiles)
    if problem is not None:
        raise CacheError(problem)
    await _check_devices(context, placed, member)
    code, dataset, resume, init = await together(
        _code(context, placed, folder, hold),
        open_dataset(context, placed, member, folder, hold),
        _resume(context, placed, folder, hold),
        _init(context, placed, folder, hold),
    )
    master = await _meet(context, placed, member)
    return GenerationInputs(code, dataset, resume[0], resume[1], init, master)


async def _check_devices(context: NodeContext, placed: RunPlaced, member: Member) -> None:
    share = placed.spec.resources.share
    if share == 0:
        return  # its ranks see no device
    try:
        await context.gpu_check.check(member.slots, context.held_beside(placed) if share < 1 else None)
    except UnfitDeviceError as error:
        if context.on_unfit is not None:
            # Said before the slots are given back, or the run would come here again.
            await context.on_unfit(error.slots, str(error))
        raise


async def _code(context: NodeContext, placed: RunPlaced, folder: Path, hold: CachePins) -> Path | None:
    if placed.spec.code is None:
        return None
    package = await context.cache.package(placed.spec.code, hold)
    # A copy of its own: a script that writes beside itself must not change the next run's code.
    target = folder / "code"
    settings = context.settings
    await asyncio.to_thread(
        unpack, package, target, max_bytes=settings.package_max_bytes, max_files=settings.package_max_files
    )
    return target


async def open_dataset(
    context: NodeContext, placed: RunPlaced, member: Member, folder: Path, hold: CachePins
) -> DatasetView | None:
    """The dataset's folder: whole for a script, which cannot wait for a shard; for ours as they read it."""
    dataset, spec = placed.dataset, placed.spec
    if dataset is None:
        return None
    read = ("train", "validation") if spec.evaluate is None else (spec.evaluate.split,)
    alone = len(member.ranks) == placed.world_size
    return await context.cache.dataset(
        dataset.manifest_uri,
        dataset.dataset_id,
        folder / "dataset",
        hold,
        whole=SPLITS if spec.command is not None else (),
        guess=read if spec.command is None and alone else (),
    )


async def _resume(
    context: NodeContext, placed: RunPlaced, folder: Path, hold: CachePins
) -> tuple[Path | None, CheckpointRef | None]:
    spec = placed.spec
    if spec.evaluate is not None:
        uri: str | None = spec.evaluate.checkpoint_uri
    else:
        uri = placed.resume.uri if placed.resume is not None else spec.resume_from
    committed = placed.resume.manifest_sha256 if placed.resume is not None and placed.resume.uri == uri else None
    if uri is None:
        return None, None
    target = folder / "resume"
    shutil.rmtree(target, ignore_errors=True)
    return target, await context.cache.checkpoint(uri, target, hold, committed)


async def _init(context: NodeContext, placed: RunPlaced, folder: Path, hold: CachePins) -> Path | None:
    """The weights to begin with; not where the run has a checkpoint of its own to go on from."""
    uri = placed.spec.init_from
    if uri is None or placed.resume is not None:
        return None
    target = folder / "init"
    shutil.rmtree(target, ignore_errors=True)
    committed = placed.init.manifest_sha256 if placed.init is not None else None
    await context.cache.checkpoint(uri, target, hold, committed, weights_alone=True)
    return target


async def _meet(context: NodeContext, placed: RunPlaced, member: Member) -> tuple[str, int]:
    """Where the ranks meet: chosen by rank 0's node, waited for by the others."""
    address = context.settings.address
    key = f"{placed.run_id}.{placed.generation}"
    alone = sum(1 for each in placed.members if each.ranks) == 1
    if alone:
        return address, free_port(address)
    patience_s = context.settings.rendezvous_timeout_s
    try:
        async with asyncio.timeout(patience_s):
            if 0 in member.ranks:
                await _say(context, key, f"{address}:{free_port(address)}".encode())
            # One subscription: the others learn of it the moment it is said. What was said first stands.
            async for entries in context.bus.follow_bucket(topology.RENDEZVOUS, key, idle_s=1.0):
                for entry in entries:
                    if entry.value:
                        return _parse(entry.value)
    except TimeoutError:
        pass
    raise TransientError(f"rank 0's node did not say within {patience_s:.0f} s where to meet")


async def _say(context: NodeContext, key: str, offer: bytes) -> None:
    """Say where to meet, unless an earlier life of this agent has."""
    bucket = await context.bus.open_bucket(topology.RENDEZVOUS)
    while True:
        try:
            await bucket.create(key, offer)
            return
        except BadRequestError:
            log.info("the meeting point was said before", key=key)
            return
        except (nats.errors.Error, APIError, TimeoutError) as error:
            log.warning("the meeting point cannot be said", error=repr(error))
            await asyncio.sleep(RETRY_S)


def free_port(address: str) -> int:
    """A port nobody listens on now. Somebody may by the time the ranks do: that is an infrastructure failure."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _parse(value: bytes) -> tuple[str, int]:
    host, _, port = value.decode().rpartition(":")
    return host, int(port)
