"""The lock on a node's data folder: two agents in it would run every rank twice."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DataDirLockedError(RuntimeError):
    """Another agent uses the data folder."""


class DataDirLock:
    """A file lock, held for as long as this process works in the folder."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir, self._path = data_dir, data_dir / "agent" / "lock"
        self._is_held = False

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Hold the lock in the block; a block inside of another one holds it, too.

        Raises:
            DataDirLockedError: another agent holds it.
        """
        if self._is_held:
            yield
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise DataDirLockedError(
                    f"another agent uses {self._data_dir}: give each node a TRAINBUS_DATA_DIR of its own"
                ) from error
            self._is_held = True
            yield
        finally:
            self._is_held = False
            os.close(handle)
