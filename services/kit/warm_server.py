"""The warm server: a process that has imported torch, and forks ranks in milliseconds.

Processes start cold while it is starting or broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import structlog

log = structlog.get_logger(__name__)

REPLY_TIMEOUT_S = 5.0
CONNECT_RETRY_S = 0.1
#: Seconds until it is restarted after it has ended; the last one repeats.
RESTART_DELAYS_S = (0.5, 2.0, 10.0, 60.0)
END_TIMEOUT_S = 3.0


class WarmServerError(Exception):
    """The warm server did not fork."""


class WarmServerTimeout(WarmServerError):
    """The warm server did not reply: it may have forked."""


class WarmServer:
    """The connection to one warm server, which is restarted when it ends."""

    def __init__(self, socket: Path, log_file: Path, environment: Mapping[str, str]) -> None:
        self._socket, self._log_file, self.environment = socket, log_file, dict(environment)
        self._pid: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._replies: dict[str, asyncio.Future[dict[str, Any]]] = {}
        #: By pid: called when a fork has ended and its exit code is written.
        self._listeners: dict[int, Callable[[], None]] = {}
        self._ids = itertools.count()
        self._closing = False
        self._is_starting = False
        self._ready = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether it can fork now."""
        return self._writer is not None and self._pid is not None

    @property
    def pid(self) -> int | None:
        return self._pid

    def expect(self) -> None:
        """Make ``wait_ready`` wait for a server that is about to start."""
        self._is_starting = True

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until a server that is starting can fork; return whether it can."""
        if not self.is_ready and self._is_starting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), timeout_s)
        return self.is_ready

    async def run(self) -> None:
        """Keep the process running and connected until cancelled; use one that an earlier agent started."""
        for attempt in itertools.count():
            if attempt or not await self._connect():
                self._spawn()
                await self._connect_when_up()
            if self._closing:
                return
            delay_s = RESTART_DELAYS_S[min(attempt, len(RESTART_DELAYS_S) - 1)]
            self._is_starting = False
            log.warning("the warm server ended, processes start cold until it runs again", delay_s=delay_s)
            await asyncio.sleep(delay_s)

    async def fork(
        self,
        environment: Mapping[str, str],
        cwd: Path,
        log_file: Path,
        exit_file: Path,
        module: str = "trainbus.ranks.rank",
        start_before: float | None = None,
    ) -> int:
        """Fork a process that runs ``module``, a rank by default, and return its pid.

        ``start_before``: the server refuses after that time of the boot clock.
        """
        if self._writer is None:
            raise WarmServerError("the warm server is not connected")
        name = f"f{next(self._ids)}"
        request = {
            "op": "fork",
            "id": name,
            "env": dict(environment),
            "cwd": str(cwd),
            "log": str(log_file),
            "exit_file": str(exit_file),
            "module": module,
            "start_before": start_before,
        }
        future = self._replies[name] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(json.dumps(request).encode() + b"\n")
            reply = await asyncio.wait_for(future, REPLY_TIMEOUT_S)
        except TimeoutError as error:
            raise WarmServerTimeout(f"no reply within {REPLY_TIMEOUT_S:.0f} s") from error
        finally:
            self._replies.pop(name, None)
        if reply.get("op") != "forked":
            raise WarmServerError(str(reply.get("error", reply)))
        return int(reply["pid"])

    def on_exit(self, pid: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` when a fork has ended; return what stops that."""
        self._listeners[pid] = callback

        def stop() -> None:
            self._listeners.pop(pid, None)

        return stop

    async def close(self) -> None:
        """End the process."""
        self._closing = True
        if self._writer is not None:
            self._writer.close()
        pid = self._pid or (self._child.pid if self._child is not None else None)
        if pid is not None:
            await asyncio.to_thread(_end_process, pid)
        if self._child is not None:
            await asyncio.to_thread(self._child.wait)
        self._socket.unlink(missing_ok=True)

    def _spawn(self) -> None:
        if self._closing or (self._child is not None and self._child.poll() is None):
            return
        self._socket.unlink(missing_ok=True)
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "trainbus.ranks.warm", "--socket", str(self._socket)],
                # Forks have this process's memory, so it must never have held a secret.
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def _connect_when_up(self) -> None:
        while not self._closing and self._child is not None and self._child.poll() is None:
            if await self._connect():
                return
            await asyncio.sleep(CONNECT_RETRY_S)

    async def _connect(self) -> bool:
        """Connect and read replies until the connection ends; return whether there was one."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket, limit=2**20)
        except OSError:
            return False
        try:
            writer.write(b'{"op":"ping"}\n')
            self._writer = writer
            while raw := await reader.readline():
                self._handle_reply(json.loads(raw))
        except (ConnectionError, ValueError) as error:
            log.warning("the connection to the warm server ended", error=repr(error))
        finally:
            self._writer, self._pid = None, None
            self._ready.clear()
            writer.close()
            for future in self._replies.values():
                if not future.done():
                    future.set_exception(WarmServerError("the connection to the warm server ended"))
        return True

    def _handle_reply(self, reply: dict[str, Any]) -> None:
        if reply.get("op") == "pong":
            self._pid = int(reply["pid"])
            self._ready.set()
            log.info("the warm server is ready", pid=self._pid)
        if reply.get("op") == "exited" and (listener := self._listeners.get(int(reply["pid"]))) is not None:
            listener()
        future = self._replies.get(str(reply.get("id", "")))
        if future is not None and not future.done():
            future.set_result(reply)


def _end_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, psutil.Error):
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGTERM)
        try:
            process.wait(END_TIMEOUT_S)
        except psutil.TimeoutExpired:
            process.kill()
