"""Survivor state: training state that outlives its ranks, and how the next generation finds and loads the newest.

``<folder>/g<generation>/step_<n>-rank_<r>/`` holds a checkpoint's files: a whole state that one rank saved in memory
(``SurvivorStore``), or, on the node's disk, one rank's part of an uncommitted checkpoint. A folder is renamed into
place, so one that exists is whole; the kernel holds memory, so a SIGKILL does not remove it. The parts of one state may
lie on several nodes: each rank lists those of its node, and receives from others those that its node lacks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from contracts.disk_space import measure_folder
from contracts.formats import format_bytes
from contracts.machine_limits import limited_memory
from contracts.tensor_files import TENSOR_KINDS, TensorKind, parse_tensors_file
from trainbus.trainer.checkpoint import CheckpointError, LoadedCheckpoint, Progress, tensor_digest
from trainbus.trainer.checkpoint.files import STATE, digests_file
from trainbus.trainer.checkpoint.reader import open_tensors, read_state
from trainbus.trainer.checkpoint.staging import StagingBuffers, copy_all
from trainbus.trainer.divergence import TrainingDiverged, check_finite
from trainbus.trainer.readable_tensor import MemoryTensor, ReadableTensor
from trainbus.trainer.training_state import State
from trainbus.trainer.world import World

_GENERATION = re.compile(r"g(\d+)")
_OWNER = re.compile(r"step_.*-rank_(\d+)")
_STEP = re.compile(r"step_(\d+)-rank_\d+")

#: Held by the rank of a node that allocates memory.
LOCK = ".lock"
SHM = Path("/dev/shm")

#: Snapshots take at most this share of the time.
SNAPSHOT_SHARE = 0.01

TensorsByKind = dict[TensorKind, dict[str, ReadableTensor]]
Files = Mapping[str, Mapping[str, Tensor]]


class StateKey(NamedTuple):
    """Identifies a state on all nodes. The greater key is the newer state.

    The generation decides: one that did not use what an older one left has a history of its own, even if it is behind.
    """

    generation: int
    step: int
    #: Index of the folder that it lies in.
    folder: int


@dataclass(slots=True)
class LocalParts:
    """The parts of a state that one node has."""

    #: Folder of each part's files.
    parts: dict[int, Path] = field(default_factory=dict)
    #: Number of parts of the whole state; 0 where part 0, which records it, is missing.
    total: int = 0


def find_local_parts(
    folders: Sequence[Path | None], generation: int, at_least: int, run_id: str | None
) -> dict[StateKey, LocalParts]:
    """Return the states of generations before this one on this node, from step ``at_least`` on."""
    found: dict[StateKey, LocalParts] = {}
    for index, folder in enumerate(folders):
        for path in () if folder is None else folder.glob("g*/step_*"):
            number, step = _GENERATION.fullmatch(path.parent.name), _STEP.fullmatch(path.name)
            if not number or not step or int(number[1]) >= generation or int(step[1]) < at_least:
                continue
            offer = found.setdefault(StateKey(int(number[1]), int(step[1]), index), LocalParts())
            parsed = [parse_tensors_file(file.name) for file in path.iterdir()]
            offer.parts |= {named[1]: path for named in parsed if named is not None and named[0] == "model"}
    for key, offer in list(found.items()):
        if 0 in offer.parts:
            try:
                progress, _ = read_state(offer.parts[0])
            except CheckpointError as error:
                print(f"trainbus: the state left at step {key.step} is not used: {error}", flush=True)
                del found[key]
                continue
            if progress.about.get("run_id") == run_id:
                offer.total = progress.about["parts"]
            else:
                del found[key]
    return found


def load_newest_state(world: World, mine: Mapping[StateKey, LocalParts]) -> LoadedCheckpoint | None:
    """Open the newest state that the nodes of all ranks have together; None if there is none. Every rank calls it.

    Tensors stay in the files of this node. Those of other nodes, where this one lacks a part, are received into memory.
    """
    offered: list[dict[StateKey, tuple[int, set[int]]]] = world.all_gather_objects(
        {key: (offer.total, set(offer.parts)) for key, offer in mine.items()}
    )
    for key in sorted({key for each in offered for key in each}, reverse=True):
        has = [each.get(key, (0, set())) for each in offered]
        wanted = set(range(max(total for total, _ in has)))
        if not wanted or not wanted <= set().union(*(parts for _, parts in has)):
            continue
        all_have_all = all(wanted <= parts for _, parts in has)
        holders = {part: next(rank for rank, (_, parts) in enumerate(has) if part in parts) for part in sorted(wanted)}
        own = [part for part in holders if all_have_all or holders[part] == world.rank]
        opened = _open(mine[key], own) if own else {}
        if any(world.all_gather_objects(opened is None)):
            continue
        assert opened is not None
        return _join(opened.values()) if all_have_all else _join(_share(world, holders, opened))
    return None


class StatePart(NamedTuple):
    #: Everything but tensors; in part 0 only.
    head: tuple[Progress, State[ReadableTensor]] | None
    kinds: TensorsByKind


def _open(offer: LocalParts, parts: Iterable[int]) -> dict[int, StatePart] | None:
    """Open these parts; None if one of them cannot be used."""
    try:
        return {part: _open_part(offer.parts[part], part) for part in parts}
    except CheckpointError as error:
        print(f"trainbus: a state left here is not used: {error}", flush=True)
        return None


def _open_part(folder: Path, part: int) -> StatePart:
    kinds = {kind: open_tensors(folder, kind) for kind in TENSOR_KINDS}
    path = folder / digests_file(part)
    if path.exists():  # survivor state in memory has no digests, since no disk can have changed it
        try:
            digests = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}") from error
        for kind, tensors in kinds.items():
            for name, tensor in tensors.items():
                if digests.get(f"{kind}/{name}") != tensor_digest(tensor.read()):
                    raise CheckpointError(f"{kind}/{name!r} differs from what was written")
    return StatePart(read_state(folder) if part == 0 else None, kinds)


def _join(parts: Iterable[StatePart]) -> LoadedCheckpoint:
    whole: TensorsByKind = {kind: {} for kind in TENSOR_KINDS}
    heads = []
    for part in parts:
        heads += [part.head] if part.head is not None else []
        for kind, tensors in part.kinds.items():
            whole[kind] |= tensors
    ((progress, state),) = heads
    state.model, state.optimizer.tensors, state.ema = (whole[kind] for kind in TENSOR_KINDS)
    return LoadedCheckpoint(progress, state)


def _share(world: World, holders: Mapping[int, int], opened: Mapping[int, StatePart]) -> Iterable[StatePart]:
    """Send every part to every rank: plain values first, then one tensor after the other."""
    for part, holder in holders.items():
        mine = opened.get(part)
        described_part: Any = None
        if mine is not None:
            table = {
                kind: {name: (saved.dtype, saved.shape, tensor_digest(saved.read())) for name, saved in tensors.items()}
                for kind, tensors in mine.kinds.items()
            }
            described_part = (mine.head, table)
        head, table = world.broadcast_object(described_part, holder)
        kinds: TensorsByKind = {}
        for kind, described in table.items():
            own = {} if mine is None else mine.kinds[kind]
            kinds[kind] = {
                name: _exchange(world, holder, f"{kind}/{name}", own.get(name), *described[name]) for name in described
            }
        yield StatePart(head, kinds)


def _exchange(
    world: World,
    holder: int,
    name: str,
    mine: ReadableTensor | None,
    dtype: torch.dtype,
    shape: torch.Size,
    digest: str,
) -> ReadableTensor:
    """Send a tensor that this rank has to all others, or receive it."""
    tensor = torch.empty(shape, dtype=dtype, device=world.device) if mine is None else mine.read().to(world.device)
    # As bytes: gloo supports fewer types than torch.
    if tensor.numel():
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=holder)
    if mine is not None:
        return mine
    if tensor_digest(tensor) != digest:
        raise RuntimeError(f"{name} did not arrive from rank {holder} as it was sent")
    return MemoryTensor(tensor.cpu())


class SurvivorFolder:
    """A folder with the newest states of one rank: two buffers in turn, so that the newer one stays whole."""

    def __init__(self, root: Path, generation: int, rank: int, max_bytes: int | None = None) -> None:
        """``max_bytes``: what all files beside ``root``, of all ranks and runs of the node, may take together."""
        self._root, self._folder, self._rank, self._max_bytes = root, root / f"g{generation}", rank, max_bytes
        self._stagings: list[tuple[Path, StagingBuffers]] = []

    def allocate(self, files: Files) -> tuple[Path, StagingBuffers]:
        """Return a hidden folder of the files' size: the older of two.

        Raises:
            OSError: there is no room, or no access. Nothing is left of the attempt.
        """
        hidden = self._folder / f".step_next-rank_{self._rank}.{len(self._stagings) % 2}"
        if len(self._stagings) == 2:
            place, staging = self._stagings.pop(0)
            if place.exists():
                place.rename(hidden)
        else:
            staging = StagingBuffers(folder=hidden)
        if not hidden.exists():
            hidden.mkdir(parents=True, mode=0o700)
            staging = StagingBuffers(folder=hidden)
        try:
            with self._reserved(files, hidden):
                staging.lay_out(files)
        except OSError:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        return hidden, staging

    @contextmanager
    def _reserved(self, files: Files, hidden: Path) -> Iterator[None]:
        """Allocate as the only rank of the node, within the limit."""
        if self._max_bytes is None:
            yield
            return
        with (self._root.parent / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            needed = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
            shared = limited_memory()
            # A file in memory beyond that would end this process, or another one of the container.
            if shared is not None and needed > shared.limit_bytes - shared.used_bytes:
                raise OSError(
                    errno.EDQUOT,
                    f"{format_bytes(shared.limit_bytes)} are allowed by the container, of which "
                    f"{format_bytes(shared.used_bytes)} are used: raise its memory limit",
                )
            others = measure_folder(self._root.parent) - measure_folder(hidden)
            if needed + others > self._max_bytes:
                raise OSError(
                    errno.EDQUOT,
                    f"{format_bytes(self._max_bytes)} are allowed (TRAINBUS_MEMORY_MAX_BYTES of the node's agent)"
                    + (f", of which {format_bytes(others)} are used" if others else ""),
                )
            yield

    def copy(
        self, hidden: Path, staging: StagingBuffers, files: Files, state: dict[str, Any], trained: Collection[str]
    ) -> None:
        """Copy a state to its allocated folder, and give that its name.

        Raises:
            OSError: there is no room.
            TrainingDiverged: the state is not finite. Nothing of it stays.
        """
        copy_all(staging.pairs(files))
        try:
            check_finite({file: image.views for file, image in staging.images.items()}, trained, state["step"])
        except TrainingDiverged:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        (hidden / STATE).write_text(json.dumps(state, allow_nan=False))
        place = self._folder / f"step_{state['step']:08d}-rank_{self._rank}"
        shutil.rmtree(place, ignore_errors=True)
        os.rename(hidden, place)
        self._stagings.append((place, staging))

    def has_state_of_others(self) -> bool:
        """Return whether another rank of this generation has saved its state here, or is doing so."""
        names = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        return any((owner := _OWNER.search(name)) and int(owner[1]) != self._rank for name in names)

    def describe_room(self, error: OSError) -> str:
        """Return why there was no room, and what to set."""
        if error.errno == errno.EDQUOT:
            return str(error.strerror)
        if error.errno != errno.ENOSPC:
            return f"{self._root}: {error.strerror or error}"
        try:
            free = os.statvfs(self._root)
            room = f"{format_bytes(free.f_bavail * free.f_frsize)} of {format_bytes(free.f_blocks * free.f_frsize)}"
        except OSError:
            return f"the file system of {self._root} is full"
        advice = " (a container: --shm-size; a pod: an emptyDir with medium Memory)"
        return f"{room} are free on the file system of {self._root}{advice if self._root.is_relative_to(SHM) else ''}"


class SurvivorStore:
    """Where one rank saves its state and finds that of others. Without a folder nothing is saved.

    State that memory has no room for goes to disk, or is not saved; training goes on in any case.
    """

    def __init__(
        self,
        folder: Path | None = None,
        generation: int = 0,
        rank: int = 0,
        *,
        max_bytes: int | None = None,
        spill_folder: Path | None = None,
        disk_folder: Path | None = None,
    ) -> None:
        """Save nothing yet.

        Args:
            max_bytes: what the states of all runs of the node may take in memory; None: what there is.
            spill_folder: on disk, for what memory has no room for.
            disk_folder: where the node keeps the uncommitted checkpoints of earlier generations.
        """
        self._generation = generation
        #: Folders that states are found in; of two of one step the last one is loaded.
        self._found_in = (disk_folder, spill_folder, folder)
        self._memory = SurvivorFolder(folder, generation, rank, max_bytes) if folder is not None else None
        self._spill = SurvivorFolder(spill_folder, generation, rank) if spill_folder is not None else None
        self._takes_snapshots = folder is not None
        self._thread: threading.Thread | None = None
        self._next_s = 0.0

    @property
    def is_enabled(self) -> bool:
        return self._memory is not None or self._spill is not None

    def find_parts(self, at_least: int, run_id: str | None) -> dict[StateKey, LocalParts]:
        """Return the states of earlier generations on this node, from step ``at_least`` on."""
        return find_local_parts(self._found_in, self._generation, at_least, run_id)

    def save(self, files: Files, state: dict[str, Any], trained: Collection[str]) -> bool:
        """Copy a whole state to where it outlives this process; return whether it was saved.

        Args:
            trained: the names of the weights that must be finite.

        Raises:
            TrainingDiverged: one is not.
        """
        problems = []
        for folder in (self._memory, self._spill):
            if folder is None:
                continue
            try:
                folder.copy(*folder.allocate(files), files, state, trained)
            except OSError as error:
                if folder.has_state_of_others():  # one whole state is enough, and theirs has the room
                    return True
                problems.append(folder.describe_room(error))
                continue
            if problems:
                print(f"trainbus: {_no_room(files, problems)}; it was saved on disk", flush=True)
            return True
        if problems:
            print(f"trainbus: {_no_room(files, problems)}; the last checkpoint is what is left of it", flush=True)
        return False

    def is_snapshot_due(self, now_s: float) -> bool:
        """Return whether the last snapshot was cheap enough, and long enough ago, for another."""
        is_idle = self._thread is None or not self._thread.is_alive()
        return self._takes_snapshots and now_s >= self._next_s and is_idle

    def snapshot(self, files: Files, state: dict[str, Any], trained: Collection[str]) -> None:
        """Save a state in case this process is killed, while the next forward and backward pass run.

        One that is not finite is not kept: the loss or the next checkpoint ends training.
        """
        memory = self._memory
        assert memory is not None
        try:
            hidden, staging = memory.allocate(files)
        except OSError as error:
            self._end_snapshots(memory, files, error)
            return

        def work() -> None:
            started = time.monotonic()
            try:
                with suppress(TrainingDiverged):
                    memory.copy(hidden, staging, files, state, trained)
            except OSError as error:
                self._end_snapshots(memory, files, error)
            ended = time.monotonic()
            self._next_s = ended + (ended - started) / SNAPSHOT_SHARE

        self._thread = threading.Thread(target=work, name="trainbus-snapshot", daemon=True)
        self._thread.start()

    def _end_snapshots(self, memory: SurvivorFolder, files: Files, error: OSError) -> None:
        self._takes_snapshots = False
        cost = "a rank that is killed costs the steps since the last checkpoint"
        print(f"trainbus: {_no_room(files, [memory.describe_room(error)])}; {cost}", flush=True)

    def wait_for_snapshot(self) -> None:
        """Wait until no snapshot reads the live state any more."""
        if self._thread is not None:
            self._thread.join()


def _no_room(files: Files, problems: Sequence[str]) -> str:
    needed = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    return f"the node's memory has no room for survivor state of {format_bytes(needed)}: {'; '.join(problems)}"
