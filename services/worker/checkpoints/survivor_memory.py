"""State that ranks save in memory when they lose their peers, for the next generation of the run.

``<memory_dir>/<run_id>/**/g<generation>/step_<n>*``, on a tmpfs. The next generation resumes it if it is newer than the
last committed checkpoint. Other state is removed: memory is scarcer than disk. Checkpoints on disk that were never
committed are in ``survivor_checkpoints.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

#: Linux's file system in memory; without one, only checkpoints survive their ranks.
TMPFS = Path("/dev/shm")
_GENERATION = re.compile(r"g(\d+)")
#: A state that is being written has a hidden name.
_FINISHED = re.compile(r"step_(\d+)-rank_\d+")
_UNFINISHED = re.compile(r"\.step_.*-rank_(\d+)")


def default_folder(node_id: str, data_dir: Path) -> Path | None:
    """Return a folder in memory of this node alone; None on a machine without a tmpfs.

    The data folder is part of the name: two stacks of one user may both have a ``node-1``.
    """
    if not TMPFS.is_dir() or not os.access(TMPFS, os.W_OK):
        return None
    return TMPFS / f"trainbus-{os.getuid()}" / f"{node_id}-{zlib.crc32(os.fsencode(data_dir.resolve())):08x}"


class SurvivorMemory:
    """The folder, and what generations leave in it. Without a folder every call does nothing."""

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    @property
    def is_available(self) -> bool:
        """Whether state can be saved at all."""
        return self._folder is not None

    def prepare(self, run_id: str, generation: int) -> Path | None:
        """Return where the ranks of a new generation find and save state; None: nowhere.

        Only the newest state is resumed, so older state is removed. The newest need not be of the generation just
        before: a generation that could not be prepared has left none.
        """
        if self._folder is None:
            return None
        folder = self._folder / run_id
        before = [(found, path) for found, path in _generations(folder) if found < generation]
        whole = max((found for found, path in before if _steps(path)), default=0)
        for found, path in before:
            if found < whole:
                shutil.rmtree(path, ignore_errors=True)
        self.evict(keep=run_id)
        try:
            # The state is as secret as the run's checkpoints.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            log.warning("no state can be saved in memory", folder=str(folder), error=str(error))
            return None
        return folder

    def remove_before(self, run_id: str, generation: int) -> None:
        """Remove what earlier generations left: this one has a committed checkpoint."""
        if self._folder is not None:
            for found, path in _generations(self._folder / run_id):
                if found < generation:
                    shutil.rmtree(path, ignore_errors=True)

    def remove_run(self, run_id: str) -> None:
        """Remove all state of a run that has ended, or goes on without this node."""
        if self._folder is not None:
            shutil.rmtree(self._folder / run_id, ignore_errors=True)

    def remove_others(self, runs: set[str]) -> None:
        """Remove the state of all runs but these, which an earlier life of the agent left."""
        if self._folder is None or not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            if path.name not in runs:
                shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Remove everything: the node has left, and its ranks had their grace."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def evict(self, keep: str) -> None:
        """Remove the state of runs, oldest first, until the limit holds; that of ``keep`` stays."""
        if self._folder is None or not self._folder.is_dir():
            return
        found = sorted((path.stat().st_mtime, path) for path in self._folder.iterdir())
        sizes = {path: size_bytes(path) for _, path in found}
        for _, path in found:
            if sum(sizes.values()) <= self._max_bytes:
                return
            if path.name != keep:
                log.info("state in memory evicted", run_id=path.name, size_bytes=sizes.pop(path))
                shutil.rmtree(path, ignore_errors=True)

    def newest_step(self, run_id: str, generation: int) -> int | None:
        """Return the newest step whose state a generation has left here, whole; None without one."""
        if self._folder is None:
            return None
        found = [path for number, path in _generations(self._folder / run_id) if number == generation]
        return max((step for path in found for step in _steps(path)), default=None)

    def is_being_written(self, run_id: str, generation: int, running: Collection[int]) -> bool:
        """Whether a rank that still runs is saving its state."""
        if self._folder is None:
            return False
        return any(
            (writer := _UNFINISHED.match(each.name)) and int(writer[1]) in running
            for found, path in _generations(self._folder / run_id)
            if found == generation
            for each in path.iterdir()
        )


def size_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # removed meanwhile
    return total


def _steps(folder: Path) -> list[int]:
    """Return the steps whose state one generation has left, whole."""
    return [int(state[1]) for each in folder.iterdir() if (state := _FINISHED.match(each.name))]


def _generations(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in list(folder.rglob("g*")):
        if (found := _GENERATION.fullmatch(path.name)) and path.is_dir():
            yield int(found[1]), path
