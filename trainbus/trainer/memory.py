"""Training state that outlives the ranks that made it, on a file system in memory.

``<memory_folder>/g<generation>/step_<n>-rank_<r>/`` holds a whole state in a checkpoint's format, by one rank
alone. It is renamed into place, so one that exists is whole; what the kernel holds, no SIGKILL of a
process takes away. The next generation's ranks compare what each finds and take up the newest; who lacks it gets it
from who has it. Nothing of this is needed: without it training goes on from the last committed checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainbus.trainer.checkpoint import CheckpointError, Loaded, load, tensor_digest
from trainbus.trainer.checkpoint.files import STATE
from trainbus.trainer.checkpoint.staging import Staging, copy_all
from trainbus.trainer.optimizer_state import OptimizerState
from trainbus.trainer.strategies.base import State
from trainbus.trainer.world import World

#: Snapshots take at most this share of the time.
SNAPSHOT_SHARE = 0.01
_STEP = re.compile(r"step_(\d+)-rank_\d+")

Files = Mapping[str, Mapping[str, Tensor]]


class Memory:
    """One rank's end of it. Without a folder every call does nothing."""

    def __init__(self, folder: Path | None = None, generation: int = 0, rank: int = 0) -> None:
        self._root, self._generation, self._rank = folder, generation, rank
        self._stagings: list[tuple[Path, Staging]] = []
        self._thread: threading.Thread | None = None
        self._next_s = 0.0

    @property
    def there(self) -> bool:
        return self._root is not None

    @property
    def _folder(self) -> Path:
        assert self._root is not None
        return self._root / f"g{self._generation}"

    def leave(self, files: Files, state: dict[str, Any]) -> None:
        """Copy a whole state to memory that stays when this process is gone."""
        self._copy(*self._room(files), files, state)

    def wants_snapshot(self, now_s: float) -> bool:
        """Whether the last snapshot was cheap enough, and long enough ago, for another."""
        return self.there and now_s >= self._next_s and (self._thread is None or not self._thread.is_alive())

    def snapshot(self, files: Files, state: dict[str, Any]) -> None:
        """Leave a state behind in case this process is killed, while the next forward and backward pass run."""
        hidden, staging = self._room(files)

        def work() -> None:
            started = time.monotonic()
            self._copy(hidden, staging, files, state)
            ended = time.monotonic()
            self._next_s = ended + (ended - started) / SNAPSHOT_SHARE

        self._thread = threading.Thread(target=work, name="trainbus-snapshot", daemon=True)
        self._thread.start()

    def copied(self) -> None:
        """Wait until no snapshot reads the live state any more."""
        if self._thread is not None:
            self._thread.join()

    def _room(self, files: Files) -> tuple[Path, Staging]:
        """Return a hidden folder with room for the files: the older of two, so that the newer stays whole."""
        hidden = self._folder / f".step_next-rank_{self._rank}.{len(self._stagings) % 2}"
        if len(self._stagings) == 2:
            place, staging = self._stagings.pop(0)
            if place.exists():
                place.rename(hidden)
        else:
            staging = Staging(folder=hidden)
        if not hidden.exists():
            hidden.mkdir(parents=True, mode=0o700)
            staging = Staging(folder=hidden)
        staging.lay_out(files)
        return hidden, staging

    def _copy(self, hidden: Path, staging: Staging, files: Files, state: dict[str, Any]) -> None:
        copy_all(staging.pairs(files))
        (hidden / STATE).write_text(json.dumps(state, allow_nan=False))
        place = self._folder / f"step_{state['step']:08d}-rank_{self._rank}"
        shutil.rmtree(place, ignore_errors=True)
        os.rename(hidden, place)
        self._stagings.append((place, staging))

    def newest(self, at_least: int) -> tuple[int, Path] | None:
        """Return (step, folder) of the newest state that the generation before left on this node, if new enough."""
        if self._root is None:
            return None
        before = self._root / f"g{self._generation - 1}"
        found = [
            (int(match[1]), path)
            for path in (before.iterdir() if before.is_dir() else ())
            if (match := _STEP.fullmatch(path.name)) and int(match[1]) >= at_least
        ]
        return max(found, default=None)

    def take_up(self, world: World, at_least: int, run_id: str | None) -> Loaded | None:
        """Agree with all ranks on the newest state there is, and return it; None if nobody has one.

        Every rank calls it. ``at_least`` is the step of the committed checkpoint.
        """
        loaded, mine = None, self.newest(at_least)
        if mine is not None:
            loaded = _load(mine[1], run_id)
        step = -1 if loaded is None else loaded.progress.step
        steps: list[int] = world.everyones(step)
        newest = max(steps)
        if newest < at_least or newest < 0:
            return None
        holder = steps.index(newest)
        if all(each == newest for each in steps):
            return loaded
        return _pass_on(world, holder, loaded if step == newest else None)


def _load(folder: Path, run_id: str | None) -> Loaded | None:
    try:
        loaded = load(folder)
    except CheckpointError as error:
        print(f"trainbus: the state in memory is left alone: {error}", flush=True)
        return None
    return loaded if loaded.progress.about.get("run_id") == run_id else None


def _pass_on(world: World, holder: int, loaded: Loaded | None) -> Loaded:
    """Return the holder's state on every rank: what is no tensor first, then one tensor after the other."""
    head: list[Any] = [None]
    if world.rank == holder:
        assert loaded is not None
        state = loaded.state
        table = {
            kind: {name: (tensor.dtype, tensor.shape, tensor_digest(tensor)) for name, tensor in tensors.items()}
            for kind, tensors in _kinds(state).items()
        }
        head = [(loaded.progress, state.optimizer.values, state.optimizer.groups, state.scaler, table)]
    dist.broadcast_object_list(head, src=holder, device=world.device)
    progress, values, groups, scaler, table = head[0]
    kinds: dict[str, dict[str, Tensor]] = {}
    for kind, tensors in table.items():
        kinds[kind] = {}
        for name, (dtype, shape, digest) in tensors.items():
            if world.rank == holder:
                assert loaded is not None
                tensor = _kinds(loaded.state)[kind][name].to(world.device)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=world.device)
            # As bytes: gloo knows fewer types than torch.
            if tensor.numel():
                dist.broadcast(tensor.contiguous().reshape(-1).view(torch.uint8), src=holder)
            kinds[kind][name] = tensor.cpu()
            if world.rank != holder and tensor_digest(tensor) != digest:
                raise RuntimeError(f"{kind}/{name} did not arrive from rank {holder} as it was sent")
    return Loaded(
        progress, State(kinds["model"], OptimizerState(kinds["optimizer"], values, groups), kinds["ema"], scaler)
    )


def _kinds(state: State) -> dict[str, dict[str, Tensor]]:
    return {"model": state.model, "optimizer": state.optimizer.tensors, "ema": state.ema}
