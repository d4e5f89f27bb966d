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
from services.serving.version import PoisonedInputError, ServedVersion

log = structlog.get_logger(__name__)

#: Failed requests that another version is asked and does not answer either, a second and at once: a flood of bad input
#: must not double the load.
COMPARISONS_PER_S, MAX_COMPARISONS = 20.0, 20.0
#: The same of inputs on which a process ended: the other one may end as well.
RISKY_COMPARISONS_PER_S, MAX_RISKY_COMPARISONS = 0.2, 3.0

#: Processes that are asked for what none has begun with, after the first.
MAX_ATTEMPTS = 5

RequestFailure = RequestRefused | ModelError | ProcessError | PoisonedInputError


class NotServedError(Exception):
    """No such model or version is served; the text says what is."""


class PredictionFailed(Exception):
    """No process could answer the request; the text says why."""


@dataclass(slots=True)
class TokenBucket:
    """Bounds how often something is done: tokens come at a rate, and some of them can be saved."""

    per_s: float
    max_tokens: float
    _tokens: float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens, self._at = self.max_tokens, time.monotonic()

    def take_token(self) -> bool:
        """Take a token; return whether there was one."""
        now = time.monotonic()
        self._tokens = min(self.max_tokens, self._tokens + (now - self._at) * self.per_s)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def return_token(self) -> None:
        """Return a token that was taken."""
        self._tokens += 1


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
    comparisons: TokenBucket = field(default_factory=lambda: TokenBucket(COMPARISONS_PER_S, MAX_COMPARISONS))
    risky_comparisons: TokenBucket = field(
        default_factory=lambda: TokenBucket(RISKY_COMPARISONS_PER_S, MAX_RISKY_COMPARISONS)
    )

    def find_other(self, version: ServedVersion) -> ServedVersion | None:
        """Return the version that answers where this one fails: another process, the older one if possible."""
        others = (each for each in (self.primary, self.previous) if each is not None and each.host is not version.host)
        return next(others, None)

    def versions(self) -> list[ServedVersion]:
        """Return those that run and that a request may name."""
        return [each for each in (self.primary, self.previous) if each is not None]

    def resident_bytes(self) -> int:
        """Return the memory of the process that answers."""
        return self.primary.host.resident_bytes if self.primary is not None else 0

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
    """Finds the version for each request, and tries other processes where one has ended before it began with it."""

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

    def check_admission(self, name: str | None, *, names_version: bool, is_arrival: bool = False) -> None:
        """Do nothing where a request for a model may come; one that names a version is only seen by the server.

        Args:
            is_arrival: only its head is there, and nothing counts it yet.

        Raises:
            OverloadedError: it would wait for too long.
        """
        model = self.models.get(name) if name else next(iter(self.models.values()), None)
        queue = model.primary.host.queue if model is not None and model.primary is not None else None
        if names_version:
            queue = None
        try:
            self.load.check()
            if queue is not None:
                queue.check()
        except OverloadedError:
            metrics.count_requests(model.name if model is not None else "", "overloaded").inc()
            raise
        if is_arrival:
            self.load.arrivals.count_one()
            if queue is not None:
                queue.arrivals.count_one()

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
        except OverloadedError:
            metrics.count_requests(model.name, "overloaded").inc()
            raise
        except (RequestRefused, ModelError, ProcessError, PoisonedInputError) as error:
            answer = await self._handle_failure(model, version, target, samples, error)
        metrics.count_requests(model.name, "answered").inc()
        metrics.REQUEST_SECONDS.labels(model.name).observe(time.monotonic() - started)
        self._send_shadow(model, samples, answer)
        return answer

    def _choose(self, model: ServedModel) -> ServedVersion:
        assert model.primary is not None
        model.requests += 1
        if model.candidate is not None and pick_by_share(model.requests, model.canary_share):
            return model.candidate
        return model.primary

    async def _handle_failure(
        self,
        model: ServedModel,
        version: ServedVersion | None,
        failed: ServedVersion,
        samples: Sequence[Sample],
        error: RequestFailure,
    ) -> Answer:
        """Return an answer of another version or process; where there is none, raise what the client gets."""
        other = model.find_other(failed) if version is None else None
        if isinstance(error, ProcessError):
            return await self._ask_again(model, other or failed, samples, error, may_change=version is None)
        # An input that ends processes, or that the model refuses, goes further only where that tells of the version.
        if other is not None and (failed.is_watched or isinstance(error, ModelError)):
            outputs = await self._compare_failure(model, failed, other, samples, error)
            if outputs is not None:
                return Answer(other, outputs)
        raise await self._explain(model, failed, error) from error

    async def _ask_again(
        self,
        model: ServedModel,
        target: ServedVersion,
        samples: Sequence[Sample],
        error: ProcessError,
        *,
        may_change: bool,
    ) -> Answer:
        """Return the answer to what no process has begun with: each may have ended on another input before it."""
        deadline = time.monotonic() + self.timeout_s
        for _ in range(MAX_ATTEMPTS):
            metrics.RETRIES.labels(model.name).inc()
            try:
                return Answer(target, await target.predict(samples, deadline - time.monotonic()))
            except ProcessError as again:
                error = again
            except (RequestRefused, ModelError, PoisonedInputError) as again:
                raise await self._explain(model, target, again) from again
            if time.monotonic() >= deadline:
                break
            target = (model.find_other(target) if may_change else None) or target
        raise await self._explain(model, target, error) from error

    async def _compare_failure(
        self,
        model: ServedModel,
        failed: ServedVersion,
        other: ServedVersion,
        samples: Sequence[Sample],
        error: RequestFailure,
    ) -> tuple[Tensor, ...] | None:
        """Ask another version what one has failed on, and count the pair; None where it does not answer either."""
        may_end = isinstance(error, PoisonedInputError)
        tokens = model.risky_comparisons if may_end else model.comparisons
        if not tokens.take_token():
            return None
        metrics.RETRIES.labels(model.name).inc()
        try:
            outputs = await other.predict(samples)
        except (RequestRefused, ModelError, PoisonedInputError):
            failed.tally.compared += 1
            return None
        except (ProcessError, OverloadedError):
            return None
        failed.tally.compared += 1
        failed.tally.worse += 1
        tokens.return_token()
        failed.tally.worse_ends += may_end
        return outputs

    async def _explain(self, model: ServedModel, failed: ServedVersion, error: RequestFailure) -> Exception:
        """Return what the client gets: an error of the model is the input's fault where its process is sound."""
        if isinstance(error, ModelError) and await failed.host.is_sound():
            error = RequestRefused((InputProblem("", f"the model failed on this input: {error}"),), 422)
        metrics.count_requests(model.name, "refused" if isinstance(error, RequestRefused) else "error").inc()
        match error:
            case RequestRefused():
                return error
            case ModelError():
                return PredictionFailed(f"the model failed on this input: {error}")
            case ProcessError():
                return PredictionFailed(f"no process has answered; the last: {error}")
            case _:
                return PredictionFailed(str(error))

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
        except (RequestRefused, ModelError, ProcessError, PoisonedInputError, OverloadedError):
            return  # the candidate's tally has it
        if [each.data for each in outputs] != [each.data for each in answer.outputs]:
            metrics.SHADOW_DIFFERENCES.labels(name).inc()
