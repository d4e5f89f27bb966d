"""The inputs of a generation: code, dataset, checkpoint, weights and rendezvous, fetched before its ranks start."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import nats.errors
import structlog
from nats.js.errors import APIError, BadRequestError

from contracts import topology
from contracts.events.run import CheckpointRef, Member, RunPlaced
from contracts.ranks import DATA_DIR_VARIABLE, RendezvousLine, format_endpoint, parse_endpoint
from contracts.spec.run import RunSpec
from contracts.tensor_files import TENSOR_KINDS
from services.kit.bus import Bus, TransientError
from services.kit.concurrency import gather_limited, run_in_thread
from services.kit.kept_files import KeptLayout, copy_outputs, list_files, unpack_files
from services.kit.package_files import unpack_package
from services.kit.ports import PortsError, free_ports
from services.worker.cache.dataset_view import DatasetView
from services.worker.cache.node_cache import CacheError, CachePins
from services.worker.cache.partial_checkpoint import PartialCheckpoint
from services.worker.core.journal import JournalSource, held_up_event
from services.worker.core.rank_environment import choose_data_dir, choose_output_dir, is_command, slot_problem
from services.worker.node.address import LOOPBACK, NodeAddress, find_interface, parse_ip
from services.worker.node_context import NodeContext
from services.worker.ranks.journal_follower import Publish

log = structlog.get_logger(__name__)

#: Seconds until a failed write to the bus is repeated.
RETRY_S = 0.1
#: Datasets of a run that are fetched at a time.
FETCHED_DATASETS = 2
#: Seconds after which a node says whom it waits for.
SAID_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where the ranks of a generation meet, and the interface of this node through which they do."""

    host: str
    port: int
    interface: str
    is_ipv6: bool


async def find_master(
    bus: Bus, placed: RunPlaced, member: Member, own: NodeAddress, timeout_s: float, publish: Publish
) -> MeetingPoint:
    """Return where the generation's rank 0 listens. ``own`` is this node's address.

    ``publish`` is called with what holds the gang up, if that takes long.

    Raises:
        TransientError: rank 0's node did not publish it in time.
    """
    key, started = f"{placed.run_id}.{placed.generation}", time.monotonic()
    if sum(1 for each in placed.members if each.ranks) == 1:
        return MeetingPoint(LOOPBACK, choose_port(), find_interface(parse_ip(LOOPBACK)), is_ipv6=False)
    try:
        async with asyncio.timeout(timeout_s):
            if 0 in member.ranks:
                await _publish_master(bus, key, format_endpoint(own.announced, choose_port(own.is_ipv6)).encode())
            # One subscription: the other nodes learn of it at once. The first value stands.
            async for entries in bus.follow_bucket(topology.RENDEZVOUS, key, idle_s=1.0):
                for entry in entries:
                    if entry.value:
                        host, port = parse_endpoint(entry.value.decode())
                        return MeetingPoint(host, port, own.interface, own.is_ipv6)
                if (waited_s := time.monotonic() - started) > SAID_AFTER_S:
                    await _publish_held_up(placed, member, waited_s, publish)
    except TimeoutError:
        pass
    raise TransientError(f"rank 0's node did not publish its address within {timeout_s:.0f} s")


async def _publish_held_up(placed: RunPlaced, member: Member, waited_s: float, publish: Publish) -> None:
    """Publish that rank 0's node has not published where the ranks meet. One waiting node does it for all of them."""
    waiting = [each for each in placed.members if each.ranks and 0 not in each.ranks]
    if member != min(waiting, key=lambda each: min(each.ranks), default=None):
        return
    source = JournalSource(placed.run_id, placed.generation, member.node_id)
    homes = {rank: each.node_id for each in placed.members for rank in each.ranks}
    fact = held_up_event(source, homes, RendezvousLine(address="", missing=(0,), waited_s=waited_s))
    with suppress(TransientError):  # the bus is away: it is published after the next look
        await publish(fact)


def choose_port(is_ipv6: bool = False) -> int:
    """Return a port for rank 0. If it is taken before the ranks listen, that is an infrastructure failure."""
    try:
        # On every address of the machine, as torch's store listens.
        return free_ports(1, "::" if is_ipv6 else "0.0.0.0")[0]
    except PortsError as error:
        raise TransientError(str(error)) from error


async def _publish_master(bus: Bus, key: str, value: bytes) -> None:
    """Publish where rank 0 listens, unless an earlier life of this agent did."""
    bucket = await bus.open_bucket(topology.RENDEZVOUS)
    while True:
        try:
            await bucket.create(key, value)
            return
        except BadRequestError:
            log.info("the rendezvous was published before", key=key)
            return
        except (nats.errors.Error, APIError, TimeoutError) as error:
            log.warning("the rendezvous cannot be published", error=repr(error))
            await asyncio.sleep(RETRY_S)


@dataclass(frozen=True, slots=True)
class GenerationInputs:
    """All that is needed to start the ranks."""

    code_folder: Path | None
    #: Packages that the project asks for and the node does not have.
    packages_dir: Path | None
    dataset: DatasetView | None
    resume_folder: Path | None
    resume: CheckpointRef | None
    #: Brings what ranks read of it; None: it is whole, or there is none.
    partial: PartialCheckpoint | None
    #: The checkpoint of another run that the ranks begin with.
    init_folder: Path | None
    init: CheckpointRef | None
    #: What the files of the checkpoint are that the output folder begins with, if a script left them.
    kept_layout: KeptLayout | None
    output_dir: Path
    #: The dataset as plain files, for a command.
    data_dir: Path | None
    master: MeetingPoint


async def prepare_inputs(
    context: NodeContext, placed: RunPlaced, member: Member, folder: Path, pins: CachePins, publish: Publish
) -> GenerationInputs:
    """Fetch everything, in parallel.

    Raises:
        PackageError, PackagesError, CacheError: what was requested cannot be used; the text says what to change.
        TransientError: the store or the bus was away for too long.
        UnfitDeviceError: a device of the node failed its check.
    """
    problem = slot_problem(placed.spec, member, context.inventory.slots)
    if problem is not None:
        raise CacheError(problem)
    await _check_devices(context, placed, member)
    fetches: tuple[Coroutine[Any, Any, Any], ...] = (
        _fetch_code_and_packages(context, placed, folder, pins),
        _fetch_dataset(context, placed, member, folder, pins),
        _open_checkpoint(context, placed, folder, pins),
        _fetch_initial(context, placed, folder, pins),
    )
    found = await gather_limited(fetches, limit=len(fetches))
    (code, packages_dir), dataset, (resume, partial), init = found
    resume_folder = None if resume is None else _resume_dir(folder)
    data_dir = await _lay_out_data(context, placed, folder, code, pins)
    init_folder = None if init is None else _init_dir(folder)
    output_dir = Path(choose_output_dir(placed.spec, PurePosixPath(folder), PurePosixPath(code or folder)))
    layout = await run_in_thread(_restore_outputs, placed.spec, resume_folder, init_folder, output_dir)
    patience_s = context.settings.rendezvous_timeout_s
    master = await find_master(context.bus, placed, member, context.addresses.address, patience_s, publish)
    return GenerationInputs(
        code,
        packages_dir,
        dataset,
        resume_folder,
        resume,
        partial,
        init_folder,
        init,
        layout,
        output_dir,
        data_dir,
        master,
    )


def _restore_outputs(
    spec: RunSpec, resume_folder: Path | None, init_folder: Path | None, output_dir: Path
) -> KeptLayout | None:
    """Lay the files that a script kept out again: in the folder of their checkpoint, and in the output folder.

    What the run has kept itself has the files that it began with. All are copies of the node's cache: a script may
    write into them.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    if not is_command(spec):
        return None
    layout = None
    for folder in (init_folder, resume_folder):
        if folder is not None:
            layout = _unpack_checkpoint(folder)
    begins_with = resume_folder or init_folder
    if begins_with is not None and layout is not None:
        copy_outputs(begins_with, layout, output_dir)
    return layout


def _unpack_checkpoint(folder: Path) -> KeptLayout | None:
    try:
        layout = unpack_files(folder)
    except ValueError as error:
        raise CacheError(f"the checkpoint cannot be used: {error}. Choose another one") from error
    for _, path in list(list_files(folder)):
        partial = path.with_name(f".{path.name[:100]}.partial")
        shutil.copyfile(path, partial)
        partial.replace(path)
    return layout


async def _check_devices(context: NodeContext, placed: RunPlaced, member: Member) -> None:
    share = placed.spec.resources.share
    if share == 0:
        return  # its ranks see no device
    others = context.slot_shares.of_others(placed.run_id) if share < 1 else None
    await context.gpu_check.check(member.slots, others)


async def _fetch_code_and_packages(
    context: NodeContext, placed: RunPlaced, folder: Path, pins: CachePins
) -> tuple[Path | None, Path | None]:
    code = await _fetch_code(context, placed, folder, pins)
    if code is None:
        return None, None
    spec = placed.spec
    return code, await context.packages.prepare(code, folder, spec.packages, is_task=spec.command is None)


async def _fetch_code(context: NodeContext, placed: RunPlaced, folder: Path, pins: CachePins) -> Path | None:
    if placed.spec.code is None:
        return None
    package = await context.cache.package(placed.spec.code, pins)
    # A copy of its own: a script that writes beside itself must not change the next run's code.
    target = folder / "code"
    settings = context.settings
    await asyncio.to_thread(
        unpack_package, package, target, max_bytes=settings.package_max_bytes, max_files=settings.package_max_files
    )
    return target


async def _fetch_dataset(
    context: NodeContext, placed: RunPlaced, member: Member, folder: Path, pins: CachePins
) -> DatasetView | None:
    """Fetch the data of a command, as plain files; open that of a Task."""
    if placed.dataset is not None and is_command(placed.spec):
        await gather_limited(
            (context.data_folders.fetch(each, pins) for each in placed.dataset.by_name.values()), limit=FETCHED_DATASETS
        )
    return await open_dataset(context, placed, member, folder, pins)


async def open_dataset(
    context: NodeContext, placed: RunPlaced, member: Member, folder: Path, pins: CachePins
) -> DatasetView | None:
    """Open the dataset of a Task: its shards come as ranks read them. None for a command, which reads plain files."""
    dataset, spec = placed.dataset, placed.spec
    if dataset is None or is_command(spec):
        return None
    read_splits = ("train", "validation") if spec.evaluate is None else (spec.evaluate.split,)
    has_all_ranks = len(member.ranks) == placed.world_size
    return await context.cache.dataset(
        dataset.manifest_uri,
        dataset.dataset_id,
        folder / "dataset",
        pins,
        guess=read_splits if has_all_ranks else (),
    )


async def _lay_out_data(
    context: NodeContext, placed: RunPlaced, folder: Path, code: Path | None, pins: CachePins
) -> Path | None:
    """Lay the data of a command out where it finds it; return that folder."""
    if placed.dataset is None or not is_command(placed.spec):
        return None
    try:
        target = Path(choose_data_dir(placed.spec, PurePosixPath(folder), PurePosixPath(code or folder)))
    except ValueError as error:
        raise CacheError(str(error)) from error
    if code is not None and target.is_relative_to(code) and target.exists():
        raise CacheError(
            f"the project has {str(target.relative_to(code))!r}, where its data is to be: name another "
            f"folder in {DATA_DIR_VARIABLE}, or leave it out of the package (.gitignore)"
        )
    for name, dataset in placed.dataset.by_name.items():
        await context.data_folders.lay_out(dataset, target / name, pins)
    return target


def _resume_dir(folder: Path) -> Path:
    """Return where a generation's checkpoint to start from is laid out."""
    return folder / "resume"


def _init_dir(folder: Path) -> Path:
    """Return where the checkpoint of another run that a generation begins with is laid out."""
    return folder / "init"


async def _open_checkpoint(
    context: NodeContext, placed: RunPlaced, folder: Path, pins: CachePins
) -> tuple[CheckpointRef | None, PartialCheckpoint | None]:
    """Lay out the checkpoint to start from: whole, or in parts where each rank reads its own rows of the tensors."""
    spec = placed.spec
    if spec.evaluate is not None:
        uri: str | None = spec.evaluate.checkpoint_uri
    else:
        uri = placed.resume.uri if placed.resume is not None else spec.resume_from
    committed = placed.resume.manifest_sha256 if placed.resume is not None and placed.resume.uri == uri else None
    if uri is None:
        return None, None
    target = _resume_dir(folder)
    shutil.rmtree(target, ignore_errors=True)
    if kinds := _partial_kinds(placed):
        return await context.cache.partial_checkpoint(uri, target, pins, committed, kinds=kinds)
    weights_only = spec.evaluate is not None and not is_command(spec)
    return await context.cache.checkpoint(uri, target, pins, committed, weights_only=weights_only), None


def _partial_kinds(placed: RunPlaced) -> tuple[str, ...]:
    """Return of which tensors the ranks of one node read only a part."""
    spec, training = placed.spec, placed.spec.training
    if is_command(spec) or training is None or sum(1 for each in placed.members if each.ranks) == 1:
        return ()
    if training.strategy == "zero1" and spec.evaluate is None:
        return ("optimizer",)
    # Stage 3 of DeepSpeed partitions each weight from the whole of it; it is evaluated as fsdp2 is.
    shards = training.strategy == "fsdp2" or (training.strategy == "deepspeed" and spec.evaluate is not None)
    return TENSOR_KINDS if shards else ()


async def _fetch_initial(
    context: NodeContext, placed: RunPlaced, folder: Path, pins: CachePins
) -> CheckpointRef | None:
    """Fetch what the run begins with: a Task's weights unless it resumes a checkpoint of its own, a script's files."""
    uri = placed.spec.init_from
    is_script = is_command(placed.spec)
    if uri is None or (placed.resume is not None and not is_script):
        return None
    target = _init_dir(folder)
    shutil.rmtree(target, ignore_errors=True)
    committed = placed.init.manifest_sha256 if placed.init is not None else None
    return await context.cache.checkpoint(uri, target, pins, committed, weights_only=not is_script)
