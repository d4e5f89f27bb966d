"""State that ranks leave on this node for the next generation of their run, which resumes the newest of it.

- In memory, ``<memory_dir>/<run_id>/**/g<generation>/step_<n>-rank_<r>/`` on a tmpfs: what ranks save when they lose
  their peers. Memory is scarcer than disk: state that cannot be resumed any more is removed at once.
- On disk, ``<run folder>/spilled/``, laid out alike: what memory had no room for.
- On disk, ``<run folder>/survivors/g<generation>/step_<n>-rank_<r>/``: checkpoints that were never committed. They are
  there even if the store was away when the ranks ended.

The newest state may be of any earlier generation: one that could not be prepared leaves none.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import structlog

from contracts.disk_space import measure_folder
from services.worker.local_files import suppress_full_disk

log = structlog.get_logger(__name__)

#: Linux's file system in memory; without one, only checkpoints survive their ranks.
TMPFS = Path("/dev/shm")
#: Folder of a run with what memory had no room for.
SPILLED = "spilled"
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
    """The folder in memory, what generations leave in it, and what they spill to disk. Each of both may be missing."""

    def __init__(self, folder: Path | None, max_bytes: int, runs_folder: Path | None = None) -> None:
        """``runs_folder``: with the folder of each run, in which its ranks save what memory has no room for."""
        self._folder, self.max_bytes, self._runs_folder = folder, max_bytes, runs_folder

    @property
    def is_available(self) -> bool:
        """Whether state can be saved at all."""
        return self._folder is not None or self._runs_folder is not None

    def spill_dir(self, run_id: str) -> Path | None:
        """Return where the ranks of a run save what memory has no room for; None: nowhere."""
        return None if self._runs_folder is None else self._runs_folder / run_id / SPILLED

    def prepare(self, run_id: str, generation: int) -> Path | None:
        """Return where in memory the ranks of a new generation find and save state; None: nowhere.

        Only the newest state is resumed, so what generations before it left is removed.
        """
        newest = max(
            (found for found, path in self._generations(run_id) if found < generation and _steps(path)), default=0
        )
        self.remove_before(run_id, newest)
        if self._folder is None:
            return None
        self._evict(keep=run_id)
        folder = self._folder / run_id
        try:
            # The state is as secret as the run's checkpoints.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            log.warning("no state can be saved in memory", folder=str(folder), error=str(error))
            return None
        return folder

    def remove_before(self, run_id: str, generation: int) -> None:
        """Remove what earlier generations left: this one has newer state, or a committed checkpoint."""
        for found, path in self._generations(run_id):
            if found < generation:
                shutil.rmtree(path, ignore_errors=True)

    def remove_run(self, run_id: str) -> None:
        """Remove all state of a run that has ended, or goes on without this node."""
        for folder in self._folders(run_id):
            shutil.rmtree(folder, ignore_errors=True)

    def remove_others(self, runs: set[str]) -> None:
        """Remove the state of all runs but these, which an earlier life of the agent left."""
        for path in self._run_folders():
            if path.name not in runs:
                shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Remove everything: the node has left, and its ranks had their grace."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def newest_step(self, run_id: str, generation: int) -> int | None:
        """Return the newest step whose state a generation has left here, whole; None without one."""
        steps = (step for found, path in self._generations(run_id) if found == generation for step in _steps(path))
        return max(steps, default=None)

    def is_being_written(self, run_id: str, generation: int, running: Collection[int]) -> bool:
        """Whether a rank that still runs is saving its state."""
        return any(
            (writer := _UNFINISHED.match(each.name)) and int(writer[1]) in running
            for found, path in self._generations(run_id)
            if found == generation
            for each in path.iterdir()
        )

    def _evict(self, keep: str) -> None:
        """Remove the state of runs, oldest first, until the limit holds; that of ``keep`` stays."""
        found = sorted((path.stat().st_mtime, path) for path in self._run_folders())
        sizes = {path: measure_folder(path) for _, path in found}
        for _, path in found:
            if sum(sizes.values()) <= self.max_bytes:
                return
            if path.name != keep:
                log.info("state in memory evicted", run_id=path.name, size_bytes=sizes.pop(path))
                shutil.rmtree(path, ignore_errors=True)

    def _run_folders(self) -> list[Path]:
        if self._folder is None or not self._folder.is_dir():
            return []
        return [path for path in self._folder.iterdir() if path.is_dir()]

    def _folders(self, run_id: str) -> list[Path]:
        in_memory = None if self._folder is None else self._folder / run_id
        return [folder for folder in (in_memory, self.spill_dir(run_id)) if folder is not None]

    def _generations(self, run_id: str) -> Iterator[tuple[int, Path]]:
        for path in [path for folder in self._folders(run_id) for path in folder.rglob("g*")]:
            if (found := _GENERATION.fullmatch(path.name)) and path.is_dir():
                yield int(found[1]), path


def _steps(folder: Path) -> list[int]:
    """Return the steps whose state one generation has left, whole."""
    return [int(state[1]) for each in folder.iterdir() if (state := _FINISHED.match(each.name))]


def survivor_dir(run_folder: Path) -> Path:
    """Return the folder on disk in which ranks find the uncommitted checkpoints of earlier generations."""
    return run_folder / "survivors"


def save_survivor_checkpoints(generation_folder: Path, may_commit: Callable[[int], bool]) -> None:
    """Keep what the ranks of a generation that has ended wrote of steps that ``may_commit``. Repeatable."""
    written = generation_folder / "checkpoints"
    if not written.is_dir():
        return
    for path in written.iterdir():
        found = _FINISHED.fullmatch(path.name)
        if found is None or not may_commit(int(found[1])):
            shutil.rmtree(path, ignore_errors=True)
    target = survivor_dir(generation_folder.parent) / generation_folder.name
    with suppress_full_disk():
        target.parent.mkdir(exist_ok=True)
        if any(written.iterdir()):
            os.rename(written, target)


def remove_survivor_checkpoints(run_folder: Path, before: int | None = None) -> None:
    """Remove what generations ``before`` that one left on disk; all of it without one."""
    folders = [folder for folder in (survivor_dir(run_folder), run_folder / SPILLED) if folder.is_dir()]
    for path in [path for folder in folders for path in folder.iterdir()]:
        if path.name.startswith("g") and (before is None or int(path.name[1:]) < before):
            # Ranks that list the folder meanwhile see all of it or nothing.
            hidden = path.with_name(f".{uuid.uuid4().hex}")
            os.rename(path, hidden)
            shutil.rmtree(hidden, ignore_errors=True)
