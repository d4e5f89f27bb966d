"""The agent's end of the control socket in a run's folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog
from pydantic import ValidationError

from contracts.ranks import (
    RANK_LINE,
    HelloLine,
    Line,
    PeerLostLine,
    RangeReplyLine,
    RangeRequestLine,
    ShardPlanLine,
    ShardReplyLine,
    ShardRequestLine,
    StopLine,
    json_line,
)
from services.worker.cache.dataset_view import DatasetView
from services.worker.cache.late_input import InputUnavailableError, LateInput
from services.worker.cache.partial_checkpoint import PartialCheckpoint

log = structlog.get_logger(__name__)

#: Bytes of one line: a plan lists thousands of shards.
LINE_MAX_BYTES = 2**22
OTHER_GENERATION = "another generation was placed"


class ControlSocket:
    """Accepts the ranks of one generation: sends them stop lines, replies to their requests for shards and ranges."""

    def __init__(
        self,
        path: Path,
        generation: int,
        on_doorbell: Callable[[], None],
        dataset: LateInput[DatasetView] | None = None,
        checkpoint: LateInput[PartialCheckpoint] | None = None,
    ) -> None:
        self.path, self._generation, self._on_doorbell = path, generation, on_doorbell
        self._dataset: LateInput[DatasetView] = dataset or LateInput.of(None)
        self._checkpoint: LateInput[PartialCheckpoint] = checkpoint or LateInput.of(None)
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        self._stop: StopLine | None = None
        self._has_lost_peer = False
        self._server: asyncio.Server | None = None

    @property
    def connected(self) -> frozenset[int]:
        """The ranks that are connected now."""
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
        """Send a stop line to every rank, also to those that connect later."""
        self._stop = line
        for writer in self._ranks.values():
            self._send(writer, line)

    def send_peer_lost(self) -> None:
        """Inform every rank that another one is gone, also those that connect later."""
        if not self._has_lost_peer:
            self._has_lost_peer = True
            for writer in self._ranks.values():
                self._send(writer, PeerLostLine())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: int | None = None
        try:
            while raw := await reader.readline():
                if raw.strip():
                    match RANK_LINE.validate_json(raw):
                        case HelloLine() as hello:
                            rank = self._register(hello, writer)
                        case ShardPlanLine() as plan:
                            await self._apply_plan(plan)
                        case ShardRequestLine() as request:
                            problem = await self._fetch_shard(request)
                            self._send(writer, ShardReplyLine(shard=request.shard, problem=problem))
                        case RangeRequestLine() as request:
                            problem = await self._fill_range(request)
                            self._send(writer, RangeReplyLine(file=request.file, problem=problem))
                    continue
                self._on_doorbell()
        except (ValidationError, ValueError) as error:
            log.warning("a rank sent an invalid line", error=str(error).splitlines()[0])
        except ConnectionError:
            pass
        finally:
            if rank is not None and self._ranks.get(rank) is writer:
                del self._ranks[rank]
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _register(self, hello: HelloLine, writer: asyncio.StreamWriter) -> int | None:
        """Register a rank; return None if it belongs to another generation."""
        if hello.generation != self._generation:
            self._send(writer, StopLine(grace_s=0, reason=OTHER_GENERATION, checkpoint=False))
            return None
        self._ranks[hello.rank] = writer
        if self._has_lost_peer:
            self._send(writer, PeerLostLine())
        if self._stop is not None:
            self._send(writer, self._stop)
        self._on_doorbell()
        return hello.rank

    async def _apply_plan(self, plan: ShardPlanLine) -> None:
        with suppress(InputUnavailableError):  # the rank learns it when it needs a shard
            if (view := await self._dataset.get()) is not None:
                view.apply_plan(plan)

    async def _fetch_shard(self, request: ShardRequestLine) -> str:
        """Return '' when the shard that a rank requests is in its folder, else why it cannot be had."""
        if request.generation != self._generation:
            return OTHER_GENERATION
        try:
            view = await self._dataset.get()
        except InputUnavailableError as error:
            return str(error)
        return "the run has no dataset" if view is None else await view.request(request)

    async def _fill_range(self, request: RangeRequestLine) -> str:
        """Return '' when the bytes that a rank requests are in the file, else why they cannot be had."""
        if request.generation != self._generation:
            return OTHER_GENERATION
        try:
            checkpoint = await self._checkpoint.get()
        except InputUnavailableError as error:
            return str(error)
        return "no checkpoint is fetched in parts" if checkpoint is None else await checkpoint.request(request)

    def _send(self, writer: asyncio.StreamWriter, line: Line) -> None:
        if not writer.is_closing():
            writer.write(json_line(line))
