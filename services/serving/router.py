"""The router: which version answers a request. A flip is the assignment of one reference."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from contracts.model_process import Sample, Tensor
from services.serving import metrics
from services.serving.admission import IsDisconnected, OverloadedError, ServerLoad
from services.serving.core.problems import InputProblem, RequestRefused
from services.serving.core.versions import pick_by_share
from services.serving.process import ModelError, ProcessError
from services.serving.version import ServedVersion

log = structlog.get_logger(__name__)


class NotServedError(Exception):
    """No such model or version is served; the text says what is."""


class PredictionFailed(Exception):
    """No process could answer the request; the text says why."""


@dataclass(slots=True)
class ServedModel:
    """The versions of one model that run."""

    name: str
    #: Answers requests.
    primary: ServedVersion | None = None
    #: Answered before; it is warm, and answers where the primary fails.
    previous: ServedVersion | None = None
    #: Does not answer yet, except its shares.
    candidate: ServedVersion | None = None
    canary_share: float = 0.0
    shadow_share: float = 0.0
    requests: int = 0
    #: What keeps the wanted version from being served.
    problem: str = ""

    def versions(self) -> list[ServedVersion]:
        """Return those that run and that a request may name."""
        return [each for each in (self.primary, self.previous) if each is not None]

    def flip(self, version: ServedVersion) -> ServedVersion | None:
        """Make a version the one that answers; return the one that is no longer needed."""
        if self.primary is not None and self.primary.host is version.host:
            self.primary = version  # the same checkpoint again: what answered before it stays warm
            return None
        spare = self.previous if self.previous is not version else None
        self.primary, self.previous, self.candidate = version, self.primary, None
        return spare

    def flip_back(self) -> ServedVersion | None:
        """Make the version before answer again; return the one that is taken back."""
        bad, self.primary, self.previous = self.primary, self.previous, None
        return bad


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs, and the version that gave them."""

    version: ServedVersion
    outputs: tuple[Tensor, ...]


@dataclass(slots=True)
class Router:
    """Finds the version for each request, and tries another process once where one fails."""

    timeout_s: float
    load: ServerLoad
    models: dict[str, ServedModel] = field(default_factory=dict)
    _shadows: set[asyncio.Task[None]] = field(default_factory=set)

    def find_model(self, name: str | None) -> ServedModel:
        """Return a served model; without a name the only one.

        Raises:
            NotServedError: there is none, or several and no name.
        """
        served = {each.name: each for each in self.models.values() if each.primary is not None}
        names = ", ".join(sorted(served)) or "none yet: promote a run first (`trainbus models promote RUN`)"
        if name is None:
            if len(served) != 1:
                raise NotServedError(f"name a model; served are {names}")
            return next(iter(served.values()))
        if name not in served:
            problem = self.models[name].problem if name in self.models else ""
            reason = f": {problem}" if problem else ""
            raise NotServedError(f"model {name!r} is not served{reason}; served are {names}")
        return served[name]

    def find_version(self, name: str | None, version: str | None) -> tuple[ServedModel, ServedVersion]:
        """Return a model and its version; without a version the one that answers.

        Raises:
            NotServedError: it is not served.
        """
        model = self.find_model(name)
        assert model.primary is not None
        if version is None:
            return model, model.primary
        for each in model.versions():
            if str(each.version) == version:
                return model, each
        known = ", ".join(str(each.version) for each in model.versions())
        raise NotServedError(f"version {version} of model {model.name!r} is not served; served are {known}")

    def check_admission(self, name: str | None, *, names_version: bool) -> None:
        """Do nothing where a request for a model may come; one that names a version is only seen by the server.

        Raises:
            OverloadedError: it would wait for too long.
        """
        model = self.models.get(name) if name else next(iter(self.models.values()), None)
        try:
            self.load.check()
            if model is not None and model.primary is not None and not names_version:
                model.primary.host.queue.check()
        except OverloadedError:
            metrics.REQUESTS.labels(model.name if model is not None else "", "overloaded").inc()
            raise

    async def predict(
        self,
        model: ServedModel,
        version: ServedVersion | None,
        samples: Sequence[Sample],
        is_disconnected: IsDisconnected | None = None,
    ) -> Answer:
        """Return the answer of a version, or of the model's without one.

        Args:
            is_disconnected: returns whether the client is gone; what has waited for a gone one is not computed.

        Raises:
            RequestRefused: the samples are not what the model takes.
            OverloadedError: it would wait for too long, or has.
            ClientDisconnected: nobody waits for the answer any more.
            PredictionFailed: the model fails on these samples, or no process runs.
        """
        started = time.monotonic()
        target = version or self._choose(model)
        try:
            answer = Answer(target, await target.predict(samples, is_disconnected=is_disconnected))
        except RequestRefused:
            metrics.REQUESTS.labels(model.name, "refused").inc()
            raise
        except OverloadedError:
            metrics.REQUESTS.labels(model.name, "overloaded").inc()
            raise
        except (ModelError, ProcessError) as error:
            answer = await self._retry(model, version, target, samples, error)
        metrics.REQUESTS.labels(model.name, "answered").inc()
        metrics.REQUEST_SECONDS.labels(model.name).observe(time.monotonic() - started)
        self._send_shadow(model, samples, answer)
        return answer

    def _choose(self, model: ServedModel) -> ServedVersion:
        assert model.primary is not None
        model.requests += 1
        if model.candidate is not None and pick_by_share(model.requests, model.canary_share):
            return model.candidate
        return model.primary

    async def _retry(
        self,
        model: ServedModel,
        version: ServedVersion | None,
        failed: ServedVersion,
        samples: Sequence[Sample],
        error: Exception,
    ) -> Answer:
        """Ask another process once: of the other version, or the one that takes the place of a crashed one."""
        others = [each for each in (model.primary, model.previous) if each is not None and each is not failed]
        other = failed if version is not None or not others else others[0]
        if other is failed and isinstance(error, ModelError):
            metrics.REQUESTS.labels(model.name, "error").inc()
            raise PredictionFailed(f"the model failed on this input: {error}") from error
        metrics.RETRIES.labels(model.name).inc()
        try:
            outputs = await other.predict(samples, self.timeout_s)
        except (RequestRefused, ModelError) as second:
            if isinstance(error, ModelError):
                # Two versions fail on it: the input is at fault, and neither version is.
                failed.tally.errors -= 1
                failed.tally.refused += 1
                metrics.REQUESTS.labels(model.name, "refused").inc()
                text = f"the model failed on this input: {second}"
                raise RequestRefused((InputProblem("", text),), 422) from second
            metrics.REQUESTS.labels(model.name, "error").inc()
            if isinstance(second, RequestRefused):
                raise
            raise PredictionFailed(f"the model failed on this input: {second}") from second
        except ProcessError as second:
            metrics.REQUESTS.labels(model.name, "error").inc()
            raise PredictionFailed(f"two processes did not answer: {error}; {second}") from second
        return Answer(other, outputs)

    def _send_shadow(self, model: ServedModel, samples: Sequence[Sample], answer: Answer) -> None:
        candidate = model.candidate
        if candidate is None or answer.version is candidate or not pick_by_share(model.requests, model.shadow_share):
            return
        task = asyncio.create_task(self._compare(model.name, candidate, samples, answer))
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)

    async def _compare(self, name: str, candidate: ServedVersion, samples: Sequence[Sample], answer: Answer) -> None:
        try:
            outputs = await candidate.predict(samples)
        except (RequestRefused, ModelError, ProcessError, OverloadedError):
            return  # the candidate's tally has it
        if [each.data for each in outputs] != [each.data for each in answer.outputs]:
            metrics.SHADOW_DIFFERENCES.labels(name).inc()
