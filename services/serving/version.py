"""One version of a model that is served: its process, which is started again when it ends, and what it has done."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from contracts.events.model import ModelPromoted
from contracts.model_process import Sample, Tensor
from services.kit.concurrency import cancel_and_wait
from services.kit.warm_server import WarmServer
from services.serving import metrics, priority
from services.serving.admission import HostQueue, IsDisconnected
from services.serving.core.batch_times import FullBatchTime
from services.serving.core.poison import PoisonedInputs
from services.serving.core.problems import RequestRefused
from services.serving.core.signature import Signature
from services.serving.core.watch import RequestTally
from services.serving.devices import DevicePool
from services.serving.process import LoadError, ModelError, ModelProcess, ProcessError, ProcessLimits

log = structlog.get_logger(__name__)

#: Seconds until a process is started again after it has ended; the last one repeats.
RESTART_DELAYS_S = (0.0, 0.5, 2.0, 10.0, 60.0)
#: A process that ran this long, or has answered something, starts again with the first delay.
STABLE_AFTER_S = 60.0
MEASURE_EVERY_S = 1.0
#: Seconds that requests have to end before a process is stopped.
DRAIN_S = 30.0


class PoisonedInputError(Exception):
    """The process ended on this input, or on others that it computed with it and has not been asked for it alone."""


@dataclass(frozen=True, slots=True)
class ModelArtifact:
    """A fetched model: its folder, how its processes run, and the SHA-256 of its manifest."""

    folder: Path
    environment: Mapping[str, str]
    signature: Signature
    digest: str = ""


class ModelHost:
    """Keeps one process of an artifact running: another one takes its place when it ends or has grown too much."""

    def __init__(
        self,
        model: str,
        artifact: ModelArtifact,
        limits: ProcessLimits,
        warm_server: WarmServer | None,
        max_growth_bytes: int,
        devices: DevicePool,
    ) -> None:
        self.queue = HostQueue(model, limits.max_batch, limits.max_wait_s)
        self._devices, self._has_device = devices, True
        self._model, self.artifact, self._limits = model, artifact, replace(limits, device=devices.take_device())
        self._warm_server, self._max_growth_bytes = warm_server, max_growth_bytes
        self._process: ModelProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        #: Times that the process ended although it computed nothing, or did not start again.
        self.unexplained_ends = 0
        self.last_crash = ""
        self.loaded_bytes = 0
        self.poisoned = PoisonedInputs()
        #: Of the warm-up: what a process takes before it answers users.
        self.warm_up_time = FullBatchTime(limits.max_batch)
        self._has_taken_up = False
        self._probe: asyncio.Task[bool] | None = None

    async def start(self) -> None:
        """Start the first process, at a low priority until ``take_up``.

        Raises:
            LoadError: it cannot load the model.
        """
        await self._start_process(priority.LOADING_NICENESS)
        self._keeper = asyncio.create_task(self._keep_running(), name=f"keep {self._model}")

    def take_up(self) -> None:
        """Give the process the priority of one that answers; the warm-up is over."""
        self._has_taken_up = True
        if self._process is not None:
            priority.set_niceness(self._process.pid, priority.ANSWERING_NICENESS)

    @property
    def device(self) -> str:
        """The device of its process, by name."""
        return self._limits.device

    @property
    def resident_bytes(self) -> int:
        """The memory of its process."""
        return self._process.resident_bytes() if self._process is not None else 0

    @property
    def timeout_s(self) -> float:
        """The seconds that its process may compute."""
        return self._limits.timeout_s

    @property
    def process(self) -> ModelProcess | None:
        """The process that answers; None while there is none."""
        return self._process if self._process is not None and self._process.is_alive else None

    async def wait_process(self, timeout_s: float) -> ModelProcess:
        """Return the process, once one runs.

        Raises:
            ProcessError: none runs in time.
        """
        deadline = time.monotonic() + timeout_s
        while (process := self.process) is None:
            self._changed.clear()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._keeper is None:
                raise ProcessError(f"its process does not run: {self.last_crash or 'it is stopped'}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
        return process

    async def is_sound(self) -> bool:
        """Return whether the process answers a sample now that it has answered before.

        It is asked after the call; calls at the same time share one question.
        """
        if (earlier := self._probe) is not None:
            await asyncio.wait({earlier})
        if self._probe is earlier:
            self._probe = asyncio.create_task(self._answers_known_sample(), name=f"probe {self._model}")
        assert self._probe is not None
        return await asyncio.shield(self._probe)

    async def _answers_known_sample(self) -> bool:
        process = self.process
        if process is None or process.known_good is None:
            return False
        try:
            await process.compute([process.known_good])
        except (RequestRefused, ModelError, ProcessError):
            return False
        return True

    async def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Wait until no request is open, then stop."""
        if (process := self.process) is not None:
            await process.wait_idle(timeout_s)
        await self.stop()

    async def stop(self) -> None:
        """End the process for good."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await cancel_and_wait(keeper)
        if self._process is not None:
            # The kernel takes down its memory, which is work, at the priority of the process.
            priority.set_niceness(self._process.pid, priority.LOADING_NICENESS)
            self._process.kill("it was stopped")
        if self._has_device:
            self._has_device = False
            self._devices.give_back(self.device)
        self._changed.set()

    async def _start_process(self, niceness: int = priority.ANSWERING_NICENESS) -> None:
        process = await ModelProcess.start(
            self.artifact.folder, self.artifact.environment, self._limits, self._warm_server, niceness
        )
        process.on_batch = self._observe_batch
        process.known_good = self._process.known_good if self._process is not None else None
        self._process, self.loaded_bytes = process, process.resident_bytes()
        self._changed.set()

    def _observe_batch(self, samples: int, seconds: float) -> None:
        self.queue.batch_times.observe(samples, seconds)
        if not self._has_taken_up:
            self.warm_up_time.observe(samples, seconds)

    async def _keep_running(self) -> None:
        """Start the process again whenever it has ended; replace it when it has grown too much."""
        early_ends, started_at = 0, time.monotonic()
        while True:
            assert self._process is not None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.ended.wait(), MEASURE_EVERY_S)
            if self._process.is_alive:
                await self._replace_when_grown(self._process)
                continue
            self.last_crash = self._process.reason
            self.unexplained_ends += not self._process.ended_in_batch
            is_stable = self._process.has_answered or time.monotonic() - started_at > STABLE_AFTER_S
            early_ends = 0 if is_stable else early_ends + 1
            while self.process is None:
                delay_s = RESTART_DELAYS_S[min(max(early_ends - 1, 0), len(RESTART_DELAYS_S) - 1)]
                log.warning("model process ended", model=self._model, reason=self.last_crash, restart_in_s=delay_s)
                await asyncio.sleep(delay_s)
                metrics.PROCESS_RESTARTS.labels(self._model).inc()
                try:
                    await self._start_process()
                except (LoadError, OSError, MemoryError) as error:
                    self.last_crash = str(error)
                    self.unexplained_ends += 1
                    early_ends += 1
            started_at = time.monotonic()

    async def _replace_when_grown(self, process: ModelProcess) -> None:
        if process.resident_bytes() - self.loaded_bytes <= self._max_growth_bytes:
            return
        log.warning("model process has grown too much and is replaced", model=self._model, pid=process.pid)
        try:
            await self._start_process()
        except (LoadError, OSError, MemoryError) as error:
            log.warning("no other model process starts", model=self._model, error=str(error))
            return
        metrics.PROCESS_RESTARTS.labels(self._model).inc()
        await process.wait_idle(DRAIN_S)
        process.kill("it has grown too much")


class ServedVersion:
    """A promotion that is served: a host, which it may share with another promotion of the same checkpoint."""

    def __init__(
        self, promotion: ModelPromoted, host: ModelHost, signature: Signature, golden_samples: int = 0
    ) -> None:
        self.promotion, self.host, self.signature = promotion, host, signature
        #: Samples of the evaluation that it answered as there before it took over.
        self.golden_samples = golden_samples
        self.tally = RequestTally(full_batch_s=host.warm_up_time.seconds)
        #: Whether it may still be taken back.
        self.is_watched = False
        self._ends_before = host.unexplained_ends

    @property
    def version(self) -> int:
        return self.promotion.version

    @property
    def unexplained_ends(self) -> int:
        """Ends of the process, since this version began, that no input explains."""
        return self.host.unexplained_ends - self._ends_before

    def measure(self) -> RequestTally:
        """Return the tally with the process's memory as it is now."""
        process = self.host.process
        self.tally.loaded_bytes = self.host.loaded_bytes
        self.tally.resident_bytes = process.resident_bytes() if process is not None else 0
        return self.tally

    async def predict(
        self, samples: Sequence[Sample], patience_s: float = 0.0, is_disconnected: IsDisconnected | None = None
    ) -> tuple[Tensor, ...]:
        """Return the outputs for some samples; wait ``patience_s`` for a process where none runs.

        If the process ends while it computes them among others, it is asked again for them alone.

        Raises:
            OverloadedError, ClientDisconnected: see ``HostQueue.wait_turn``.
            PoisonedInputError: the process ended on these samples, now or before.
            RequestRefused, ModelError, ProcessError: see ``ModelProcess.compute``.
        """
        if samples in self.host.poisoned:
            raise PoisonedInputError("the model's process ended on this input before; it is not tried again")
        queue = self.host.queue
        await queue.wait_turn(len(samples), is_disconnected)
        wait_alone = None
        try:
            return await self._compute(samples, patience_s)
        except ProcessError as error:
            if not error.batch_size:
                raise
            if error.batch_size == 1:
                raise self._poison(samples, error) from error
            wait_alone = queue.line_up_suspect(len(samples))
        finally:
            queue.end_turn(len(samples))
        return await self._predict_alone(samples, wait_alone)

    async def _predict_alone(
        self, samples: Sequence[Sample], wait_alone: Callable[[float], Awaitable[bool]]
    ) -> tuple[Tensor, ...]:
        patience_s = self.host.timeout_s
        # Another process must not be asked: this input may be the one that ends it.
        unknown = "the model's process ended while it computed this input among others, and does not run again yet"
        if not await wait_alone(patience_s):
            raise PoisonedInputError(unknown)
        try:
            return await self._compute(samples, patience_s)
        except ProcessError as error:
            raise (self._poison(samples, error) if error.batch_size else PoisonedInputError(unknown)) from error
        finally:
            self.host.queue.end_turn(len(samples))

    def _poison(self, samples: Sequence[Sample], error: ProcessError) -> PoisonedInputError:
        self.host.poisoned.add(samples)
        self.tally.errors += 1
        self.tally.last_error = str(error)
        return PoisonedInputError(f"the model's process ended on this input: {error}")

    async def _compute(self, samples: Sequence[Sample], patience_s: float) -> tuple[Tensor, ...]:
        try:
            process = self.host.process or await self.host.wait_process(patience_s)
            prediction = await process.compute(samples, self.signature.labels)
        except RequestRefused as error:
            self.tally.refused += 1
            self.tally.last_error = str(error)
            raise
        except ModelError as error:
            self.tally.errors += 1
            self.tally.last_error = str(error)
            raise
        self.tally.answered += 1
        self.tally.largest_request = max(self.tally.largest_request, len(samples))
        # Of the work alone: how long a request waits depends on how many there are, not on the version.
        self.tally.latencies_s.append(prediction.seconds)
        return prediction.outputs
