"""Answers to requests, made again: a request is accepted or rejected by itself, and by what had been folded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from contracts import subjects
from contracts.base import Fact, run_id_for
from contracts.envelope import Envelope, EnvelopeError, InvalidData, RawMessage, decode, open_envelope
from contracts.events.run import RunAccepted, RunRejected
from contracts.events.train import RestoreRequested, TrainRequested
from services.scheduler.core import admission
from services.scheduler.core.decisions import AcceptRun, RejectRun, answer_fact
from services.scheduler.core.state.cluster import Cluster

#: The requests that a run comes of.
REQUEST_SUBJECTS = (subjects.request(TrainRequested.verb), subjects.request(RestoreRequested.verb))


class RecordedRequest(NamedTuple):
    """A request as it stands in its stream; it is decoded when its answer is looked at."""

    raw: RawMessage

    def event(self) -> tuple[Envelope, Any]:
        return decode(self.raw)


class RequestIndex:
    """Every request for a run, by the run that it means."""

    def __init__(self, messages: Iterable[RawMessage] = ()) -> None:
        self._asked: dict[str, list[RecordedRequest]] = {}
        for raw in messages:
            self.add(raw)

    def __len__(self) -> int:
        return sum(map(len, self._asked.values()))

    def add(self, raw: RawMessage) -> None:
        """Keep a request. One without a readable envelope has no answer."""
        if raw.subject not in REQUEST_SUBJECTS:
            return
        try:
            envelope, _ = decode(raw)
        except InvalidData as error:
            envelope = error.envelope
        except EnvelopeError:
            return
        self._asked.setdefault(run_id_for(envelope.source, envelope.id), []).append(RecordedRequest(raw))

    def answers(self, cluster: Cluster, run_id: str) -> list[RunAccepted | RunRejected]:
        """What each request for this run is answered with by who has folded ``cluster``.

        There is more than one if other requests had the same id: the first that was answered is the run.
        """
        return [answer for asked in self._asked.get(run_id, ()) if (answer := _answer(cluster, run_id, asked))]


def is_answer(fact: Fact | None) -> bool:
    return isinstance(fact, RunAccepted | RunRejected)


def _answer(cluster: Cluster, run_id: str, asked: RecordedRequest) -> RunAccepted | RunRejected | None:
    try:
        envelope, event = asked.event()
    except InvalidData as error:
        _, data = open_envelope(asked.raw)
        refused = admission.answer_invalid(run_id, data, error.problems)
        return answer_fact(refused, error.envelope.id, error.envelope.source)
    answer: AcceptRun | RejectRun
    if isinstance(event, TrainRequested):
        answer = admission.answer_train(cluster, run_id, event)
    elif isinstance(event, RestoreRequested) and (parent := cluster.runs.get(event.run_id)) is not None:
        answer = admission.answer_restore(parent, run_id, event)
    else:
        return None
    return answer_fact(answer, envelope.id, envelope.source)
