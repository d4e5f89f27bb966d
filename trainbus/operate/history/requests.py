"""Answers to requests, repeated: a request is accepted or rejected by itself, and by what had been folded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from contracts import subjects
from contracts.base import run_id_for
from contracts.envelope import EnvelopeError, InvalidData, RawMessage, decode, open_envelope
from contracts.events.run import RunAccepted, RunRejected
from contracts.events.train import RestoreRequested, TrainRequested
from services.scheduler.core import admission
from services.scheduler.core.decisions import AcceptRun, RejectRun, answer_fact
from services.scheduler.core.state.cluster import Cluster

#: The requests that create runs.
REQUEST_SUBJECTS = (subjects.request(TrainRequested.verb), subjects.request(RestoreRequested.verb))


class RequestIndex:
    """Every request for a run, by the run's id. Requests are decoded when their answers are computed."""

    def __init__(self, messages: Iterable[RawMessage] = ()) -> None:
        self._requests: defaultdict[str, list[RawMessage]] = defaultdict(list)
        for raw in messages:
            self.add(raw)

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    def add(self, raw: RawMessage) -> None:
        """Add a request. One without a readable envelope has no answer."""
        if raw.subject not in REQUEST_SUBJECTS:
            return
        try:
            envelope, _ = decode(raw)
        except InvalidData as error:
            envelope = error.envelope
        except EnvelopeError:
            return
        self._requests[run_id_for(envelope.source, envelope.id)].append(raw)

    def answers(self, cluster: Cluster, run_id: str) -> list[RunAccepted | RunRejected]:
        """Return the answer to each request for this run, given ``cluster``.

        There is more than one if other requests had the same id: the first that was answered is the run.
        """
        requests = self._requests.get(run_id, ())
        return [answer for raw in requests if (answer := _answer(cluster, run_id, raw)) is not None]


def _answer(cluster: Cluster, run_id: str, raw: RawMessage) -> RunAccepted | RunRejected | None:
    answer: AcceptRun | RejectRun
    try:
        envelope, event = decode(raw)
    except InvalidData as error:
        envelope, data = open_envelope(raw)
        answer = admission.answer_invalid(run_id, data, error.problems)
    else:
        if isinstance(event, TrainRequested):
            answer = admission.answer_train(cluster, run_id, event)
        elif isinstance(event, RestoreRequested) and (parent := cluster.runs.get(event.run_id)) is not None:
            answer = admission.answer_restore(parent, run_id, event)
        else:
            return None
    return answer_fact(answer, envelope.id, envelope.source)
