"""One process of one version of a model: started, asked, measured, ended. ``contracts/model_process.py``."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

import contracts
from contracts.model_process import (
    MODEL_LAUNCH_VARIABLE,
    MODEL_PROCESS_MODULE,
    Frame,
    FrameReader,
    ModelLaunch,
    Sample,
    Tensor,
    decode_answer,
    encode_frame,
    encode_predict,
)
from contracts.ranks import INHERITED, PACKAGES_DIR_VARIABLE
from services.kit.socket_files import socket_path
from services.kit.warm_server import WarmServer, WarmServerError, WarmServerTimeout
from services.serving import priority
from services.serving.core.problems import InputProblem, RequestRefused

log = structlog.get_logger(__name__)

#: The folder from which model processes import ``trainbus`` and ``contracts``.
PYTHON_ROOT = Path(contracts.__file__).resolve().parent.parent
#: The exit code of a process is known a moment after it has ended: how often to look for it, and how many times.
EXIT_CODE_EVERY_S, EXIT_CODE_LOOKS = 0.02, 100
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_numbers = itertools.count(1)


class ProcessError(Exception):
    """The process did not answer: it has ended, or was ended because it was late.

    ``batch_size``: requests in the batch that it computed for this one; 0: it had not begun with this one.
    ``process``: the one that ended.
    """

    def __init__(self, reason: str, batch_size: int = 0, process: ModelProcess | None = None) -> None:
        super().__init__(reason)
        self.batch_size, self.process = batch_size, process


class ModelError(Exception):
    """The model raised this."""


class LoadError(Exception):
    """The process could not load its model; the text says why. ``is_host_error``: the machine is at fault."""

    def __init__(self, reason: str, *, is_host_error: bool = False) -> None:
        super().__init__(reason)
        self.is_host_error = is_host_error


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """How a process runs its model. ``timeout_s``: without a frame while it computes, after which it is killed.
    ``max_wait_s``: before it begins with a request.
    """

    max_batch: int
    max_delay_s: float
    threads: int
    device: str
    load_timeout_s: float
    timeout_s: float
    max_wait_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Outputs, and the seconds for which the process computed their batch."""

    outputs: tuple[Tensor, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Reply:
    """A frame that answers a request, and the seconds since its batch began."""

    frame: Frame
    seconds: float


class ModelProcess(asyncio.Protocol):
    """The connection to one process. Its requests fail with ``ProcessError`` once it has ended."""

    def __init__(self, limits: ProcessLimits) -> None:
        self._limits = limits
        self.pid = 0
        self.classes: tuple[str, ...] = ()
        #: Columns of a row that a request need not have.
        self.targets: tuple[str, ...] = ()
        self.ended = asyncio.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._exit_file: Path | None = None
        self._was_ended_here = False
        #: Whether it ended while it computed, which an input may explain, and whether it has answered anything.
        self.ended_in_batch = self.has_answered = False
        #: A sample that it has answered.
        self.known_good: Sample | None = None
        self.reason = "it has ended"
        #: Is called with the samples of a batch, and the seconds that it took.
        self.on_batch: Callable[[int, float], object] = lambda samples, seconds: None
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        #: The requests without a reply, pings apart, each with its number of samples.
        self._work: dict[int, int] = {}
        #: Those of the batch that is computed, how many it had, and when it began.
        self._batch: frozenset[int] = frozenset()
        self._batch_size = self._batch_samples = 0
        self._batch_began_at = 0.0
        self._last_frame_at = 0.0
        self._watchdog: asyncio.TimerHandle | None = None
        self._loaded: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

    # -- life ---------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        folder: Path,
        environment: Mapping[str, str],
        limits: ProcessLimits,
        warm_server: WarmServer | None,
        niceness: int = priority.ANSWERING_NICENESS,
    ) -> ModelProcess:
        """Start a process that loads the model in ``folder``, and wait until it has.

        Raises:
            LoadError: it cannot load it, or not in time.
        """
        process = cls(limits)
        number = next(_numbers)
        path = socket_path(folder, f"p{os.getpid()}-{number}.sock")
        server = await asyncio.get_running_loop().create_unix_server(lambda: process, path)
        try:
            launch = ModelLaunch(
                folder=folder,
                socket=path,
                max_batch=limits.max_batch,
                max_delay_s=limits.max_delay_s,
                threads=limits.threads,
                device=limits.device,
            )
            process._exit_file = folder.with_name(f"{folder.name}.exit")
            process._exit_file.unlink(missing_ok=True)
            log_file = folder.with_name(f"{folder.name}.log")
            whole = build_environment(environment)
            process.pid, process._child = await _spawn(launch, whole, log_file, process._exit_file, warm_server)
            priority.set_niceness(process.pid, niceness)
            await process._wait_loaded()
        except BaseException:
            process.kill("it was not ready")
            raise
        finally:
            server.close()
            path.unlink(missing_ok=True)
            if process._child is not None:
                reaper = asyncio.create_task(asyncio.to_thread(process._child.wait))
                reaper.add_done_callback(lambda _: None)
        return process

    async def _wait_loaded(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._limits.load_timeout_s
        while True:
            left_s = deadline - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait({self._loaded}, timeout=max(0.0, min(left_s, 0.5)))
            if done:
                break
            if left_s <= 0:
                text = f"it has not loaded its model after {self._limits.load_timeout_s:g} s"
                raise LoadError(text, is_host_error=True)
            if self._transport is None and not _is_alive(self.pid, self._child):
                text = "its process ended before it connected; see its log"
                raise LoadError(text, is_host_error=await self.was_killed())
        frame = self._loaded.result()
        if frame.op != "ready":
            is_host_error = bool(frame.header.get("is_host_error")) or await self.was_killed()
            raise LoadError(str(frame.header.get("error", "it cannot be loaded")), is_host_error=is_host_error)
        self.classes = tuple(frame.header.get("classes", ()))
        self.targets = tuple(frame.header.get("targets", ()))

    async def was_killed(self) -> bool:
        """Return whether somebody else has killed it, as the kernel does when memory runs out."""
        if self._was_ended_here:
            return False
        for _ in range(EXIT_CODE_LOOKS):
            if (code := self._read_exit_code()) is not None:
                return code == -signal.SIGKILL
            await asyncio.sleep(EXIT_CODE_EVERY_S)
        return False

    def _read_exit_code(self) -> int | None:
        if self._child is not None:
            return self._child.poll()
        try:
            return int(self._exit_file.read_text()) if self._exit_file is not None else None
        except (OSError, ValueError):
            return None

    @property
    def is_alive(self) -> bool:
        return self._transport is not None and not self.ended.is_set()

    def kill(self, reason: str) -> None:
        """End the process and all that it has started, through no fault of what it computes."""
        self._batch = frozenset()
        self._end(reason)

    def _end(self, reason: str) -> None:
        self._was_ended_here = self._was_ended_here or not self.ended.is_set()
        if self.reason == "it has ended":
            self.reason = reason
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.pid = 0
        if self._transport is not None:
            self._transport.abort()

    def resident_bytes(self) -> int:
        """Return the memory that the process has; 0 where that is unknown."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * PAGE_BYTES
        except (OSError, ValueError, IndexError):
            return 0

    # -- requests -----------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests without a reply."""
        return len(self._replies)

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until every request has its reply, at most so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def predict(self, samples: Sequence[Sample], labels: Collection[str] = ()) -> tuple[Tensor, ...]:
        """Return the outputs of ``compute``."""
        return (await self.compute(samples, labels)).outputs

    async def compute(self, samples: Sequence[Sample], labels: Collection[str] = ()) -> Prediction:
        """Return the prediction for some samples. ``labels``: the fields that were added to what a client sent.

        Raises:
            RequestRefused: the samples are not what the model takes.
            ModelError: the model raised an error.
            ProcessError: the process ended, or was killed because it computed for too long.
        """
        request_id = next(self._ids)
        reply = await self._compute(request_id, len(samples), encode_predict(request_id, samples))
        frame = reply.frame
        match frame.op:
            case "answer":
                self.known_good = samples[0]
                return Prediction(decode_answer(frame), reply.seconds)
            case "refused":
                raise RequestRefused([to_problem(each, labels) for each in frame.header["problems"]], 422)
            case _:
                raise ModelError(str(frame.header.get("error", "the model failed")))

    async def ping(self, timeout_s: float) -> None:
        """Wait until the process replies. One that is late goes on: it may only be busy.

        Raises:
            ProcessError: it has ended, or does not reply in time.
        """
        request_id = next(self._ids)
        try:
            async with asyncio.timeout(timeout_s):
                await self._request(request_id, encode_frame({"op": "ping", "id": request_id}))
        except TimeoutError as error:
            raise ProcessError(f"it did not answer for {timeout_s:g} s") from error

    async def _compute(self, request_id: int, samples: int, frame: bytes) -> Reply:
        """Send a request whose reply the watchdog waits for."""
        if not self._work:
            self._last_frame_at = asyncio.get_running_loop().time()
        self._work[request_id] = samples
        if self._watchdog is None:
            self._watch()
        try:
            return await self._request(request_id, frame)
        finally:
            self._work.pop(request_id, None)

    async def _request(self, request_id: int, frame: bytes) -> Reply:
        if self._transport is None or self.ended.is_set():
            raise ProcessError(self.reason)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[request_id] = future
        self._idle.clear()
        self._transport.write(frame)
        try:
            return await future
        finally:
            self._replies.pop(request_id, None)
            if not self._replies:
                self._idle.set()

    def _watch(self) -> None:
        """End the process if it has work and gives no frame for ``timeout_s``.

        Whatever waits behind a batch does not count: each batch that begins or ends gives a frame.
        """
        loop, timeout_s = asyncio.get_running_loop(), self._limits.timeout_s
        self._watchdog = None
        if self.ended.is_set() or not (self._work or self._batch):
            return
        if (left_s := self._last_frame_at + timeout_s - loop.time()) > 0:
            self._watchdog = loop.call_later(left_s, self._watch)
        else:
            self._end(f"it did not answer for {timeout_s:g} s")

    # -- protocol -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._last_frame_at = asyncio.get_running_loop().time()
        try:
            for frame in self._frames.feed(data):
                self._handle(frame)
        except (ValueError, KeyError, TypeError) as error:
            self._end(f"its replies cannot be read: {error!r}")

    def _handle(self, frame: Frame) -> None:
        if frame.op in ("ready", "failed"):
            if not self._loaded.done():
                self._loaded.set_result(frame)
            return
        if frame.op == "started":
            self._batch, self._batch_began_at = frozenset(frame.header["ids"]), self._last_frame_at
            self._batch_size = len(self._batch)
            self._batch_samples = sum(self._work.get(each, 0) for each in self._batch)
            return
        self.has_answered = self.has_answered or frame.op == "answer"
        request_id = frame.header["id"]
        if request_id in self._batch:
            self._batch -= {request_id}
            if not self._batch:
                self.on_batch(self._batch_samples, self._last_frame_at - self._batch_began_at)
        if (future := self._replies.get(request_id)) is not None and not future.done():
            future.set_result(Reply(frame, self._last_frame_at - self._batch_began_at))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended_in_batch = bool(self._batch)
        self.ended.set()
        if self._watchdog is not None:
            self._watchdog.cancel()
        for request_id, future in list(self._replies.items()):
            if not future.done():
                future.set_exception(
                    ProcessError(self.reason, self._batch_size if request_id in self._batch else 0, self)
                )
        if not self._loaded.done():
            self._loaded.set_result(Frame({"op": "failed", "error": "its process ended while it loaded the model"}))
        if self.pid:
            self._end(self.reason)


def to_problem(problem: Mapping[str, Any], labels: Collection[str]) -> InputProblem:
    """Return a problem that the model process has found, in words for the client, who has sent no labels."""
    field, text = f"rows.{problem['row']}", str(problem["text"])
    if "present" in problem:
        sent = ", ".join(repr(name) for name in problem["present"] if name not in labels)
        text += f"; the row has {sent or 'no fields'}"
    return InputProblem(f"{field}.{problem['field']}" if problem.get("field") else field, text)


def build_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a model process: the run's own variables, and nothing of this service's."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    path = ":".join(filter(None, (own.get(PACKAGES_DIR_VARIABLE), str(PYTHON_ROOT))))
    return {**inherited, **own, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


async def _spawn(
    launch: ModelLaunch,
    environment: Mapping[str, str],
    log_file: Path,
    exit_file: Path,
    warm_server: WarmServer | None,
) -> tuple[int, subprocess.Popen[bytes] | None]:
    """Start a process in a group of its own, forked where a warm server is ready; return its pid."""
    whole = {**environment, MODEL_LAUNCH_VARIABLE: launch.model_dump_json()}
    if warm_server is not None and warm_server.is_ready:
        try:
            pid = await warm_server.fork(
                whole, _working_folder(launch.folder), log_file, exit_file, MODEL_PROCESS_MODULE
            )
            return pid, None
        except WarmServerTimeout as error:
            raise LoadError(f"its process was not forked: {error}", is_host_error=True) from error
        except WarmServerError as error:
            log.warning("the warm server cannot fork, starting cold", error=str(error))
    child = await asyncio.to_thread(_start_cold, launch, whole, log_file)
    return child.pid, child


def _start_cold(launch: ModelLaunch, environment: Mapping[str, str], log_file: Path) -> subprocess.Popen[bytes]:
    with log_file.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", MODEL_PROCESS_MODULE],
            cwd=_working_folder(launch.folder),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _working_folder(folder: Path) -> Path:
    """Return where the model's code runs: as in training, where its own files are."""
    return code if (code := folder / "code").is_dir() else folder


def _is_alive(pid: int, child: subprocess.Popen[bytes] | None) -> bool:
    if child is not None:
        return child.poll() is None
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"
