"""Saves survivor state: training state that outlives its ranks, on a file system in memory.

``<memory_folder>/g<generation>/step_<n>-rank_<r>/`` holds a whole state in a checkpoint's format, written by one rank.
It is renamed into place, so a folder that exists is whole; the kernel holds it, so a SIGKILL does not remove it. The
ranks of the next generation load it (``survivor_state.py``). Without it training resumes from the last committed
checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainbus.trainer.checkpoint.files import STATE
from trainbus.trainer.checkpoint.staging import StagingBuffers, copy_all
from trainbus.trainer.survivor_state import LocalParts, StateKey, find_local_parts

#: Snapshots take at most this share of the time.
SNAPSHOT_SHARE = 0.01

Files = Mapping[str, Mapping[str, Tensor]]


class SurvivorStore:
    """Where one rank saves its state and finds that of others. Without a folder nothing is saved."""

    def __init__(
        self, folder: Path | None = None, generation: int = 0, rank: int = 0, disk_folder: Path | None = None
    ) -> None:
        """``disk_folder``: where the node keeps the uncommitted checkpoints of earlier generations."""
        self._root, self._generation, self._rank, self._disk = folder, generation, rank, disk_folder
        self._stagings: list[tuple[Path, StagingBuffers]] = []
        self._thread: threading.Thread | None = None
        self._next_s = 0.0

    @property
    def is_enabled(self) -> bool:
        return self._root is not None

    def find_parts(self, at_least: int, run_id: str | None) -> dict[StateKey, LocalParts]:
        """Return the states of earlier generations on this node, from step ``at_least`` on."""
        return find_local_parts((self._disk, self._root), self._generation, at_least, run_id)

    @property
    def _folder(self) -> Path:
        assert self._root is not None
        return self._root / f"g{self._generation}"

    def save(self, files: Files, state: dict[str, Any]) -> None:
        """Copy a whole state to memory that outlives this process."""
        self._copy(*self._allocate(files), files, state)

    def is_snapshot_due(self, now_s: float) -> bool:
        """Return whether the last snapshot was cheap enough, and long enough ago, for another."""
        return self.is_enabled and now_s >= self._next_s and (self._thread is None or not self._thread.is_alive())

    def snapshot(self, files: Files, state: dict[str, Any]) -> None:
        """Save a state in case this process is killed, while the next forward and backward pass run."""
        hidden, staging = self._allocate(files)

        def work() -> None:
            started = time.monotonic()
            self._copy(hidden, staging, files, state)
            ended = time.monotonic()
            self._next_s = ended + (ended - started) / SNAPSHOT_SHARE

        self._thread = threading.Thread(target=work, name="trainbus-snapshot", daemon=True)
        self._thread.start()

    def wait_for_snapshot(self) -> None:
        """Wait until no snapshot reads the live state any more."""
        if self._thread is not None:
            self._thread.join()

    def _allocate(self, files: Files) -> tuple[Path, StagingBuffers]:
        """Return a hidden folder of the files' size: the older of two, so that the newer stays whole."""
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
        staging.lay_out(files)
        return hidden, staging

    def _copy(self, hidden: Path, staging: StagingBuffers, files: Files, state: dict[str, Any]) -> None:
        copy_all(staging.pairs(files))
        (hidden / STATE).write_text(json.dumps(state, allow_nan=False))
        place = self._folder / f"step_{state['step']:08d}-rank_{self._rank}"
        shutil.rmtree(place, ignore_errors=True)
        os.rename(hidden, place)
        self._stagings.append((place, staging))
