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

from contracts.ranks import HelloLine, Line, StopLine, json_line

log = structlog.get_logger(__name__)

#: Bytes that the path of a unix socket may have on every system.
PATH_MAX_BYTES = 100


def socket_path(folder: Path, name: str) -> Path:
    """A place for a socket: in ``folder``, or, where its path is too long for one, among the temporary files."""
    path = folder.resolve() / name
    if len(os.fsencode(path)) <= PATH_MAX_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:24]
    private = Path(tempfile.gettempdir()) / f"trainbus-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    return private / f"{digest}.sock"


class Control:
    """Listens to the ranks of one generation and tells them to stop."""

    def __init__(self, path: Path, generation: int, on_doorbell: Callable[[], None]) -> None:
        self.path, self._generation, self._ring = path, generation, on_doorbell
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        self._stop: StopLine | None = None
        self._server: asyncio.Server | None = None

    @property
    def connected(self) -> frozenset[int]:
        """The ranks that have said hello and are still there."""
        return frozenset(self._ranks)

    async def __aenter__(self) -> Control:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=2**16)
        self.path.chmod(0o600)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._ranks.values():
            writer.close()
        self.path.unlink(missing_ok=True)

    def stop(self, line: StopLine) -> None:
        """Tell every rank, also those that connect later."""
        self._stop = line
        for writer in self._ranks.values():
            self._send(writer, line)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: int | None = None
        try:
            while raw := await reader.readline():
                if raw.strip():
                    hello = HelloLine.model_validate_json(raw)
                    if hello.generation != self._generation:
                        self._send(
                            writer, StopLine(grace_s=0, reason="another generation was placed", checkpoint=False)
                        )
                        continue
                    rank = hello.rank
                    self._ranks[rank] = writer
                    if self._stop is not None:
                        self._send(writer, self._stop)
                self._ring()
        except (ValidationError, ValueError) as error:
            log.warning("a rank said what is no hello", error=str(error).splitlines()[0])
        except ConnectionError:
            pass
        finally:
            if rank is not None and self._ranks.get(rank) is writer:
                del self._ranks[rank]
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _send(self, writer: asyncio.StreamWriter, line: Line) -> None:
        if not writer.is_closing():
            writer.write(json_line(line))
