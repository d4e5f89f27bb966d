"""The evaluation service: completed -> measured -> compared -> promoted or not, each exactly once."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import structlog

from contracts import subjects, topology
from contracts.best_checkpoint import find_judged
from contracts.envelope import Envelope
from contracts.events.checkpoint import CheckpointCommitted, CheckpointDeleted
from contracts.events.model import ModelApproved, ModelConfigured, ModelFact, ModelPromoted, ModelStaged
from contracts.events.run import (
    Artifact,
    RunAccepted,
    RunCompleted,
    RunEvaluated,
    RunFact,
    RunNotPromoted,
    RunPrepared,
    RunPromoted,
)
from contracts.events.train import (
    ApproveRequested,
    ConfigureRequested,
    PromoteRequested,
    RollbackRequested,
    StageRequested,
    TrainRequested,
)
from contracts.manifest import artifacts_of, files_of
from contracts.spec.run import RunSpec
from services.evaluation import metrics, plot
from services.evaluation.core import report as reporting
from services.evaluation.core.decide import (
    ConcludeCandidate,
    JudgeCandidate,
    JudgedGates,
    RequestEvaluation,
    Step,
    UnmeasurableError,
    conclude_candidate,
    evaluation_request,
    next_steps,
    next_version,
    run_promoted,
)
from services.evaluation.core.gate import Verdict, judge, renew_pending
from services.evaluation.core.report_page import render_page
from services.evaluation.core.state import FOLDED, Candidate, State, Version
from services.evaluation.evidence import EvidenceReader, Findings
from services.evaluation.samples import read_samples
from services.kit.bus import Bus, Conflict, ExpectedSequence, Message, PoisonMessage
from services.kit.chunks import restore_file
from services.kit.service import Service
from services.kit.settings import Settings
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound
from services.kit.store.files import hash_file
from services.kit.store.objects import ObjectStore

log = structlog.get_logger(__name__)

F = TypeVar("F", bound=RunFact)
#: How often a candidate is decided again within one handling before the message is left to be redelivered.
MAX_ROUNDS = 50
#: How often candidates are settled without an event.
SETTLE_EVERY_S = 60.0
#: Makes the promotion that was asked for out of the present champion; None: nothing to do.
Make = Callable[[Version | None], Awaitable[ModelPromoted | None]]
SETTLED: dict[type, str] = {ModelPromoted: "promoted", RunNotPromoted: "not_promoted"}


class CheckpointLockError(Exception):
    """A checkpoint is not what was committed, so it must not be promoted; the text says what to do."""


class Evaluator:
    """Brings every candidate to its end, one step at a time, each derived from the facts as they are."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings) -> None:
        self._bus, self._objects, self._bucket = bus, objects, settings.bucket_models
        self._evidence = EvidenceReader(bus, objects)
        self._state = State()
        self._folded_up_to = 0
        #: Open candidates that were judged again since their report; the log has the verdicts of the report alone.
        self._judged: dict[str, JudgedGates] = {}
        self._lock = asyncio.Lock()

    # -- what has ended -----------------------------------------------------

    async def on_run_ended(self, received: Message[Any]) -> None:
        """Go on with every candidate that is not settled: there are few, and any may have waited for this run.

        Raises:
            Exception: a candidate that this run is about cannot be settled, so the message is delivered again. The
                failure of another candidate is not this message's: its own is delivered again.
        """
        failures = await self.settle_all()
        run_id = received.event.run_id
        measured = self._state.evaluations.get(run_id)
        for failed, error in failures.items():
            if failed in (run_id, measured):
                raise error

    async def settle_all(self) -> dict[str, Exception]:
        """Take each open candidate as far as it goes now. Return the candidates that cannot be settled, and why."""
        async with self._lock:
            await self._catch_up()
            failures: dict[str, Exception] = {}
            promotions = -1
            # Who waits for somebody is judged again once another one is promoted.
            while promotions != (promotions := self._count_promotions()):
                failures = await self._settle_each()
            self._judged = {run_id: each for run_id, each in self._judged.items() if run_id in self._state.open}
            open_ = [candidate for candidate in self._state.open.values() if candidate.completed]
            metrics.OPEN.set(sum(not each.awaited for each in open_))
            metrics.AWAITING.set(sum(bool(each.awaited) for each in open_))
            return failures

    async def _settle_each(self) -> dict[str, Exception]:
        failures: dict[str, Exception] = {}
        for run_id in [run_id for run_id, candidate in self._state.open.items() if candidate.completed]:
            try:
                await self._settle(run_id)
            except Exception as error:
                log.warning("candidate not settled", run_id=run_id, error=repr(error))
                failures[run_id] = error
        return failures

    def _count_promotions(self) -> int:
        return sum(map(len, self._state.models.values()))

    async def settle_periodically(self) -> None:
        """Settle candidates whose message became a dead letter while the object store was away."""
        while True:
            try:
                if failures := await self.settle_all():
                    log.warning("some candidates are not settled, trying again", runs=sorted(failures))
            except Exception:
                log.exception("candidates cannot be settled, trying again", delay_s=SETTLE_EVERY_S)
            await asyncio.sleep(SETTLE_EVERY_S)

    async def _settle(self, run_id: str) -> None:
        for _ in range(MAX_ROUNDS):
            candidate = self._state.open.get(run_id)
            steps = next_steps(self._state, candidate, self._bus.source) if candidate else []
            if candidate is None or not steps:
                return
            try:
                has_published = await self._perform_steps(steps, candidate)
            except Conflict:
                metrics.CONFLICTS.inc()
                log.info("the champion changed meanwhile: the candidate is decided again", run_id=run_id)
                has_published = True
            if not has_published:
                return  # it waits for somebody
            await self._catch_up()
            if all(isinstance(step, RequestEvaluation) for step in steps):
                return  # the end of an evaluation continues from here
        raise RuntimeError(f"run {run_id} was not settled in {MAX_ROUNDS} rounds: its model's champion keeps changing")

    async def _catch_up(self) -> None:
        """Fold what is new in the stream; each fact comes once, in order."""
        filters = tuple(event.subject_filter() for event in FOLDED)
        start = self._folded_up_to + 1
        async for batch in self._bus.follow(topology.FACTS.name, filters, start, until_caught_up=True):
            for received in batch:
                self._state.apply(received.event, received.envelope, received.sequence)
                self._folded_up_to = received.sequence

    # -- steps --------------------------------------------------------------

    async def _perform_steps(self, steps: Sequence[Step], candidate: Candidate) -> bool:
        """Perform the steps in order; return whether anything was published.

        The first checkpoint that cannot be measured ends the candidate.
        """
        has_published = False
        try:
            for step in steps:
                has_published |= await self._perform(step, candidate)
        except UnmeasurableError as error:
            model = candidate.spec.model or ""
            champion = self._state.champion(model)
            reason = f"{error}; publish promote.requested to promote this run all the same"
            fact = RunNotPromoted(run_id=candidate.run_id, model=model, reason=reason)
            has_published |= await self._perform(
                ConcludeCandidate(fact, champion.sequence if champion else 0), candidate
            )
        return has_published

    async def _perform(self, step: Step, candidate: Candidate) -> bool:
        match step:
            case RequestEvaluation():
                await self._request(step, candidate)
            case JudgeCandidate():
                return await self._judge(step, candidate)
            case ConcludeCandidate():
                await self._conclude(step, candidate)
        return True

    async def _judge(self, step: JudgeCandidate, candidate: Candidate) -> bool:
        """Judge a measured candidate: write its report first, then publish what became of it."""
        if candidate.evaluated is None:
            await self._report(step, candidate)
            return True
        recorded = candidate.evaluated
        reported = JudgedGates(recorded.gates, recorded.champion_version, recorded.configuration)
        known = (reported, self._judged.get(candidate.run_id, reported))
        if (standing := next((each for each in known if each.stand_for(step)), None)) is not None:
            people = await self._evidence.read_people(self._state, step, candidate)
            verdict = renew_pending(standing.gates, step.criteria, people)
        else:
            # The champion or the gates have changed. A candidate that waits is judged by them once, not in every sweep.
            findings = await self._evidence.read_all(self._state, step, candidate)
            verdict = judge(step.criteria, findings.evidence)
            champion_version = step.champion.version if step.champion else None
            self._judged[candidate.run_id] = JudgedGates(verdict.gates, champion_version, step.configuration)
        conclusion = conclude_candidate(step, candidate, verdict)
        if conclusion is None:
            return False
        await self._conclude(conclusion, candidate)
        return True

    async def _conclude(self, step: ConcludeCandidate, candidate: Candidate) -> None:
        fact = step.fact
        if isinstance(fact, ModelPromoted):
            try:
                artifacts = await self._verify_checkpoint(fact.run_id, fact.checkpoint_uri)
                fact = fact.model_copy(update={"artifacts": artifacts})
            except CheckpointLockError as error:
                fact = RunNotPromoted(run_id=fact.run_id, model=fact.model, reason=str(error))
        expected = None if step.sequence is None else ExpectedSequence(step.sequence, step.fence)
        ack = await self._bus.publish(fact, candidate.completed, expected=expected)
        # A rival's promotion to the same version has the same id as ours: then ours is not stored, and
        # the facts, read again, lead to another decision.
        if (label := SETTLED.get(type(fact), "")) and not ack.duplicate:
            metrics.DECIDED.labels(label).inc()
        log.info("concluded", run_id=candidate.run_id, fact=fact.fact, model=fact.model, reason=fact.reason)

    async def _request(self, step: RequestEvaluation, candidate: Candidate) -> None:
        trained = candidate.spec
        if step.target_run_id != candidate.run_id:
            accepted = await self._read_last(step.target_run_id, RunAccepted)
            if accepted is None:
                raise UnmeasurableError(
                    f"the champion {step.target_run_id} is no run of this bus, so it cannot be measured on this dataset"
                )
            trained = accepted.spec
        cause = candidate.completed
        assert cause is not None
        event = evaluation_request(step, trained)
        envelope = Envelope(
            id=step.event_id,
            source=self._bus.source,
            type=TrainRequested.type,
            time=self._bus.clock.now(),
            subject=step.target_run_id,
            correlation_id=cause.correlation_id or cause.id,
            causation_id=cause.id,
            traceparent=cause.traceparent,
        )
        await self._bus.publish_event(event, event.subject, envelope)
        metrics.REQUESTED.labels("candidate" if step.target_run_id == candidate.run_id else "champion").inc()
        log.info("evaluation requested", run_id=candidate.run_id, target=step.target_run_id)

    async def _report(self, step: JudgeCandidate, candidate: Candidate) -> None:
        """Judge the candidate and publish ``evaluated`` with the verdict of each gate and the report."""
        spec, champion = candidate.spec, step.champion
        findings = await self._evidence.read_all(self._state, step, candidate)
        verdict = judge(step.criteria, findings.evidence)
        comparison = await self._compare(step, candidate, findings, verdict)
        with metrics.REPORT_SECONDS.time():
            png = await asyncio.to_thread(plot.comparison_png, comparison)
            folder = f"s3://{self._bucket}/{spec.experiment}/{candidate.run_id}/evaluation"
            page = await asyncio.to_thread(render_page, comparison)
            report = (
                await self._store(folder, "report.md", reporting.markdown(comparison).encode(), "text/markdown"),
                await self._store(folder, "report.html", page.encode(), "text/html"),
                await self._store(folder, "report.json", reporting.to_json(comparison), "application/json"),
                await self._store(folder, "comparison.png", png, "image/png"),
            )
        fact = RunEvaluated(
            run_id=candidate.run_id,
            evaluation_run_id=step.evaluation_run_id,
            metrics=step.outcome.metrics,
            champion_run_id=champion.fact.run_id if champion else None,
            champion_metrics=step.champion_metrics or {},
            report=report,
            gates=verdict.gates,
            champion_version=champion.version if champion else None,
            configuration=step.configuration,
        )
        await self._bus.publish(fact, candidate.completed, expected=ExpectedSequence(0))

    async def _compare(
        self, step: JudgeCandidate, candidate: Candidate, findings: Findings, verdict: Verdict
    ) -> reporting.Comparison:
        """Return what the report shows, with the content of the samples that got worse."""
        champion, predictions = step.champion, findings.evidence.predictions
        samples: dict[str, reporting.SampleContent] = {}
        prepared = await self._read_last(candidate.run_id, RunPrepared)
        if predictions and predictions.regressions and prepared:
            keys = [each.key for each in predictions.regressions]
            samples = await read_samples(self._objects, prepared.manifest_uri, "test", keys)
        return reporting.Comparison(
            name=candidate.spec.name,
            run_id=candidate.run_id,
            model=candidate.spec.model or "",
            dataset_id=candidate.dataset_id,
            criteria=step.criteria,
            candidate=step.outcome.metrics,
            champion=step.champion_metrics or {},
            champion_label=f"v{champion.fact.version} ({champion.fact.run_id})" if champion else "",
            verdict=verdict,
            predictions=predictions,
            committed=findings.committed,
            candidate_footprint=findings.candidate,
            champion_footprint=findings.champion,
            samples=samples,
        )

    async def _store(self, folder: str, name: str, content: bytes, content_type: str) -> Artifact:
        """Store a file of the report. Its hash is in its name, so what a fact points at never changes."""
        sha256 = hashlib.sha256(content).hexdigest()
        uri = f"{folder}/{sha256[:12]}/{name}"
        await self._objects.put(uri, content, content_type=content_type)
        return Artifact(name=name, uri=uri, sha256=sha256, size_bytes=len(content))

    # -- requests of an operator --------------------------------------------

    async def on_promote_requested(self, received: Message[PromoteRequested]) -> None:
        """Make the run's checkpoint that is judged (``find_judged``) the champion, once for each request."""
        request = received.event
        await self._by_request(received, request.model, lambda champion: self._promotion(request, champion))

    async def on_rollback_requested(self, received: Message[RollbackRequested]) -> None:
        """Bring the champion before the present one back, once for each request."""
        request = received.event
        await self._by_request(received, request.model, lambda champion: self._rollback(request, champion))

    async def _by_request(self, received: Message[Any], model: str, make: Make) -> None:
        async with self._lock:
            for _ in range(MAX_ROUNDS):
                await self._catch_up()
                history = self._state.models.get(model, [])
                # A version that this very request led to: it was delivered before.
                done = next((version for version in history if version.caused_by == received.envelope.id), None)
                if done is not None:
                    break
                champion = self._state.champion(model)
                fact = await make(champion)
                if fact is None:
                    break
                fence = ExpectedSequence(champion.sequence if champion else 0)
                with suppress(Conflict):
                    ack = await self._bus.publish(fact, received.envelope, expected=fence)
                    if not ack.duplicate:  # else a rival's promotion has this version
                        metrics.DECIDED.labels("rolled_back" if fact.rollback else "by_request").inc()
                        log.info("champion changed by request", model=model, run_id=fact.run_id)
            if done is not None and not done.fact.rollback:
                published = await self._read_last(done.fact.run_id, RunPromoted)
                if published is None:
                    await self._bus.publish(run_promoted(done), received.envelope)
        # Those who compare themselves with the champion have another one now. The failure of one is not the request's.
        await self.settle_all()

    async def on_configure_requested(self, received: Message[ConfigureRequested]) -> None:
        """Set a model's gates, once for each request. Open candidates are judged by them."""
        request = received.event

        async def make_fact() -> ModelConfigured:
            current = self._state.settings_of(request.model).configuration
            if request.replaces is not None and request.replaces != current:
                raise PoisonMessage(
                    f"the gates of model {request.model!r} are at version {current}, not {request.replaces}: they were "
                    "changed meanwhile; read them again (`trainbus models gates`) and repeat the change"
                )
            return ModelConfigured(
                model=request.model,
                version=current + 1,
                gates=request.gates,
                reason=request.reason,
                user=request.user,
            )

        await self._record(received, make_fact)

    async def on_approve_requested(self, received: Message[ApproveRequested]) -> None:
        """Record that a person approves or declines a candidate; the first answer stands."""
        request = received.event

        async def make_fact() -> ModelApproved:
            candidate = self._state.open.get(request.run_id)
            if candidate is None or candidate.spec.model != request.model:
                raise PoisonMessage(
                    f"run {request.run_id} is no open candidate of model {request.model!r}: it is settled, or never "
                    "competed; `trainbus models` lists those that await approval"
                )
            if candidate.evaluated is None:
                raise PoisonMessage(f"run {request.run_id} is not evaluated yet: approve it once its report is there")
            settings = self._state.settings_of(request.model)
            if not settings.gates.approval:
                raise PoisonMessage(
                    f"model {request.model!r} asks for no approval: `trainbus models promote` promotes a run regardless"
                )
            if (known := settings.approvals.get(request.run_id)) is not None:
                answer = "approved" if known.approved else "declined"
                raise PoisonMessage(f"run {request.run_id} is {answer} already; the first answer stands")
            return ModelApproved(
                model=request.model,
                run_id=request.run_id,
                approved=request.approved,
                reason=request.reason,
                user=request.user,
            )

        await self._record(received, make_fact)

    async def on_stage_requested(self, received: Message[StageRequested]) -> None:
        """Let an alias name a version of a model, or remove it, once for each request."""
        request = received.event

        async def make_fact() -> ModelStaged:
            history = self._state.models.get(request.model, [])
            version = next((each for each in history if each.version == request.version), None)
            if request.version is not None and version is None:
                there = ", ".join(str(each.version) for each in history[-20:]) or "none"
                raise PoisonMessage(
                    f"model {request.model!r} has no version {request.version}; there is: {there} "
                    "(`trainbus models show`)"
                )
            if request.version is None and request.alias not in self._state.settings_of(request.model).aliases:
                raise PoisonMessage(f"model {request.model!r} has no alias {request.alias!r}, so none is removed")
            return ModelStaged(
                model=request.model,
                alias=request.alias,
                version=request.version,
                run_id=version.fact.run_id if version else None,
                checkpoint_uri=version.fact.checkpoint_uri if version else None,
                request_id=received.envelope.id,
                reason=request.reason,
                user=request.user,
            )

        await self._record(received, make_fact)

    async def _record(self, received: Message[Any], make: Callable[[], Awaitable[ModelFact]]) -> None:
        """Publish the fact that a request about a model leads to, once; then judge the candidates again."""
        async with self._lock:
            for _ in range(MAX_ROUNDS):
                await self._catch_up()
                if received.envelope.id in self._state.answered:
                    break  # it was delivered before
                fact = await make()
                # A rival's fact with the same id makes ours a repetition: the state, read again, shows it.
                await self._bus.publish(fact, received.envelope)
            else:
                raise RuntimeError(f"request {received.envelope.id} was not recorded in {MAX_ROUNDS} rounds")
        await self.settle_all()

    async def _promotion(self, request: PromoteRequested, champion: Version | None) -> ModelPromoted | None:
        run_id = request.run_id
        if champion is not None and champion.fact.run_id == run_id:
            log.info("already the champion", model=request.model, run_id=run_id)
            return None
        accepted = await self._read_last(run_id, RunAccepted)
        if accepted is None:
            raise PoisonMessage(f"there is no run {run_id!r}: promote one that `trainbus ps` lists")
        trained_for = accepted.spec.model
        if trained_for not in (None, request.model):
            raise PoisonMessage(f"run {run_id} was trained for model {trained_for!r}, not for {request.model!r}")
        completed = await self._read_last(run_id, RunCompleted)
        if completed is None or completed.checkpoint is None:
            state = "has not completed" if completed is None else "has no committed checkpoint"
            raise PoisonMessage(f"run {run_id} {state}: only a completed run with a checkpoint can be promoted")
        evaluated = await self._read_last(run_id, RunEvaluated)
        uri = self._state.measured.get(evaluated.evaluation_run_id) if evaluated else None
        uri = uri or await self._find_judged(accepted.spec, run_id) or completed.checkpoint.uri
        artifacts = await self._require_intact(uri, run_id)
        prepared = await self._read_last(run_id, RunPrepared)
        return ModelPromoted(
            model=request.model,
            version=next_version(champion),
            run_id=run_id,
            checkpoint_uri=uri,
            artifacts=artifacts,
            dataset_id=prepared.identity if prepared else None,
            # Never its training metrics: a candidate to come would be compared with those.
            metrics=evaluated.metrics if evaluated else {},
            previous_run_id=champion.fact.run_id if champion else None,
            reason=request.reason,
        )

    async def _find_judged(self, spec: RunSpec, run_id: str) -> str | None:
        """Return the checkpoint that would be measured of a run; None: its final one."""
        subjects_read = [subjects.fact("run", run_id, fact.fact) for fact in (CheckpointCommitted, CheckpointDeleted)]
        history = [received.event for received in await self._bus.read_history(*subjects_read)]
        deleted = {event.uri for event in history if isinstance(event, CheckpointDeleted)}
        committed = [event for event in history if isinstance(event, CheckpointCommitted)]
        judged = find_judged(spec, [each for each in committed if each.checkpoint.uri not in deleted])
        return None if judged is None else judged.checkpoint.uri

    async def _rollback(self, request: RollbackRequested, champion: Version | None) -> ModelPromoted:
        before = self._state.before_champion(request.model)
        if champion is None or before is None:
            has = "has no champion" if champion is None else "has no champion before the present one"
            raise PoisonMessage(f"model {request.model!r} {has}, so there is nothing to roll back to")
        await self._require_intact(before.fact.checkpoint_uri, before.fact.run_id)
        return before.fact.model_copy(
            update={
                "version": next_version(champion),
                "previous_run_id": champion.fact.run_id,
                "reason": request.reason,
                "rollback": True,
            }
        )

    async def _read_last(self, run_id: str, fact: type[F]) -> F | None:
        """Return the newest fact of a type about a run."""
        found = await self._bus.get_last_message(subjects.fact("run", run_id, fact.fact))
        return found.event if found else None

    async def _require_intact(self, uri: str, run_id: str) -> dict[str, str]:
        try:
            return await self._verify_checkpoint(run_id, uri)
        except CheckpointLockError as error:
            raise PoisonMessage(str(error)) from error

    async def _verify_checkpoint(self, run_id: str, uri: str) -> dict[str, str]:
        """Return the SHA-256 of the checkpoint's artifacts; its manifest and they are as they were committed.

        The manifest names every byte of the checkpoint by its hash, and the fact that committed it names the manifest.
        Each reader of the weights compares their hashes; the artifacts are small, and are compared here.

        Raises:
            CheckpointLockError: it must not be promoted; the text says why.
        """
        try:
            manifest = await self._objects.get(uri)
        except ObjectNotFound:
            text = f"the checkpoint of run {run_id} is no longer in the store ({uri}): promote another run"
            raise CheckpointLockError(text) from None
        commits = await self._bus.read_history(subjects.fact("run", run_id, CheckpointCommitted.fact))
        there = [each.event.manifest_sha256 for each in commits if each.event.checkpoint.uri == uri]
        expected = [sha256 for sha256 in there if sha256 is not None]
        found = hashlib.sha256(manifest).hexdigest()
        if not expected or found in expected:
            return await self._verify_artifacts(run_id, manifest)
        raise CheckpointLockError(
            f"the manifest {uri} is not the one that was committed: its SHA-256 is {found}, {expected[-1]} was "
            f"committed; `trainbus checkpoints verify {run_id} --repair` writes the committed one again"
        )

    async def _verify_artifacts(self, run_id: str, manifest: bytes) -> dict[str, str]:
        try:
            files = artifacts_of(files_of(manifest))
        except ValueError:
            return {}  # it names no files, so no artifacts
        with tempfile.TemporaryDirectory(prefix="trainbus-artifacts-") as folder:
            for name, file in files.items():
                path = Path(folder) / "artifact"
                try:
                    await restore_file(self._objects, file, path)
                    found = await asyncio.to_thread(hash_file, path)
                except (ObjectNotFound, ObjectCorrupted) as error:
                    found = str(error)
                if found != file.sha256:
                    raise CheckpointLockError(
                        f"the artifact {name!r} of run {run_id} is not the one that was committed ({found}); "
                        f"`trainbus checkpoints verify {run_id} --repair` writes the committed one again"
                    )
        return {name: file.sha256 for name, file in files.items()}


def build(settings: Settings) -> Service:
    """The service, ready to be run."""
    service = Service("evaluation", settings)
    objects = service.add_object_store(ObjectStore(settings))
    evaluator = Evaluator(service.bus, objects, settings)
    for event in topology.EVALUATION.events:
        service.bus.subscriber(topology.EVALUATION, event)(evaluator.on_run_ended)
    service.add_background_task(evaluator.settle_periodically)
    service.bus.subscriber(topology.EVALUATION_REQUESTS, PromoteRequested)(evaluator.on_promote_requested)
    service.bus.subscriber(topology.EVALUATION_REQUESTS, RollbackRequested)(evaluator.on_rollback_requested)
    service.bus.subscriber(topology.EVALUATION_REQUESTS, ConfigureRequested)(evaluator.on_configure_requested)
    service.bus.subscriber(topology.EVALUATION_REQUESTS, ApproveRequested)(evaluator.on_approve_requested)
    service.bus.subscriber(topology.EVALUATION_REQUESTS, StageRequested)(evaluator.on_stage_requested)
    return service
