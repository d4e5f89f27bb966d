"""The agent's data folder: its lock, the folders of runs in it, and the files of each generation.

``<data_dir>/runs/<run_id>/g<generation>/`` belongs to one generation. What must survive the agent is written there
before it is acted on.
"""

from __future__ import annotations

import asyncio
import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec

import structlog
from pydantic import BaseModel, ConfigDict

from contracts.events.run import RunPlaced
from services.kit.socket_files import socket_path
from services.worker.launch.rank_guard import SIGNALS_NAME, STOP_NAME
from services.worker.local_files import hold_space, release_space, write_atomically, write_if_space

log = structlog.get_logger(__name__)

P = ParamSpec("P")
#: Marks the folder of a run that has ended.
ENDED_MARKER = "ended"
#: What is uploaded, or can be fetched again.
REFETCHABLE = ("code", "resume", "init", "checkpoints", "dataset", "data", "outputs", "trees", "kept", "peers")


class DataDirLockedError(RuntimeError):
    """Another agent uses the data folder."""


class DataDirLock:
    """A file lock, held for as long as this process works in the folder: two agents would run every rank twice."""

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
        with self._path.open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise DataDirLockedError(
                    f"another agent uses {self._data_dir}: give each node a TRAINBUS_DATA_DIR of its own"
                ) from error
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False


class PlacementRecord(BaseModel):
    """``placement.json``: the fact, its place in the stream, and the envelope fields that its reports repeat."""

    model_config = ConfigDict(frozen=True)

    placed: RunPlaced
    sequence: int
    correlation_id: str = ""
    causation_id: str = ""
    traceparent: str = ""


class GenerationFiles:
    """``<data_dir>/runs/<run_id>/g<generation>/``.

    ``placement.json`` holds the placement, ``launch.json`` the ranks' input, ``processes.json`` the processes,
    ``follow.json`` how far their files are read, ``stop.json`` the request to stop, ``report.json`` how they ended.
    ``stop_seen`` exists once a script has seen that it is to stop, ``done.json`` once the report is published.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_folder = folder, folder.parent
        self.placement = folder / "placement.json"
        self.launch = folder / "launch.json"
        self.report = folder / "report.json"
        self.done = folder / "done.json"

    def hold_space(self) -> None:
        """Hold disk space for the files that say how the generation ends.

        Raises:
            OSError: there is none.
        """
        for path in (self.folder / STOP_NAME, self.folder / SIGNALS_NAME, self.report, self.done):
            hold_space(path)
        hold_space(self.run_folder / ENDED_MARKER)

    @property
    def is_launched(self) -> bool:
        """Whether ranks may have been started."""
        return self.launch.exists()

    @property
    def is_untouched(self) -> bool:
        """Whether no agent has worked on the generation yet."""
        return not self.launch.exists() and not self.report.exists()

    @property
    def is_done(self) -> bool:
        """Whether the generation is reported or dropped."""
        return self.done.exists()

    @property
    def socket(self) -> Path:
        """Path of the control socket, which all generations of a run share."""
        return socket_path(self.run_folder, "agent.sock")

    def write_placement(self, record: PlacementRecord) -> None:
        """Make the placement durable."""
        if not self.placement.exists():
            write_atomically(self.placement, record.model_dump_json())

    def remove_refetchable(self) -> None:
        """Remove what is uploaded or can be fetched again; journals, logs and reports stay."""
        for name in REFETCHABLE:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for ring in self.folder.glob("*.ring"):
            ring.unlink(missing_ok=True)
        release_space(self.folder)


class RunFolders:
    """``<data_dir>/runs/``: finds the generations of earlier lives, and removes what is no longer needed."""

    def __init__(self, folder: Path, keep_ended: int) -> None:
        """``keep_ended``: how many folders of ended runs stay, for their logs."""
        self._folder, self._keep_ended = folder, keep_ended
        self._removals: set[asyncio.Task[object]] = set()

    def run_folder(self, run_id: str) -> Path:
        """Return the folder of a run."""
        return self._folder / run_id

    def generation(self, run_id: str, generation: int) -> GenerationFiles:
        """Return the files of one generation."""
        return GenerationFiles(self._folder / run_id / f"g{generation}")

    def has_ended(self, run_id: str) -> bool:
        """Whether the run is known to have ended."""
        return (self._folder / run_id / ENDED_MARKER).exists()

    def mark_ended(self, run_id: str) -> None:
        """Note that the run has ended."""
        write_if_space(self._folder / run_id / ENDED_MARKER, "")

    def placements(self) -> Iterator[tuple[PlacementRecord, GenerationFiles]]:
        """Read the placements of earlier lives. One that cannot be read is set aside."""
        for path in sorted(self._folder.glob("*/g*/placement.json")):
            try:
                yield PlacementRecord.model_validate_json(path.read_bytes()), GenerationFiles(path.parent)
            except ValueError as error:
                # Torn by a full disk, or written by another version. ``joined`` does not name it, so that the
                # scheduler takes it for lost.
                log.error("a placement cannot be read and is set aside", path=str(path), error=str(error))
                path.rename(path.with_name("placement.unreadable.json"))

    def launched(self) -> list[Path]:
        """Return the folders of generations whose ranks may run."""
        folders = (path.parent for path in self._folder.glob("*/g*/launch.json"))
        return [folder for folder in folders if not GenerationFiles(folder).is_done]

    def remove_ended(self, active: set[str]) -> None:
        """Remove all but the last few folders of ended runs; those of ``active`` runs stay."""
        markers = sorted(self._folder.glob(f"*/{ENDED_MARKER}"), key=lambda path: path.stat().st_mtime, reverse=True)
        for marker in markers[self._keep_ended :]:
            if marker.parent.name not in active:
                shutil.rmtree(marker.parent, ignore_errors=True)

    def remove_in_background(self, removal: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a removal in a thread: it may be gigabytes, and there is a lease to renew."""
        task = asyncio.create_task(asyncio.to_thread(removal, *args, **kwargs))
        self._removals.add(task)
        task.add_done_callback(self._on_removed)

    def _on_removed(self, task: asyncio.Task[object]) -> None:
        self._removals.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("files that are no longer needed cannot be removed", error=repr(error))
