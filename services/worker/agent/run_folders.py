"""The folders of runs on this node: ``<data_dir>/runs/<run_id>/``, removed some time after the run has ended."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec

import structlog

from services.worker.generation.files import GenerationFiles, PlacementRecord
from services.worker.local_files import write_atomically

log = structlog.get_logger(__name__)

P = ParamSpec("P")
#: Marks the folder of a run that has ended.
ENDED_MARKER = "ended"


class RunFolders:
    """Finds the generations of earlier lives, and removes what is no longer needed."""

    def __init__(self, folder: Path, keep_ended: int) -> None:
        """``keep_ended``: how many folders of ended runs stay, for a look at their logs."""
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
        write_atomically(self._folder / run_id / ENDED_MARKER, "")

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

    def remove_ended(self, active: set[str]) -> None:
        """Remove all but the last few folders of ended runs; those of ``active`` runs stay."""
        markers = sorted(self._folder.glob(f"*/{ENDED_MARKER}"), key=lambda path: path.stat().st_mtime, reverse=True)
        for marker in markers[self._keep_ended :]:
            if marker.parent.name not in active:
                shutil.rmtree(marker.parent, ignore_errors=True)

    def in_background(self, removal: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a removal in a thread: it may be gigabytes, and there is a lease to renew."""
        task = asyncio.create_task(asyncio.to_thread(removal, *args, **kwargs))
        self._removals.add(task)
        task.add_done_callback(self._on_removed)

    def _on_removed(self, task: asyncio.Task[object]) -> None:
        self._removals.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("files that are no longer needed cannot be removed", error=repr(error))
