"""Which chunks of checkpoints are on this node: parts of the files that the cache has."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path

import structlog

from contracts.events.checkpoint import CheckpointFile
from services.worker.local_files import write_atomically

log = structlog.get_logger(__name__)


class ChunkIndex:
    """Chunk -> (file, offset, bytes), of files with several chunks. Uploads read it from threads.

    ``<ab>/<sha256 of the file>.json`` lists the file's chunks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, tuple[str, int, int]] | None = None
        self._lock = threading.Lock()

    def find(self, sha256: str) -> tuple[str, int, int] | None:
        """Return the file that has a chunk, with the chunk's offset and bytes."""
        with self._lock:
            return self._load_index().get(sha256)

    def add(self, file: CheckpointFile) -> None:
        """Note the chunks of a file that is in the cache."""
        if len(file.chunks) == 1:
            return
        chunks = [(chunk.sha256, chunk.size_bytes) for chunk in file.chunks]
        write_atomically(self._path(file.sha256), json.dumps(chunks))
        with self._lock:
            _add_chunks(self._load_index(), file.sha256, chunks)

    def remove(self, sha256: str) -> None:
        """Forget the chunks of a file that was evicted."""
        path = self._path(sha256)
        if path.exists():
            path.unlink(missing_ok=True)
            with self._lock:
                # Read the folder again: of several files with the same chunk only one was known.
                self._places = None

    def _load_index(self) -> dict[str, tuple[str, int, int]]:
        """Return the index; what an earlier life of the agent wrote is read on first use."""
        if self._places is None:
            self._places = {}
            for path in sorted(self.folder.glob("*/*.json")):
                try:
                    _add_chunks(self._places, path.stem, json.loads(path.read_bytes()))
                except (ValueError, TypeError, OSError) as error:
                    log.warning("the chunks of a cached file cannot be read", path=str(path), error=str(error))
        return self._places

    def _path(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / f"{sha256}.json"


def _add_chunks(places: dict[str, tuple[str, int, int]], file: str, chunks: Iterable[tuple[str, int]]) -> None:
    offset = 0
    for sha256, size_bytes in chunks:
        places[sha256] = (file, offset, size_bytes)
        offset += size_bytes
