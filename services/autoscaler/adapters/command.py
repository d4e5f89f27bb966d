"""Machines by a command of the operator's: a script around a cloud's own tool, a batch system, a shelf of machines.

It is called as ``COMMAND nodes POOL``, ``COMMAND start POOL COUNT`` and ``COMMAND stop POOL NODE_ID...``, with the pool
as JSON on its standard input. It prints JSON: for ``nodes`` a list of ``{"node_id": ..., "started_at": ...}`` (ISO
8601), for ``start`` a list of node ids. Any exit code but 0 means that it did not work out, for the reason it printed.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from contracts.scheduling import Pool
from services.autoscaler.adapters import AdapterError, labels_of
from services.autoscaler.core.decide import Machine


class CommandAdapter:
    """Asks a command for everything."""

    def __init__(self, command: str, timeout_s: float = 120.0) -> None:
        self._command, self._timeout_s = tuple(shlex.split(command)), timeout_s

    async def nodes(self, pool: Pool) -> list[Machine]:
        listed = await self._run_command(pool, "nodes", pool.name)
        try:
            return [Machine(each["node_id"], datetime.fromisoformat(each["started_at"])) for each in listed]
        except (KeyError, TypeError, ValueError) as error:
            raise AdapterError(
                f"{self._command[0]} nodes printed no list of node_id and started_at: {error!r}"
            ) from error

    async def start(self, pool: Pool, count: int) -> list[str]:
        return [str(each) for each in await self._run_command(pool, "start", pool.name, str(count))]

    async def stop(self, pool: Pool, node_ids: Sequence[str]) -> None:
        await self._run_command(pool, "stop", pool.name, *node_ids)

    async def _run_command(self, pool: Pool, *arguments: str) -> Any:
        about = json.dumps({**pool.model_dump(mode="json"), "labels": labels_of(pool)}).encode()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, *arguments,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise AdapterError(f"{self._command[0]} cannot be run: {error}") from error
        try:
            output, errors = await asyncio.wait_for(process.communicate(about), self._timeout_s)
        except TimeoutError as error:
            raise AdapterError(f"{self._command[0]} {arguments[0]} took longer than {self._timeout_s:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            said = (errors or output).decode(errors="replace").strip()[-500:]
            raise AdapterError(f"{self._command[0]} {arguments[0]} ended with {process.returncode}: {said}")
        try:
            return json.loads(output or b"[]")
        except ValueError as error:
            raise AdapterError(f"{self._command[0]} {arguments[0]} printed no JSON: {error}") from error
