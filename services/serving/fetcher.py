"""Fetches models in a process of its own: what is parsed, hashed and unpacked there holds up no answer of the service.

Its process has a low priority, and another one is started where it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import structlog
from pydantic import SecretStr

from contracts.events.model import ModelPromoted
from services.kit.messages import TransientError
from services.serving.core.golden import GoldenSet
from services.serving.fetch_messages import MAX_LINE_BYTES, FetchReply, FetchRequest, Operation
from services.serving.golden_samples import read_golden
from services.serving.model_source import FetchedModel
from services.serving.settings import ServingSettings

log = structlog.get_logger(__name__)

#: Seconds until another process is started after one has ended; the last one repeats.
RESTART_DELAYS_S = (0.0, 0.5, 2.0, 10.0, 60.0)
#: Seconds that a request waits for a process that is starting.
START_PATIENCE_S = 60.0
#: Seconds that the process has to end by itself.
END_TIMEOUT_S = 5.0


class ModelFetcher:
    """The connection to the process that fetches."""

    def __init__(self, settings: ServingSettings) -> None:
        self._settings = settings
        self._stdin: asyncio.StreamWriter | None = None
        self._started = asyncio.Event()
        self._replies: dict[int, asyncio.Future[FetchReply]] = {}
        self._ids = itertools.count(1)
        #: Processes that ended in a row without a reply.
        self._failures = 0
        self.pid = 0

    async def run(self) -> None:
        """Keep a process running, until cancelled."""
        while True:
            try:
                await self._run_process()
            except OSError as error:
                log.warning("no process that fetches models starts", error=repr(error))
            delay_s = RESTART_DELAYS_S[min(self._failures, len(RESTART_DELAYS_S) - 1)]
            log.warning("the process that fetches models has ended", restart_in_s=delay_s)
            self._failures += 1
            await asyncio.sleep(delay_s)

    async def fetch(self, promotion: ModelPromoted) -> tuple[FetchedModel, GoldenSet]:
        """Return the model of a promotion, and its golden set.

        Raises:
            ModelFolderError: the log does not have it, or it is not what was committed.
            TransientError: the object store, the bus or the process does not answer.
            OSError: it cannot be written.
        """
        reply = await self._request("fetch", promotion=promotion)
        assert reply.fetched is not None
        if reply.golden is None:
            return reply.fetched, GoldenSet()
        golden = await asyncio.to_thread(read_golden, reply.golden)
        if golden is None:
            raise TransientError(f"{reply.golden} cannot be read any more")
        return reply.fetched, golden

    async def remove_others(self, model: str, kept: Collection[Path]) -> None:
        """Remove the folders of a model that are not in ``kept``.

        Raises:
            TransientError: the process has ended.
        """
        await self._request("remove_others", model=model, kept=tuple(kept))

    async def _request(self, op: Operation, **fields: Any) -> FetchReply:
        try:
            await asyncio.wait_for(self._started.wait(), START_PATIENCE_S)
        except TimeoutError as error:
            raise TransientError("the process that fetches models does not start; see the log") from error
        request = FetchRequest(id=next(self._ids), op=op, **fields)
        future: asyncio.Future[FetchReply] = asyncio.get_running_loop().create_future()
        self._replies[request.id] = future
        self._send(request)
        try:
            reply = await future
        except asyncio.CancelledError:
            self._send(FetchRequest(id=request.id, op="cancel"))
            raise
        finally:
            self._replies.pop(request.id, None)
        reply.check()
        return reply

    def _send(self, request: FetchRequest) -> None:
        if self._stdin is not None:
            self._stdin.write(request.model_dump_json().encode() + b"\n")

    async def _run_process(self) -> None:
        """Start a process and read its replies until it ends."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.serving.fetch_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            self.pid = process.pid
            process.stdin.write(encode_settings(self._settings))
            self._stdin = process.stdin
            self._started.set()
            while line := await process.stdout.readline():
                self._failures = 0
                self._handle(FetchReply.model_validate_json(line))
        finally:
            self._stdin, self.pid = None, 0
            self._started.clear()
            for future in self._replies.values():
                if not future.done():
                    future.set_exception(TransientError("the process that fetches models has ended"))
            await _end_process(process)

    def _handle(self, reply: FetchReply) -> None:
        if (future := self._replies.get(reply.id)) is not None and not future.done():
            future.set_result(reply)


async def _end_process(process: asyncio.subprocess.Process) -> None:
    """Close stdin, which ends the process; kill it if that takes too long."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def encode_settings(settings: ServingSettings) -> bytes:
    """Return the settings as a line. Secrets go through a pipe, where no other user sees them."""
    values = {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value
        for name, value in settings.model_dump().items()
    }
    return json.dumps(values, default=str).encode() + b"\n"
