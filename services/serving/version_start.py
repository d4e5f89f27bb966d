"""Starts the version of a promotion: fetched, loaded, warmed up, and compared with its evaluation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from contracts.events.model import ModelPromoted
from contracts.model_process import Sample, Tensor
from services.kit.model_folder import ModelFolderError
from services.kit.packages.package_environment import PackagesError
from services.kit.warm_server import WarmServer
from services.serving import memory, priority
from services.serving.core.golden import GoldenSet, compare_answers, explain_mismatches
from services.serving.core.problems import RequestRefused
from services.serving.core.rows import outputs_to_rows, rows_to_samples, samples_to_rows
from services.serving.core.signature import (
    LABEL_FIELD,
    Signature,
    infer_inputs,
    infer_outputs,
    takes_samples,
    without_labels,
)
from services.serving.devices import DevicePool
from services.serving.environments import ModelEnvironments
from services.serving.fetcher import ModelFetcher
from services.serving.mlflow_model import read_mlflow_model
from services.serving.model_source import FetchedModel
from services.serving.process import LoadError, ModelError, ModelProcess, ProcessError, ProcessLimits
from services.serving.settings import ServingSettings
from services.serving.version import ModelArtifact, ModelHost, ServedVersion

log = structlog.get_logger(__name__)

#: Predictions before memory is measured; those after it, at least and at most, and the seconds that they may take.
FIRST_ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 3, 8, 50
WARM_UP_S, MAX_WARM_UP_S = 0.15, 5.0
#: Growth between them that is a leak.
WARM_UP_GROWTH_BYTES = 64 * 2**20
#: Seconds that a deployment waits for a warm server that is starting.
WARM_SERVER_PATIENCE_S = 20.0


class StageError(Exception):
    """The version cannot be served."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(reason)
        self.stage, self.reason = stage, reason


@dataclass(frozen=True, slots=True)
class VersionStart:
    """Starts versions of models. It keeps nothing of them."""

    settings: ServingSettings
    fetcher: ModelFetcher
    environments: ModelEnvironments
    warm_server: WarmServer
    devices: DevicePool

    @property
    def _limits(self) -> ProcessLimits:
        own = self.settings
        return ProcessLimits(
            own.serving_max_batch,
            own.serving_max_delay_s,
            own.serving_threads,
            own.serving_device,
            own.serving_load_timeout_s,
            own.serving_timeout_s,
            own.serving_max_wait_s,
        )

    async def run(self, promotion: ModelPromoted) -> ServedVersion:
        """Return a version that has answered the golden set.

        Raises:
            StageError: the version cannot be served.
            TransientError: the object store or the bus does not answer.
        """
        try:
            fetched, golden = await self.fetcher.fetch(promotion)
        except ModelFolderError as error:
            raise StageError("fetch", str(error)) from error
        try:
            environment = await self.environments.prepare(fetched)
        except (PackagesError, OSError) as error:
            raise StageError("environment", str(error)) from error
        signature, samples = await asyncio.to_thread(_read_inputs, fetched, golden)
        if await self.warm_server.wait_ready(WARM_SERVER_PATIENCE_S) and self.warm_server.pid is not None:
            # It does nothing but fork, which takes it a while and pages of memory.
            priority.set_niceness(self.warm_server.pid, priority.LOADING_NICENESS)
        await asyncio.to_thread(_check_memory, fetched.folder)
        artifact = ModelArtifact(fetched.folder, environment, signature, fetched.digest)
        host = ModelHost(
            promotion.model,
            artifact,
            self._limits,
            self.warm_server,
            self.settings.serving_max_growth_bytes,
            self.devices,
        )
        try:
            await host.start()
        except LoadError as error:
            await host.stop()
            raise StageError("start", str(error)) from error
        except BaseException:
            await host.stop()
            raise
        try:
            if host.process is not None:
                signature = without_labels(signature, host.process.targets)
            outputs = await self._warm_up(host, list(samples.values()), signature)
            compared = self._compare(promotion, golden, list(samples), outputs)
        except BaseException:
            await host.stop()
            raise
        host.take_up()
        signature = replace(signature, outputs=infer_outputs(outputs) or signature.outputs)
        return ServedVersion(promotion, host, signature, compared)

    async def _warm_up(self, host: ModelHost, samples: list[Sample], signature: Signature) -> tuple[Tensor, ...]:
        """Predict the samples, as clients send them, until the first slow calls are over; return their outputs."""
        process = host.process
        try:
            if process is None:
                raise ProcessError(host.last_crash or "it has ended")
            await process.ping(self.settings.serving_timeout_s)
            if not samples:
                return ()
            requests = rows_to_samples(samples_to_rows(samples, signature), signature)
            outputs = await process.predict(requests)
            grown, rounds = await _measure_growth(process, requests)
        except RequestRefused as error:
            raise StageError("warm-up", f"it does not take samples of its own dataset: {error}") from error
        except ModelError as error:
            raise StageError("warm-up", f"the model failed on samples of its own dataset: {error}") from error
        except ProcessError as error:
            raise StageError("warm-up", f"its process did not answer: {error}") from error
        if grown > WARM_UP_GROWTH_BYTES:
            raise StageError("warm-up", f"it leaks: {grown / 2**20:.0f} MiB more after {rounds} predictions")
        return outputs

    def _compare(
        self, promotion: ModelPromoted, golden: GoldenSet, keys: list[str], outputs: tuple[Tensor, ...]
    ) -> int:
        """Compare with the evaluation; return how many samples were compared."""
        tolerance = self.settings.serving_golden_tolerance
        comparison = compare_answers(keys, golden.expected, outputs_to_rows(outputs), outputs, tolerance)
        if comparison.mismatches:
            raise StageError("golden", explain_mismatches(comparison))
        if not comparison.samples:
            names = ", ".join(each.name for each in outputs) or "none"
            reason = f"no evaluation kept what it answers ({names})" if golden.samples else "no samples are there"
            log.warning("no golden sample compared", model=promotion.model, version=promotion.version, reason=reason)
        return comparison.samples


def _read_inputs(fetched: FetchedModel, golden: GoldenSet) -> tuple[Signature, Mapping[str, Sample]]:
    """Return what a model takes, and samples for it by key.

    An MLflow model has a signature. It gets its input example where it does not take the samples of the dataset.
    """
    if fetched.mlflow_folder is None:
        return infer_inputs([_without_label(sample) for sample in golden.samples.values()]), golden.samples
    signature, example = read_mlflow_model(fetched.mlflow_folder)
    if golden.samples and _takes(signature, list(golden.samples.values())):
        return signature, golden.samples
    return signature, {f"example {number}": sample for number, sample in enumerate(example)}


def _check_memory(folder: Path) -> None:
    """Refuse to start a process for which there is no memory: the kernel would end one that answers as well as it.

    Raises:
        StageError: there is too little.
    """
    needed, available = memory.needed_bytes(folder), memory.available_bytes()
    if needed > available:
        text = f"its process asks for {needed / 2**20:,.0f} MiB, and {available / 2**20:,.0f} MiB are free"
        raise StageError("memory", text) from LoadError(text, is_host_error=True)


def _takes(signature: Signature, samples: list[Sample]) -> bool:
    """Return whether samples of the dataset fit a signature: a script may have made other features of them."""
    if not takes_samples(signature, samples):
        return False
    try:
        rows_to_samples(samples_to_rows(samples, signature), signature)
    except RequestRefused:
        return False
    return True


async def _measure_growth(process: ModelProcess, samples: Sequence[Sample]) -> tuple[int, int]:
    """Return by how many bytes a process grows, and over how many predictions."""
    for number in range(FIRST_ROUNDS):
        await process.predict([samples[number % len(samples)]])
    before_bytes, started = process.resident_bytes(), time.monotonic()
    for number in range(MAX_ROUNDS):
        await process.predict([samples[number % len(samples)]])
        waited_s = time.monotonic() - started
        if waited_s > (WARM_UP_S if number + 1 >= MIN_ROUNDS else MAX_WARM_UP_S):
            break
    return process.resident_bytes() - before_bytes, number + 1


def _without_label(sample: Sample) -> Sample:
    return {name: content for name, content in sample.items() if name != LABEL_FIELD}
