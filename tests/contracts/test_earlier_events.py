"""What earlier versions have published is read as the events of today, on the subjects of then, in one place."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any, get_args

import pytest

from contracts import topology
from contracts.base import Fact, request_id_for
from contracts.earlier_events import (
    EARLIER_EVENTS,
    AdoptPolicyRequestedV1,
    PolicyAdoptedV1,
    RunPreempting,
    model_of,
    read_data,
    subject_filters,
)
from contracts.envelope import EnvelopeError, InvalidData, RawMessage, decode, encode, fact_envelope, type_for_subject
from contracts.events import BY_NAME, BY_TYPE
from contracts.events.capacity import PolicyAdopted
from contracts.events.run import BREAKS, NODE_FAULTS, RunPlaced, RunStopping, StopReason, queue_reason_of
from contracts.events.train import AdoptPolicyRequested
from contracts.scheduling import Policy, Preemption
from services.scheduler.core.fold import fold
from tests.scheduler.snapshot_format import FACTS

NOW = datetime(2026, 1, 2, tzinfo=UTC)
#: (sentence, queue_reason, then) of a stop of version 1 -> the reason that it is read with.
REASONS: dict[tuple[str, str, str], StopReason] = {
    ("gives way to run r2 of priority 3", "preempted", "queue"): "preempted",
    ("whatever a later scheduler said", "preempted", "queue"): "preempted",
    ("it is placed for the first time", "new", "queue"): "preempted",
    ("shrinks by 2 for run r2 of higher priority", "resized", "queue"): "resized",
    ("grows from 2 to 4 slots", "resized", "queue"): "resized",
    ("node n2 is being drained", "preempted", "queue"): "drained",
    ("maintenance of node n2 begins", "preempted", "queue"): "maintenance",
    ("node n2 is taken away within 60 s (spot: terminate)", "preempted", "queue"): "notice",
    ("node n2 has released its ranks", "preempted", "queue"): "released",
    (
        "team a has used its 8 slot-hours of h200 of this period; the next one begins at noon",
        "preempted",
        "queue",
    ): "quota_spent",
    ("node n2 is lost", "node lost", "queue"): "node_lost",
    ("what nobody has foreseen", "node lost", "queue"): "node_lost",
    ("node n2 is unfit: a fan is loud", "node lost", "queue"): "unfit",
    ("rank 0 on n1 has made no step for 61 s after step 7", "node lost", "queue"): "stalled",
    ("its ranks on n1, n2 have not started within 100 s of the placement", "node lost", "queue"): "start_deadline",
    ("ranks on n1 failed: the store is away", "node lost", "queue"): "infrastructure",
    ("ranks on n1 failed: KeyError", "crashed", "queue"): "crashed",
    ("cancelled by request", "preempted", "cancel"): "cancelled",
    ("node n2 is being drained", "preempted", "cancel"): "cancelled",
    ("the run is over", "preempted", "cancel"): "run_over",
    ("it has had its slots for 100 s, and its limit (scheduling.limit_s) is 100 s", "preempted", "fail"): "time_limit",
}
OLD = RunPreempting(run_id="r1", generation=2, reason="node n2 is lost", queue_reason="node lost", grace_s=0)


def stored(fact: Fact, subject: str | None = None, sequence: int = 1) -> RawMessage:
    headers, body = encode(fact, fact_envelope(fact, "trainbus/scheduler", NOW))
    return RawMessage(subject or fact.subject, body, headers, "FACTS", sequence, NOW)


@pytest.mark.parametrize(("said", "reason"), REASONS.items())
def test_a_stop_of_version_1_is_read_with_its_reason(said: tuple[str, Any, Any], reason: StopReason) -> None:
    sentence, queue_reason, then = said
    old = OLD.model_copy(update={"reason": sentence, "queue_reason": queue_reason, "then": then})
    envelope, event = decode(stored(old))
    assert isinstance(event, RunStopping)
    assert (event.reason, event.message, event.then, event.grace_s) == (reason, sentence, then, 0)
    assert (event.run_id, event.generation) == ("r1", 2)
    # It is today's event in all but where it is stored, and the name by which it is told from others.
    assert (envelope.type, envelope.id) == (RunStopping.type, "run/r1/preempting/2")
    if then == "queue" and queue_reason != "new":
        assert queue_reason_of(event.reason) == queue_reason


def test_what_a_stop_of_version_1_says_beside_its_reason_stays() -> None:
    fields: dict[str, Any] = {"preemptor": "r2", "cost_slot_s": 3.5, "gain_slot_s": 90.0, "grace_s": 30.0}
    old = OLD.model_copy(update=fields)
    event = read_data(RunPreempting.type, json.loads(old.model_dump_json()))
    assert {name: getattr(event, name) for name in fields} == fields


@pytest.mark.parametrize(
    "part", ["node ", "its ranks on ", "ranks on a", " of this period", " have not started", "rank 1"]
)
def test_a_long_sentence_is_read_in_linear_time(part: str) -> None:
    for queue_reason in ("preempted", "node lost"):
        old = OLD.model_copy(update={"queue_reason": queue_reason, "reason": part * (900_000 // len(part))})
        started = time.process_time()
        decode(stored(old))
        assert time.process_time() - started < 5


def test_every_reason_is_told_from_a_stop_of_version_1() -> None:
    assert set(REASONS.values()) == set(get_args(StopReason))


def test_reasons_that_break_a_placement() -> None:
    """What agents and the scheduler did for the queue reasons "crashed" and "node lost"."""
    assert {each for each in get_args(StopReason) if queue_reason_of(each) in ("crashed", "node lost")} == BREAKS
    assert {each for each in get_args(StopReason) if queue_reason_of(each) == "node lost"} == NODE_FAULTS


@pytest.mark.parametrize(
    "subject", ["run.r1.preempting", "shadow.p1.run.r1.preempting", "dead.tracking.run.r1.preempting"]
)
def test_it_is_read_from_its_own_subject(subject: str) -> None:
    assert isinstance(decode(stored(OLD, subject))[1], RunStopping)


@pytest.mark.parametrize("subject", ["run.r2.preempting", "run.r1.stopping", "run.r1.queued", "cancel.requested"])
def test_it_is_refused_on_another_subject(subject: str) -> None:
    with pytest.raises(EnvelopeError, match="is on another subject"):
        decode(stored(OLD, subject))


def test_todays_event_is_refused_on_the_subject_of_then() -> None:
    new = RunStopping(run_id="r1", generation=2, reason="node_lost", message="node n2 is lost", grace_s=0)
    assert decode(stored(new))[1] == new
    with pytest.raises(EnvelopeError, match="is on another subject"):
        decode(stored(new, "run.r1.preempting"))


def test_a_message_without_a_type_is_what_its_subject_names() -> None:
    assert type_for_subject("run.r1.stopping") == "trainbus.run.stopping.v2"
    body = b'{"run_id": "r1", "generation": 2, "reason": "node n2 is lost", "queue_reason": "node lost", "grace_s": 0}'
    _, event = decode(RawMessage("run.r1.preempting", body, {"ce-id": "x"}))
    assert isinstance(event, RunStopping)
    assert event.reason == "node_lost"


def test_data_of_version_1_is_checked_as_such() -> None:
    body = b'{"run_id": "r1", "generation": 2, "reason": "x", "queue_reason": "bored", "grace_s": 0}'
    with pytest.raises(InvalidData) as raised:
        decode(RawMessage("run.r1.preempting", body, {"ce-id": "x"}))
    assert [each.field for each in raised.value.problems] == ["queue_reason"]


def test_an_adoption_of_version_1_is_read_with_its_preemption() -> None:
    policy = {"name": "team", "reclaim": {"min_run_s": 600.0}}
    old = PolicyAdoptedV1.model_validate({"digest": "d1", "policy": policy, "settings": ["reclaim.min_run_s=600"]})
    assert "reclaim" in old.to_plain()["policy"]
    envelope, event = decode(stored(old))
    assert isinstance(event, PolicyAdopted)
    assert event.policy == Policy(name="team", preemption=Preemption(min_run_s=600))
    assert (event.digest, event.settings) == ("d1", ("preemption.min_run_s=600",))
    assert (envelope.type, envelope.id) == (PolicyAdopted.type, event.event_id)
    assert "reclaim" not in json.dumps(event.to_plain())


def test_a_policy_of_version_1_that_breaks_a_rule_is_read() -> None:
    event = read_data(PolicyAdoptedV1.type, {"digest": "d1", "policy": {"name": "", "reclaim": {"min_run_s": -1}}})
    assert isinstance(event, PolicyAdopted)
    assert (event.policy.name, event.policy.preemption.min_run_s) == ("", -1)


@pytest.mark.parametrize("type_name", [AdoptPolicyRequestedV1.type, AdoptPolicyRequested.type, ""])
def test_a_request_for_a_policy_is_read_by_its_earlier_name(type_name: str) -> None:
    body = b'{"policy": {"reclaim": {"min_run_s": 600}}, "user": "ada"}'
    headers = {"ce-id": "x", "ce-type": type_name}
    envelope, event = decode(RawMessage("adopt_policy.requested", body, headers))
    assert event == AdoptPolicyRequested(policy=Policy(preemption=Preemption(min_run_s=600)), user="ada")
    assert envelope.type == AdoptPolicyRequested.type


@pytest.mark.parametrize("type_name", [AdoptPolicyRequestedV1.type, AdoptPolicyRequested.type])
def test_a_request_of_any_version_is_checked(type_name: str) -> None:
    for policy, problem in (
        ({"reclaim": {"min_run_s": -1}}, ("policy.reclaim.min_run_s", "must be at least 0.0, not -1")),
        (
            {"reclaim": {}, "preemption": {}},
            ("policy", "reclaim is the earlier name of preemption: give only preemption"),
        ),
    ):
        body = json.dumps({"policy": policy}).encode()
        with pytest.raises(InvalidData) as raised:
            decode(RawMessage("adopt_policy.requested", body, {"ce-id": "x", "ce-type": type_name}))
        assert [(each.field, each.message) for each in raised.value.problems] == [problem]
    with pytest.raises(EnvelopeError, match="is on another subject"):
        decode(RawMessage("drain.requested", b'{"policy": {}}', {"ce-id": "x", "ce-type": type_name}))


def test_a_request_is_answered_under_one_id_in_every_version() -> None:
    ids = {request_id_for("a", kind.type, "1") for kind in (AdoptPolicyRequestedV1, AdoptPolicyRequested)}
    # As it was before there were two.
    assert ids == {"qja4r7ya4hkg3"}


def test_earlier_events_are_not_among_todays() -> None:
    assert not EARLIER_EVENTS.keys() & BY_TYPE.keys()
    for name, earlier in EARLIER_EVENTS.items():
        assert earlier.recorded.type == name
        assert model_of(name) is earlier.recorded
        assert BY_TYPE[earlier.current.type] is BY_NAME[earlier.current.type.rpartition(".")[0]] is earlier.current
        assert topology.stream_of(earlier.recorded) is topology.stream_of(earlier.current)


def test_filters_cover_the_subject_of_then() -> None:
    assert subject_filters(RunStopping) == ("run.*.stopping", "run.*.preempting")
    assert subject_filters(RunPlaced) == ("run.*.placed",)
    assert subject_filters(PolicyAdopted) == ("policy.*.adopted",)
    assert subject_filters(AdoptPolicyRequested) == ("adopt_policy.requested",)
    consumer = topology.Consumer("any", "FACTS", (RunPlaced, RunStopping), "")
    assert consumer.filters == ("run.*.placed", "run.*.stopping", "run.*.preempting")


def test_a_log_of_version_1_adds_up_to_what_one_of_today_does() -> None:
    """A log is stored as it was then, and again as it would be now; the scheduler reads both."""
    logs: tuple[list[Any], list[Any]] = ([], [])
    count = 0
    for line in FACTS.read_text().splitlines():
        sequence, at_s, type_name, data = json.loads(line)
        model = model_of(type_name)
        assert model is not None
        assert issubclass(model, Fact)
        now = read_data(type_name, data)
        assert isinstance(now, Fact)
        count += type_name in EARLIER_EVENTS
        when = datetime.fromtimestamp(at_s, UTC)
        for log, fact in zip(logs, (model.model_validate(data), now), strict=True):
            log.append((decode(stored(fact, sequence=sequence))[1], sequence, when))
    assert count >= 10
    assert fold(logs[0]) == fold(logs[1])
