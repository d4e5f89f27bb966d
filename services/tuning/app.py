"""The tuning service: requests, runs' facts and their progress become the facts of studies, and those become runs.

It keeps nothing of its own. It folds the stream from its beginning, so an instance that begins again, or a second one,
comes to the same decisions; each is fenced on the last fact of its study.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import structlog

from contracts import subjects, topology
from contracts.base import Request, study_id_for
from contracts.envelope import Envelope, InvalidData, RawMessage
from contracts.events.run import (
    RunAccepted,
    RunCancelled,
    RunCancelling,
    RunCompleted,
    RunFact,
    RunFailed,
    RunPrepared,
    RunProgress,
    RunRejected,
)
from contracts.events.study import (
    StudyAccepted,
    StudyCompleted,
    StudyFact,
    StudyRejected,
    StudyStopped,
    TrialEnded,
    TrialFact,
)
from contracts.events.train import CancelRequested, StopStudyRequested, TuneRequested
from contracts.problems import FieldProblem
from contracts.state.study import Studies, Study, Trial
from services.kit.bus import Bus, Conflict, ExpectedSequence, Message, PoisonMessage
from services.kit.concurrency import cancel_and_wait
from services.kit.service import Service
from services.kit.settings import Settings
from services.tuning import metrics
from services.tuning.core import admission
from services.tuning.core.decide import end_run, end_without_objectives, next_decision, report_trial, trial_request
from services.tuning.core.progress import epoch_of

log = structlog.get_logger(__name__)

FOLLOWED = topology.SERVICES["tuning"].follows
#: Facts in which a reason names its problems.
MAX_NAMED_PROBLEMS = 5


class Tuner:
    """Brings every study on, one fact at a time."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._studies = Studies()
        self._lock = asyncio.Lock()
        self._folded_up_to = 0
        #: What is known of the runs of trials: those requested, ended or being cancelled, and their datasets.
        self._answered: set[str] = set()
        self._ended: dict[str, RunFact] = {}
        self._cancelling: set[str] = set()
        self._datasets: dict[str, str] = {}
        self._causes: dict[str, Envelope] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self.caught_up = asyncio.Event()

    # -- requests -----------------------------------------------------------

    async def on_tune(self, received: Message[TuneRequested]) -> None:
        """Accept or reject a study, once."""
        study_id = study_id_for(received.envelope.source, received.envelope.id)
        async with self._lock:
            await self._catch_up()
            if study_id not in self._studies.sequences:
                await self._answer(study_id, received)
        await self.advance(study_id)

    async def _answer(self, study_id: str, received: Message[TuneRequested]) -> None:
        request, envelope = received.event, received.envelope
        problems = admission.find_problems(request, self._studies.studies)
        if problems:
            await self._reject(study_id, request.name, problems, envelope)
            return
        spec = admission.spec_of(request)
        known = admission.known_trials(spec, self._studies.studies)
        fact = StudyAccepted(
            study_id=study_id, spec=spec, request_id=envelope.id, request_source=envelope.source, known=known
        )
        await self._publish(fact, envelope)
        metrics.STUDIES.labels("accepted").inc()
        log.info("study accepted", study_id=study_id, name=spec.name, trials=spec.trials)

    async def _reject(self, study_id: str, name: str | None, problems: list[FieldProblem], cause: Envelope) -> None:
        text = "; ".join(
            f"{each.field}: {each.message}" if each.field else each.message for each in problems[:MAX_NAMED_PROBLEMS]
        )
        reason = f"the study cannot run as it is: {text}"
        await self._publish(StudyRejected(study_id=study_id, name=name, reason=reason, problems=tuple(problems)), cause)
        metrics.STUDIES.labels("rejected").inc()
        log.info("study rejected", study_id=study_id, reason=reason)

    async def on_invalid(self, raw: RawMessage, error: InvalidData) -> bool:
        """Reject a request for a study that does not fit its schema."""
        if error.envelope.type != TuneRequested.type:
            return False
        study_id = study_id_for(error.envelope.source, error.envelope.id)
        async with self._lock:
            if study_id not in self._studies.sequences:
                await self._reject(study_id, None, error.problems, error.envelope)
        return True

    async def on_stop(self, received: Message[StopStudyRequested]) -> None:
        """End a study, and cancel its runs."""
        study_id = received.event.study_id
        async with self._lock:
            await self._catch_up()
            study = self._studies.studies.get(study_id)
            if study is None:
                raise PoisonMessage(f"there is no study {study_id!r}: take one that `trainbus tune ls` lists")
            while study.state == "running":
                fact = StudyStopped(study_id=study_id, reason=received.event.reason)
                if await self._publish(fact, received.envelope):
                    metrics.STUDIES.labels("stopped").inc()
        await self.advance(study_id)

    # -- what happens -------------------------------------------------------

    async def follow(self) -> None:
        """Fold the facts of studies and of runs as they come, and bring on the studies that they concern."""
        filters = tuple(event.subject_filter() for event in FOLLOWED if event is not RunProgress)
        async with self._lock:
            await self._catch_up()
        self.caught_up.set()
        await self._advance_all()
        followed = self._bus.follow(topology.FACTS.name, filters, self._folded_up_to + 1)
        async with aclosing(followed) as batches:
            async for batch in batches:
                async with self._lock:
                    concerned = {study_id for each in batch if (study_id := self._fold(each)) is not None}
                for study_id in concerned:
                    await self.advance(study_id)

    async def _catch_up(self) -> None:
        """Fold what is new in the stream; each fact comes once, in order."""
        filters = tuple(event.subject_filter() for event in FOLLOWED if event is not RunProgress)
        start = self._folded_up_to + 1
        async for batch in self._bus.follow(topology.FACTS.name, filters, start, until_caught_up=True):
            for received in batch:
                self._fold(received)

    def _fold(self, received: Message[Any]) -> str | None:
        """Fold one fact; return the study that it concerns. A fact that was folded before changes nothing."""
        self._folded_up_to = max(self._folded_up_to, received.sequence)
        event = received.event
        if isinstance(event, StudyFact):
            if isinstance(event, StudyAccepted):
                self._causes.setdefault(event.study_id, received.envelope)
            return event.study_id if self._fold_study(event, received.sequence) else None
        if not isinstance(event, RunFact):
            return None
        match event:
            case RunAccepted():
                if event.spec.study is None:
                    return None
                self._answered.add(event.run_id)
            case RunPrepared():
                if event.run_id in self._studies.runs and not event.datasets:
                    self._datasets[event.run_id] = event.dataset_id
            case RunCancelling():
                self._cancelling.add(event.run_id)
            case RunRejected() | RunCompleted() | RunFailed() | RunCancelled():
                if event.run_id in self._studies.runs:
                    self._answered.add(event.run_id)
                    self._ended[event.run_id] = event
        found = self._studies.runs.get(event.run_id)
        return found[0] if found is not None else None

    def _fold_study(self, fact: StudyFact, sequence: int) -> bool:
        if sequence <= self._studies.sequences.get(fact.study_id, 0):
            return False
        self._studies.apply(fact, sequence)
        return True

    async def _advance_all(self) -> None:
        for study_id in list(self._studies.studies):
            await self.advance(study_id)

    async def advance(self, study_id: str) -> None:
        """Publish what a study does next until it waits for its runs, and see that its runs are as its facts say."""
        async with self._lock:
            study = self._studies.studies.get(study_id)
            if study is None:
                return
            while study.state == "running" and (fact := await self._next_fact(study)) is not None:
                await self._publish(fact, self._causes.get(study_id))
            await self._match_runs(study)
            metrics.OPEN.set(sum(each.state == "running" for each in self._studies.studies.values()))

    async def _next_fact(self, study: Study) -> TrialFact | StudyCompleted | None:
        for trial in study.running:
            ended = self._ended.get(trial.run_id)
            if ended is not None and not trial.prune:
                await self._read_remaining_progress(study, trial)
                if trial.state == "running":
                    return self._end_trial(study, trial, ended)
        with metrics.SUGGEST_SECONDS.time():
            return await asyncio.to_thread(next_decision, study)

    def _end_trial(self, study: Study, trial: Trial, ended: RunFact) -> TrialFact:
        if isinstance(ended, RunCompleted):
            return end_run(study, trial, ended, self._datasets.get(trial.run_id))
        outcome = "cancelled" if isinstance(ended, RunCancelled) else "failed"
        reason = str(getattr(ended, "reason", ""))
        return TrialEnded(
            study_id=study.study_id, trial=trial.number, run_id=trial.run_id, outcome=outcome, reason=reason
        )

    async def _publish(self, fact: StudyFact, cause: Envelope | None) -> bool:
        """Publish a fact behind the last one of its study, and fold it; False if another instance was first."""
        study_id = fact.study_id
        expected = ExpectedSequence(self._studies.sequences.get(study_id, 0), subjects.study(study_id))
        try:
            ack = await self._bus.publish(fact, cause, expected=expected)
        except Conflict:
            ack = None
        if ack is None or ack.duplicate:
            # Another instance was first, or this one before it was killed: what is stored counts.
            metrics.CONFLICTS.inc()
            await self._catch_up()
            return False
        self._fold_study(fact, ack.sequence)
        outcome = fact.outcome if isinstance(fact, TrialEnded) else fact.fact.removeprefix("trial_")
        if isinstance(fact, TrialFact) and outcome != "reported":
            metrics.TRIALS.labels(outcome).inc()
        if isinstance(fact, StudyCompleted):
            metrics.STUDIES.labels("completed").inc()
        return True

    # -- runs ---------------------------------------------------------------

    async def _match_runs(self, study: Study) -> None:
        """Request the runs of trials that have none yet, cancel those that shall end, follow those that run."""
        for trial in study.trials:
            if trial.state == "running" and study.state == "running":
                if trial.run_id not in self._answered:
                    await self._request_run(study, trial)
                self._follow_progress(study.study_id, trial.run_id)
            else:
                self._stop_following(trial.run_id)
                is_over = trial.run_id in self._ended or trial.run_id in self._cancelling
                is_unwanted = trial.state in ("pruned", "cancelled", "failed")
                if is_unwanted and not is_over and trial.run_id in self._answered:
                    await self._cancel_run(study, trial)

    async def _request_run(self, study: Study, trial: Trial) -> None:
        wanted = trial_request(study, trial)
        await self._send(wanted.request, wanted.event_id, study.study_id)
        self._answered.add(trial.run_id)

    async def _cancel_run(self, study: Study, trial: Trial) -> None:
        request = CancelRequested(run_id=trial.run_id, reason=trial.reason or study.reason)
        await self._send(request, f"cancel/{trial.run_id}", study.study_id)
        self._cancelling.add(trial.run_id)

    async def _send(self, request: Request, event_id: str, study_id: str) -> None:
        cause = self._causes.get(study_id)
        envelope = Envelope(
            id=event_id,
            source=self._bus.source,
            type=request.type,
            time=self._bus.clock.now(),
            subject=study_id,
            correlation_id=(cause.correlation_id or cause.id) if cause else event_id,
            causation_id=cause.id if cause else "",
            traceparent=cause.traceparent if cause else "",
        )
        await self._bus.publish_event(request, request.subject, envelope)

    # -- progress -----------------------------------------------------------

    def _follow_progress(self, study_id: str, run_id: str) -> None:
        if run_id not in self._followers and run_id not in self._ended:
            self._followers[run_id] = asyncio.create_task(self._read_progress(study_id, run_id))

    def _stop_following(self, run_id: str) -> None:
        if (task := self._followers.pop(run_id, None)) is not None:
            task.cancel()

    async def _read_progress(self, study_id: str, run_id: str) -> None:
        """Report what a trial's run reports, as it comes."""
        followed = self._bus.follow(topology.PROGRESS.name, (subjects.progress(run_id),), idle_s=5.0)
        async with aclosing(followed) as batches:
            async for batch in batches:
                async with self._lock:
                    found = self._studies.trial_of(run_id)
                    reported = [await self._report(*found, each.event) for each in batch] if found else []
                if any(reported):
                    await self.advance(study_id)

    async def _read_remaining_progress(self, study: Study, trial: Trial) -> None:
        """Report what a run that has ended reported last: its facts may overtake its progress."""
        for each in await self._bus.read_history(subjects.progress(trial.run_id), stream=topology.PROGRESS.name):
            await self._report(study, trial, each.event)

    async def _report(self, study: Study, trial: Trial, progress: Any) -> bool:
        if not isinstance(progress, RunProgress) or progress.kind != "training":
            return False
        reported = False
        for point in progress.points:
            step = epoch_of(study.spec, trial, progress, point)
            reports = await asyncio.to_thread(report_trial, study, trial, step, point.values)
            fact = reports or end_without_objectives(study, trial, point.values)
            if fact is not None:
                reported |= await self._publish(fact, self._causes.get(study.study_id))
        return reported

    async def stop(self) -> None:
        """End the readers of progress."""
        tasks, self._followers = list(self._followers.values()), {}
        await cancel_and_wait(*tasks)


def build(settings: Settings) -> Service:
    """The service, ready to be run."""
    service = Service("tuning", settings)
    tuner = Tuner(service.bus)
    consumer = topology.TUNING_REQUESTS
    service.bus.subscriber(consumer, TuneRequested, on_invalid=tuner.on_invalid)(tuner.on_tune)
    service.bus.subscriber(consumer, StopStudyRequested)(tuner.on_stop)
    service.add_background_task(tuner.follow)
    service.add_stop_action(tuner.stop)
    service.add_readiness_check("folded", tuner.caught_up.is_set)
    return service
