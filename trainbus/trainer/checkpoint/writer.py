"""Writes staged checkpoints to disk, in one thread, while training goes on."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.manifest import ARTIFACTS_FOLDER
from trainbus.trainer.checkpoint.digest import digest_of
from trainbus.trainer.checkpoint.files import STATE, CheckpointError, digests_file, state_digest
from trainbus.trainer.checkpoint.staging import FileImage
from trainbus.trainer.divergence import TrainingDiverged

BLOCK_BYTES = 8 * 2**20
_START_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE


class WriteCancelled(Exception):
    """A newer checkpoint replaces the one that is being written."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """All of one rank's files."""

    rank: int
    images: Mapping[str, FileImage]
    #: ``state.json``; rank 0's alone.
    state: dict[str, Any] | None
    #: Content of the Task's artifacts by name; rank 0's alone.
    artifacts: Mapping[str, bytes] = field(default_factory=dict)


def write(folder: Path, content: RankFiles, is_cancelled: Callable[[], bool]) -> None:
    """Write a rank's folder under another name and rename it: a folder that exists is whole, and on disk.

    Calls ``is_cancelled`` between blocks.

    Raises:
        WriteCancelled: nothing is left of what was written.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _fill(temporary, content, is_cancelled)
        if is_cancelled():
            raise WriteCancelled
        # A folder that exists was never reported, or the rank would not write this step again.
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        _fsync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _fill(temporary: Path, content: RankFiles, is_cancelled: Callable[[], bool]) -> None:
    for name, image in content.images.items():
        _write_blocks(temporary / name, image.bytes, is_cancelled)
    # The disk writes while this hashes.
    (temporary / digests_file(content.rank)).write_text(
        json.dumps(digests(content, is_cancelled), sort_keys=True, indent=0)
    )
    if content.state is not None:
        (temporary / STATE).write_text(json.dumps(content.state, indent=1, sort_keys=True, allow_nan=False))
    for name, artifact in content.artifacts.items():
        path = temporary / ARTIFACTS_FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_blocks(path, memoryview(artifact), is_cancelled)
    for path in (*temporary.rglob("*"), temporary):
        _fsync(path)


def digests(content: RankFiles, is_cancelled: Callable[[], bool]) -> dict[str, str]:
    """Return the hash of each tensor, ``<kind>/<name>``, and of the ``state`` besides the tensors."""
    found = {} if content.state is None else {"state": state_digest(content.state)}
    for file, image in content.images.items():
        kind = file.rpartition("-")[0]
        for name, place in image.places.items():
            if is_cancelled():
                raise WriteCancelled
            found[f"{kind}/{name}"] = digest_of(place.dtype, place.shape, image.bytes[place.start : place.stop])
    return found


def _write_blocks(path: Path, data: memoryview, is_cancelled: Callable[[], bool]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        offset = 0
        while offset < len(data):
            if is_cancelled():
                raise WriteCancelled
            written = os.write(fd, data[offset : offset + BLOCK_BYTES])
            _start_writeback(fd, offset, written)
            offset += written
    finally:
        os.close(fd)


def _start_writeback(fd: int, offset: int, size_bytes: int) -> None:
    """Ask the kernel to begin to write the range to disk. Where it cannot, fsync does all of it later."""
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size_bytes), _START_WRITEBACK)


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class CheckpointWriter:
    """Does one piece of work at a time, in a thread. ``submit`` and ``join`` raise the error of the work before."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "trainbus-checkpoint")
        self._work: Future[None] | None = None
        self._cancelled = threading.Event()

    @property
    def is_writing(self) -> bool:
        return self._work is not None and not self._work.done()

    def submit(self, work: Callable[[Callable[[], bool]], None]) -> None:
        """Start ``work`` after the work before it; its argument is a function that tells whether it is cancelled."""
        self.join()
        self._work = self._executor.submit(work, self._cancelled.is_set)

    def cancel(self) -> None:
        """End the write that is under way and remove its files; a complete checkpoint stays."""
        self._cancelled.set()
        try:
            self.join()
        finally:
            self._cancelled.clear()

    def settle(self, timeout_s: float) -> None:
        """Wait until the work has ended, however it ends, or the time is over."""
        if self._work is not None:
            wait([self._work], timeout_s)

    def join(self) -> None:
        """Wait until everything is on disk."""
        work, self._work = self._work, None
        try:
            if work is not None:
                work.result()
        except WriteCancelled:
            pass
        except TrainingDiverged:
            raise
        except Exception as error:
            raise CheckpointError(f"the checkpoint could not be written: {error}") from error
