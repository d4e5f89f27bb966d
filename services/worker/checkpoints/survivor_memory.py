"""State that ranks leave behind in memory when they lose their peers: where it lies, and when it goes.

``<memory_dir>/<run_id>/**/g<generation>/step_<n>*``, on a tmpfs. The next ranks of the run that begin to train take it
up if it is newer than the last committed checkpoint. Whatever is not needed for that is removed: memory is dearer than
disk. What they wrote to disk for a checkpoint that was not committed is kept as well, see ``left.py``.
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

#: Linux's file system in memory; where there is none, nothing outlives a rank but its checkpoints.
TMPFS = Path("/dev/shm")
_GENERATION = re.compile(r"g(\d+)")
#: A state that is still being written has a name that hides it.
_FINISHED = re.compile(r"step_(\d+)-rank_\d+")
_UNFINISHED = re.compile(r"\.step_.*-rank_(\d+)")


def default_folder(node_id: str, data_dir: Path) -> Path | None:
    """A folder in memory that only this node's agent has; None on a machine without one.

    The data folder is part of the name, as two stacks of one user may both have a ``node-1``.
    """
    if not TMPFS.is_dir() or not os.access(TMPFS, os.W_OK):
        return None
    return TMPFS / f"trainbus-{os.getuid()}" / f"{node_id}-{zlib.crc32(os.fsencode(data_dir.resolve())):08x}"


class SurvivorMemory:
    """The folder, and what is kept in it. Without a folder every call does nothing."""

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    @property
    def is_available(self) -> bool:
        """Whether anything can be kept at all."""
        return self._folder is not None

    def prepare(self, run_id: str, generation: int) -> Path | None:
        """Where the ranks of a generation that is about to start leave and find state; None: nowhere.

        Only the newest is taken up, so what is older than that goes. It need not be of the generation just before:
        one whose nodes could not prepare it has left nothing.
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
            # State is the run's secret as much as its checkpoints are.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            log.warning("no state can be kept in memory", folder=str(folder), error=str(error))
            return None
        return folder

    def remove_before(self, run_id: str, generation: int) -> None:
        """The generation has a checkpoint in the store: what earlier ones left is not needed any more."""
        if self._folder is not None:
            for found, path in _generations(self._folder / run_id):
                if found < generation:
                    shutil.rmtree(path, ignore_errors=True)

    def remove_run(self, run_id: str) -> None:
        """The run is over, or goes on without this node."""
        if self._folder is not None:
            shutil.rmtree(self._folder / run_id, ignore_errors=True)

    def remove_others(self, runs: set[str]) -> None:
        """At the agent's start: what belongs to no run that it still knows is left from a life that ended badly."""
        if self._folder is None or not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            if path.name not in runs:
                shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """The node has left in good order: its ranks had their grace, and nobody comes back for what is here."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def evict(self, keep: str) -> None:
        """Hold to the limit: the runs that were here longest ago go first, ``keep`` never."""
        if self._folder is None or not self._folder.is_dir():
            return
        found = sorted((path.stat().st_mtime, path) for path in self._folder.iterdir())
        sizes = {path: size_bytes(path) for _, path in found}
        for _, path in found:
            if sum(sizes.values()) <= self._max_bytes:
                return
            if path.name != keep:
                log.info("state in memory makes room", run_id=path.name, size_bytes=sizes.pop(path))
                shutil.rmtree(path, ignore_errors=True)

    def newest_step(self, run_id: str, generation: int) -> int | None:
        """The newest step whose state a generation has left here, whole; None if there is none."""
        if self._folder is None:
            return None
        found = [path for number, path in _generations(self._folder / run_id) if number == generation]
        return max((step for path in found for step in _steps(path)), default=None)

    def is_being_written(self, run_id: str, generation: int, running: Collection[int]) -> bool:
        """Whether one of the ranks that are alive is leaving state behind at this moment."""
        if self._folder is None:
            return False
        return any(
            (writer := _UNFINISHED.match(each.name)) and int(writer[1]) in running
            for found, path in _generations(self._folder / run_id)
            if found == generation
            for each in path.iterdir()
        )


def size_bytes(folder: Path) -> int:
    """What the files below a folder hold."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # gone in the meantime
    return total


def _steps(folder: Path) -> list[int]:
    """The steps whose state one generation has left, whole."""
    return [int(state[1]) for each in folder.iterdir() if (state := _FINISHED.match(each.name))]


def _generations(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in list(folder.rglob("g*")):
        if (found := _GENERATION.fullmatch(path.name)) and path.is_dir():
            yield int(found[1]), path
