"""The warm process: torch imported once, ranks forked from it in milliseconds.

It is a help and never a need: while it is starting, away or broken, ranks start cold.
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

ANSWER_TIMEOUT_S = 5.0
CONNECT_RETRY_S = 0.1
#: Seconds before it is started again after it ended, the last one repeats.
RESTART_DELAYS_S = (0.5, 2.0, 10.0, 60.0)
END_TIMEOUT_S = 3.0


class WarmServerError(Exception):
    """The warm process did not do it."""


class WarmServerTimeout(WarmServerError):
    """It did not say whether it did it."""


class WarmServer:
    """Keeps one warm process and talks to it."""

    def __init__(self, socket: Path, log_file: Path, environment: Mapping[str, str]) -> None:
        self._socket, self._log_file, self.environment = socket, log_file, dict(environment)
        self._pid: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        #: Called when the fork of that pid has ended and its exit code is written.
        self._listeners: dict[int, Callable[[], None]] = {}
        self._ids = itertools.count()
        self._closing = False

    @property
    def ready(self) -> bool:
        """Whether a fork can be asked for now."""
        return self._writer is not None and self._pid is not None

    @property
    def pid(self) -> int | None:
        return self._pid

    async def run(self) -> None:
        """Keep the process alive and the connection open until cancelled; use one that an earlier agent left."""
        for attempt in itertools.count():
            if attempt or not await self._talk():
                self._spawn()
                await self._connect_when_up()
            if self._closing:
                return
            delay_s = RESTART_DELAYS_S[min(attempt, len(RESTART_DELAYS_S) - 1)]
            log.warning("the warm process ended, ranks start cold until it is back", delay_s=delay_s)
            await asyncio.sleep(delay_s)

    async def fork(self, environment: Mapping[str, str], cwd: Path, log_file: Path, exit_file: Path) -> int:
        """Fork a rank and return its pid."""
        name = f"f{next(self._ids)}"
        answer = await self._ask(
            name,
            {
                "op": "fork",
                "id": name,
                "env": dict(environment),
                "cwd": str(cwd),
                "log": str(log_file),
                "exit_file": str(exit_file),
            },
        )
        if answer.get("op") != "forked":
            raise WarmServerError(str(answer.get("error", answer)))
        return int(answer["pid"])

    def on_exit(self, pid: int, then: Callable[[], None]) -> Callable[[], None]:
        """Call ``then`` when a fork has ended; returns what stops listening."""
        self._listeners[pid] = then

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
            await asyncio.to_thread(_end, pid)
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
                [sys.executable, "-m", "trainbus.warm", "--socket", str(self._socket)],
                # Forks have this process's memory, so it must never have held a secret.
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def _connect_when_up(self) -> None:
        while not self._closing and self._child is not None and self._child.poll() is None:
            if await self._talk():
                return
            await asyncio.sleep(CONNECT_RETRY_S)

    async def _talk(self) -> bool:
        """Connect and read answers until the connection ends; False if there was none."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket, limit=2**20)
        except OSError:
            return False
        try:
            writer.write(b'{"op":"ping"}\n')
            self._writer = writer
            while raw := await reader.readline():
                self._on_answer(json.loads(raw))
        except (ConnectionError, ValueError) as error:
            log.warning("lost the warm process", error=repr(error))
        finally:
            self._writer, self._pid = None, None
            writer.close()
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(WarmServerError("the connection to the warm process ended"))
        return True

    def _on_answer(self, answer: dict[str, Any]) -> None:
        if answer.get("op") == "pong":
            self._pid = int(answer["pid"])
            log.info("the warm process is ready", pid=self._pid)
        if answer.get("op") == "exited" and (listener := self._listeners.get(int(answer["pid"]))) is not None:
            listener()
        future = self._answers.get(str(answer.get("id", "")))
        if future is not None and not future.done():
            future.set_result(answer)

    async def _ask(self, name: str, question: dict[str, Any]) -> dict[str, Any]:
        writer = self._writer
        if writer is None:
            raise WarmServerError("the warm process is not there")
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[name] = future
        try:
            writer.write(json.dumps(question).encode() + b"\n")
            return await asyncio.wait_for(future, ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            raise WarmServerTimeout(f"no answer within {ANSWER_TIMEOUT_S:.0f} s") from error
        finally:
            self._answers.pop(name, None)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, psutil.Error):
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGTERM)
        try:
            process.wait(END_TIMEOUT_S)
        except psutil.TimeoutExpired:
            process.kill()
