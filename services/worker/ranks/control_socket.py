"""The agent's end of the socket in a run's folder."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog
from pydantic import ValidationError

from contracts.ranks import (
    RANK_LINE,
    HelloLine,
    Line,
    ShardPlanLine,
    ShardReplyLine,
    ShardRequestLine,
    StopLine,
    json_line,
)
from services.worker.cache.dataset_view import DatasetView

log = structlog.get_logger(__name__)

#: Bytes that the path of a unix socket may have on every system.
PATH_MAX_BYTES = 100
#: Of one line: a plan tells of thousands of shards.
LINE_MAX_BYTES = 2**22


def socket_path(folder: Path, name: str) -> Path:
    """A place for a socket: in ``folder``, or, where its path is too long for one, among the temporary files."""
    path = folder.resolve() / name
    if len(os.fsencode(path)) <= PATH_MAX_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:24]
    private = Path(tempfile.gettempdir()) / f"trainbus-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    return private / f"{digest}.sock"


class ControlSocket:
    """Listens to the ranks of one generation, tells them to stop, and when a shard they want is there."""

    def __init__(
        self, path: Path, generation: int, on_doorbell: Callable[[], None], reading: DatasetView | None = None
    ) -> None:
        self.path, self._generation, self._ring, self._view = path, generation, on_doorbell, reading
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        self._stop: StopLine | None = None
        self._server: asyncio.Server | None = None

    @property
    def connected(self) -> frozenset[int]:
        """The ranks that have said hello and are still there."""
        return frozenset(self._ranks)

    async def __aenter__(self) -> ControlSocket:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=LINE_MAX_BYTES)
        self.path.chmod(0o600)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._ranks.values():
            writer.close()
        self.path.unlink(missing_ok=True)

    def send_stop(self, line: StopLine) -> None:
        """Tell every rank, also those that connect later."""
        self._stop = line
        for writer in self._ranks.values():
            self._send(writer, line)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: int | None = None
        try:
            while raw := await reader.readline():
                if raw.strip():
                    match RANK_LINE.validate_json(raw):
                        case HelloLine() as hello:
                            rank = self._greet(hello, writer)
                        case ShardPlanLine() as plan if self._view is not None:
                            self._view.apply_plan(plan)
                        case ShardRequestLine() as request:
                            await self._reply_when_ready(request, writer)
                    continue
                self._ring()
        except (ValidationError, ValueError) as error:
            log.warning("a rank said what nobody understands", error=str(error).splitlines()[0])
        except ConnectionError:
            pass
        finally:
            if rank is not None and self._ranks.get(rank) is writer:
                del self._ranks[rank]
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _greet(self, hello: HelloLine, writer: asyncio.StreamWriter) -> int | None:
        """Take note of a rank; None if it is one of another generation."""
        if hello.generation != self._generation:
            self._send(writer, StopLine(grace_s=0, reason="another generation was placed", checkpoint=False))
            return None
        self._ranks[hello.rank] = writer
        if self._stop is not None:
            self._send(writer, self._stop)
        self._ring()
        return hello.rank

    async def _reply_when_ready(self, request: ShardRequestLine, writer: asyncio.StreamWriter) -> None:
        """Answer a rank when the shard that it waits for is in its folder, or cannot be had."""
        if request.generation != self._generation:
            problem = "another generation was placed"
        elif self._view is None:
            problem = "the agent could not take up the run's dataset again: see its log"
        else:
            problem = await self._view.request(request)
        self._send(writer, ShardReplyLine(shard=request.shard, problem=problem))

    def _send(self, writer: asyncio.StreamWriter, line: Line) -> None:
        if not writer.is_closing():
            writer.write(json_line(line))
