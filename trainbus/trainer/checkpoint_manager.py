"""Saves the training state: to disk as checkpoints, and to memory that outlives the process.

A checkpoint holds the loop only while it copies what the next forward pass changes: buffers. Weights and optimizer
state do not change before the optimizer's next step, so a thread copies them to the host during forward and backward,
and ``wait_for_staging`` waits for what remains. The same thread then writes the files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from contracts.disk_space import DISK_FULL
from contracts.events.checkpoint import Exactness
from contracts.ranks import CheckpointLine
from contracts.spec.training import Training
from contracts.tensor_files import TENSOR_KINDS, TensorKind, tensors_file
from trainbus.agent_link.channels import Journal
from trainbus.trainer.checkpoint import CheckpointError, CheckpointSchedule, FailureHistory, Progress
from trainbus.trainer.checkpoint.files import state_digest, state_json
from trainbus.trainer.checkpoint.staging import StagingBuffers, copy_all
from trainbus.trainer.checkpoint.writer import CheckpointWriter, RankFiles, write
from trainbus.trainer.divergence import check_finite
from trainbus.trainer.strategies.base import Strategy
from trainbus.trainer.survivor_state import SurvivorStore
from trainbus.trainer.training_state import (
    State,
    StateEntries,
    StateEntry,
    assemble,
    divide_entries,
    fetch_share,
)
from trainbus.trainer.world import World

Pairs = list[tuple[Tensor, Tensor]]
#: Seconds, at most, for which a rank that has failed goes on to write a checkpoint: its disk may be why it failed.
FINISH_S = 120.0


class CheckpointManager:
    """Decides when to save, and saves. Every rank makes the same calls, except for survivor state."""

    def __init__(
        self,
        folder: Path,
        strategy: Strategy,
        training: Training,
        *,
        world: World,
        journal: Journal,
        exactness: Exactness,
        survivors: SurvivorStore,
        history: FailureHistory | None = None,
        artifacts: Mapping[str, bytes] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._strategy, self._world, self._journal = folder, strategy, world, journal
        self._exactness, self._survivors, self._clock = exactness, survivors, clock
        self.schedule = CheckpointSchedule(training, clock(), machines=world.size, history=history)
        self._artifacts = artifacts
        self._staging = StagingBuffers(pinned=world.device.type == "cuda")
        self._writer = CheckpointWriter()
        cuda = world.device.type == "cuda"
        self._stream = torch.cuda.Stream(world.device) if cuda else None  # type: ignore[no-untyped-call]
        self._is_prepared = False
        #: Whether the disk had no room for the last checkpoint.
        self._is_full = False
        self._have_survivors_saved = False
        #: Set while nothing is being copied out of the live state.
        self._copied = threading.Event()
        self._copied.set()
        self._later: Pairs = []
        self._watched: list[tuple[str, Tensor, int]] = []
        self._held_s = 0.0
        #: The step whose state is whole: between the end of one optimizer step and the beginning of the next.
        self._progress: Progress | None = None
        # A strategy may still wait for gradients in its step: the state begins to change only here.
        strategy.optimizer.register_step_pre_hook(self._begin_update)

    def prepare(self, ema: Mapping[str, Tensor] | None) -> None:
        """Allocate the buffers of a checkpoint before one is due; call it after the first step."""
        if self._is_prepared:
            return
        self._is_prepared = True
        self._divide(self._strategy.state_entries(ema))
        for image in self._staging.images.values():
            image.touch()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer.is_writing

    def is_due_by_clock(self) -> bool:
        """Return whether a checkpoint is due by the clock of rank 0; not while one is being written."""
        return self._world.is_first and not self.is_writing and self.schedule.is_due_at_time(self._clock())

    def save(
        self,
        progress: Progress,
        *,
        epoch: int,
        ema: Mapping[str, Tensor] | None,
        metrics: Mapping[str, float],
        last: bool = False,
        final: bool = False,
        hurry: bool = False,
    ) -> None:
        """Start to write the state, and return to training. ``last``: no further step follows in this process.

        ``epoch`` is that of the last step, as everybody counts it; ``progress`` has the last sample's.

        With ``hurry`` (a grace period runs) it replaces the checkpoint that is being written, else it waits for that.
        """
        started = self._clock()
        if hurry:
            self._writer.cancel()
        else:
            self._writer.join()
        self._copied.wait()
        progress.about["parts"] = self._world.size
        entries = self._strategy.state_entries(ema)
        shares = self._divide(entries)
        content = self._content(entries, progress)
        self._start_copy(shares, at_once=last)
        place = {"step": progress.step, "epoch": epoch, "samples_consumed": progress.samples_consumed}
        folder = self._folder / f"step_{progress.step:08d}-rank_{self._world.rank}"
        trained, progress_step = self._trained_names(), progress.step

        def work(is_cancelled: Callable[[], bool]) -> None:
            self._finish_copy()
            check_finite({file: image.views for file, image in content.images.items()}, trained, progress_step)
            if not self._write(folder, content, is_cancelled, is_needed=last):
                return
            self._journal.append(
                CheckpointLine(
                    time=time.time(),
                    folder=str(folder),
                    **place,
                    metrics=dict(metrics),
                    final=final,
                    exactness=self._exactness,
                )
            )

        self._writer.submit(work)
        self.schedule.record_time(self._clock())
        self.schedule.record_cost(self._clock() - started + self._held_s)
        self._held_s = 0.0

    def _write(self, folder: Path, content: RankFiles, is_cancelled: Callable[[], bool], *, is_needed: bool) -> bool:
        """Write a rank's files; return False where the disk is full, and training goes on to the next checkpoint.

        Raises:
            OSError: the disk is full, and no other checkpoint follows that could do.
        """
        try:
            write(folder, content, is_cancelled)
        except OSError as error:
            if is_needed or error.errno not in DISK_FULL:
                raise
            if not self._is_full:
                print(
                    f"trainbus: no checkpoint of {folder.name} could be written: {error.strerror} in {folder.parent}. "
                    "Training goes on, and a failure costs the steps since the last checkpoint: free space on the node",
                    flush=True,
                )
            self._is_full = True
            return False
        self._is_full = False
        return True

    def wait_for_staging(self) -> None:
        """Wait until nothing reads the live state any more; call it before anything changes that state."""
        if not self._copied.is_set():
            started = self._clock()
            self._copied.wait()
            self._held_s += self._clock() - started
        self._survivors.wait_for_snapshot()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        for name, tensor, version in self._watched:
            if tensor._version != version:
                raise CheckpointError(
                    f"{name!r} was changed in the forward or backward pass while a checkpoint was taken of it: change "
                    "weights only in the optimizer, or register what changes as a buffer"
                )
        self._watched = []

    def record_step(self, progress: Progress, ema: Mapping[str, Tensor] | None) -> None:
        """Note that a step is complete: from here on its state may be saved. Take a snapshot if one is due."""
        self._progress = progress
        if self._world.size == 1 and self._survivors.is_snapshot_due(self._clock()):
            state = self._whole_state(ema)
            if state is not None:
                # The next forward pass changes buffers while the snapshot is read: it gets copies of them.
                trained = self._trained_names()
                state.model = {n: t if n in trained else t.clone() for n, t in state.model.items()}
                files = _files(state.tensors, 0)
                self._survivors.snapshot(files, _checkpoint_json(state, progress), trained)

    def save_survivor_state(self, ema: Mapping[str, Tensor] | None) -> int | None:
        """Save the last whole state in memory for the next generation; return its step, or None if there is none.

        It does not communicate: other ranks are gone or about to end.
        """
        if self._progress is None or not self._survivors.is_enabled:
            return None
        self._copied.wait()
        self._survivors.wait_for_snapshot()
        self._strategy.discard_unfinished_step()
        state = self._whole_state(ema)
        if state is None:
            return None
        saved = _checkpoint_json(state, self._progress)
        self._have_survivors_saved = self._survivors.save(_files(state.tensors, 0), saved, self._trained_names())
        return self._progress.step if self._have_survivors_saved else None

    def wait_for_writes(self) -> None:
        """Wait until everything is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        self._writer.join()

    def finish_writes(self) -> None:
        """Wait until what is being written is on disk, or has failed: training has failed already, and says why.

        Another attempt begins with it, unless the survivors of a lost rank have saved a later step in memory.
        """
        if not self._have_survivors_saved:
            self._writer.settle(FINISH_S)

    def _whole_state(self, ema: Mapping[str, Tensor] | None) -> State[Tensor] | None:
        """Return the whole state from this rank alone, or None where it has but a share of it."""
        if not self._strategy.holds_whole_state:
            return None
        return assemble(self._strategy.state_entries(ema), World())

    def _begin_update(self, *_: Any) -> None:
        self._progress = None

    def _divide(self, entries: StateEntries) -> list[list[StateEntry]]:
        """Return the share of each rank, and lay out the buffers for that of this one."""
        shares = divide_entries(entries.tensors, self._world.size)
        own = shares[self._world.rank]
        likes = {kind: {entry.name: entry.like for entry in own if entry.kind == kind} for kind in TENSOR_KINDS}
        self._staging.lay_out(_files(likes, self._world.rank))
        return shares

    def _content(self, entries: StateEntries, progress: Progress) -> RankFiles:
        saved = None
        if self._world.is_first:
            saved = state_json(progress, entries.groups, entries.values, entries.scaler)
            state_digest(saved)  # raises here, where the step is known, if JSON cannot hold the state
        return RankFiles(self._world.rank, self._staging.images, saved, self._artifacts)

    def _trained_names(self) -> set[str]:
        """Return the names of what only the optimizer changes."""
        parameters = self._strategy.model.named_parameters(remove_duplicate=False)
        return {name for name, parameter in parameters if parameter.requires_grad}

    def _start_copy(self, shares: Sequence[Sequence[StateEntry]], *, at_once: bool) -> None:
        """Fetch this rank's share, and copy what the next forward pass may change and what other ranks have sent.

        The thread copies the rest, unless ``at_once``. What was sent is freed when it is copied, so that this rank
        holds its share once.
        """
        trained = self._trained_names()
        later: Pairs = []
        self._watched = []
        for entry, tensor in fetch_share(shares, self._world.rank):
            target = self._staging.images[tensors_file(entry.kind, self._world.rank)].views[entry.name]
            if at_once or not entry.is_live or (entry.kind == "model" and entry.name not in trained):
                copy_all([(target, tensor)])
            else:
                later.append((target, tensor))
                self._watched.append((entry.name, tensor, tensor._version))
            del tensor
        self._copied.clear()
        self._later = later
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def _finish_copy(self) -> None:
        """Copy the rest, in the writer's thread; after that the live state may change."""
        try:
            context: AbstractContextManager[Any] = nullcontext()
            if self._stream is not None:
                context = torch.cuda.stream(self._stream)
            with context:
                copy_all(self._later)
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._later = []
            self._copied.set()


def _files(tensors: Mapping[TensorKind, Mapping[str, Tensor]], rank: int) -> dict[str, dict[str, Tensor]]:
    """Return tensors by the files that a rank saves them in."""
    return {tensors_file(kind, rank): dict(found) for kind, found in tensors.items() if found or kind != "ema"}


def _checkpoint_json(state: State[Tensor], progress: Progress) -> dict[str, Any]:
    """Return ``state.json`` of a state that this rank saves alone."""
    saved = state_json(progress, state.optimizer.groups, state.optimizer.values, state.scaler)
    saved["about"]["parts"] = 1
    return saved
