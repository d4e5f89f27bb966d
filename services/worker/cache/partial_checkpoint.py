"""A checkpoint of which a node has what its ranks read: large tensor files are laid out empty, and filled by pieces."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable
from itertools import accumulate
from pathlib import Path

import structlog

from contracts.disk_space import DISK_FULL
from contracts.events.checkpoint import CheckpointFile, Chunk
from contracts.ranks import RangeRequestLine
from services.kit.chunks import FileRange, read_verified
from services.kit.concurrency import gather_limited
from services.kit.messages import TransientError
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound
from services.worker.local_files import relative_path

log = structlog.get_logger(__name__)

#: Seconds after which a piece is fetched again when the store did not answer.
RETRY_S = 1.0
#: Writes a verified piece into an existing file, from an offset on.
FetchPiece = Callable[[Chunk, Path, int], Awaitable[None]]


class PartialFile:
    """A file of its whole length on this node, in which pieces are missing."""

    def __init__(self, file: CheckpointFile, path: Path, fetch: FetchPiece) -> None:
        self._file, self.path, self._fetch = file, path, fetch
        self._offsets = list(accumulate((chunk.size_bytes for chunk in file.chunks), initial=0))
        if self._offsets[-1] != file.size_bytes:
            raise ObjectCorrupted(f"the chunks of {file.path!r} do not add up to its {file.size_bytes} bytes")
        self._present: set[int] = set()
        self._locks: dict[int, asyncio.Lock] = {}
        self._may_have_pieces = path.exists()
        if not self._may_have_pieces:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as created:
                created.truncate(file.size_bytes)

    async def fill(self, start: int, stop: int) -> None:
        """Have the bytes from ``start`` to ``stop`` in the file.

        Raises:
            TransientError: the store is away, or the file cannot be written.
            ObjectNotFound, ObjectCorrupted: a piece is not in the store, or not what was committed.
        """
        if not 0 <= start < stop <= self._file.size_bytes:
            return
        first, last = bisect_right(self._offsets, start) - 1, bisect_right(self._offsets, stop - 1) - 1
        await gather_limited(map(self._fill_piece, range(first, last + 1)), limit=last + 1 - first)

    async def _fill_piece(self, number: int) -> None:
        if number in self._present:
            return
        async with self._locks.setdefault(number, asyncio.Lock()):
            if number not in self._present and not await self._has_piece(number):
                await self._fetch(self._file.chunks[number], self.path, self._offsets[number])
            self._present.add(number)
        self._locks.pop(number, None)

    async def _has_piece(self, number: int) -> bool:
        """Whether an earlier life of the agent has fetched a piece: it must not be written while a rank reads it."""
        if not self._may_have_pieces:
            return False
        chunk = self._file.chunks[number]
        here = FileRange(self.path, self._offsets[number], chunk.size_bytes)
        return await asyncio.to_thread(read_verified, here, chunk.sha256) is not None


class PartialCheckpoint:
    """The files of one checkpoint that are filled as the ranks of a generation read them."""

    def __init__(self, uri: str, folder: Path, files: Iterable[CheckpointFile], fetch: FetchPiece) -> None:
        """Lay the files out in ``folder``, unless an earlier life of the agent did.

        Raises:
            ObjectCorrupted, ValueError: the manifest is damaged.
        """
        self._uri = uri
        self._files = {file.path: PartialFile(file, folder / relative_path(file.path), fetch) for file in files}
        self._is_closed = False

    def close(self) -> None:
        """Fetch nothing any more: the generation is over."""
        self._is_closed = True

    async def fill_beginnings(self) -> None:
        """Have the first piece of each file, with its header; errors as in ``PartialFile.fill``."""
        files = self._files.values()
        await gather_limited((file.fill(0, 1) for file in files), limit=max(len(files), 1))

    async def request(self, line: RangeRequestLine) -> str:
        """Have a range that a rank waits for; return why it cannot be had, '' when it is there."""
        file = self._files.get(line.file)
        if file is None:
            return ""  # it was laid out whole
        while not self._is_closed:
            try:
                await file.fill(line.start, line.stop)
            except (TransientError, OSError) as error:
                if _is_about_full_disk(error):
                    return f"the checkpoint's part of this node cannot be written: {error}"
                # The rank waits: a retry is all that helps.
                log.warning("a part of a checkpoint cannot be fetched now, trying again", error=str(error))
                await asyncio.sleep(RETRY_S)
            except (ObjectNotFound, ObjectCorrupted) as error:
                return f"checkpoint {self._uri} is damaged: {error}. Choose another one"
            except Exception as error:  # a reply in any case: the rank waits for it
                log.exception("a part of a checkpoint cannot be fetched")
                return f"checkpoint {self._uri} cannot be fetched: {error!r}"
            else:
                return ""
        return "the generation is over"


def _is_about_full_disk(error: Exception) -> bool:
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in DISK_FULL
