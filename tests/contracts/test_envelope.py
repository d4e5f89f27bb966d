"""CloudEvents on NATS: every way a message may come in, and what bad ones get."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.base import run_id_for, short_hash, token
from contracts.envelope import (
    MAX_BODY_BYTES,
    STRUCTURED,
    EnvelopeError,
    InvalidData,
    RawMessage,
    decode,
    encode,
    fact_envelope,
    identify,
)
from contracts.events.run import RunAccepted, RunCancelled
from contracts.events.train import TrainRequested

BODY = json.dumps({"name": "a", "command": ["true"]}).encode()
STORED = datetime(2026, 1, 2, tzinfo=UTC)


def raw(body: bytes = BODY, subject: str = "train.requested", **headers: str) -> RawMessage:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return RawMessage(subject, body, names, "REQUESTS", 7, STORED)


def test_bare_body_is_filled_in() -> None:
    envelope, event = decode(raw())
    assert (envelope.id, envelope.source, envelope.time) == ("REQUESTS:7", "nats", STORED)
    assert event == TrainRequested(name="a", command=["true"])


@pytest.mark.parametrize("spelling", ["ce-id", "Ce-Id", "CE-ID"])
def test_header_names_are_compared_without_case(spelling: str) -> None:
    envelope, _ = decode(RawMessage("train.requested", BODY, {spelling: "x", "Ce-Source": "shop"}))
    assert (envelope.id, envelope.source) == ("x", "shop")


def test_message_id_is_the_id_when_there_is_no_other() -> None:
    assert decode(raw(Nats_Msg_Id="m1"))[0].id == "m1"


def test_structured_mode() -> None:
    body = {"specversion": "1.0", "id": "s1", "source": "shop", "type": "trainbus.train.requested.v1"}
    body["data"] = json.loads(BODY)
    envelope, event = decode(raw(json.dumps(body).encode(), Content_Type=f"{STRUCTURED}; charset=utf-8"))
    assert (envelope.id, envelope.source) == ("s1", "shop")
    assert isinstance(event, TrainRequested)


def test_fact_survives_the_round_trip_and_names_its_cause() -> None:
    cause, _ = decode(raw(ce_id="q1", ce_source="shop"))
    fact = RunCancelled(run_id="r1", reason="because")
    sent = fact_envelope(fact, "trainbus/scheduler", STORED, cause)
    headers, body = encode(fact, sent)
    envelope, event = decode(RawMessage(fact.subject, body, headers))
    assert event == fact
    assert (envelope.id, envelope.correlation_id, envelope.causation_id) == ("run/r1/cancelled", "q1", "q1")


def test_facts_are_read_leniently_all_the_way_down() -> None:
    body = {
        "run_id": "r1",
        "request_id": "1",
        "request_source": "s",
        "spec": {**json.loads(BODY), "later": 1},
        "new": 2,
    }
    _, event = decode(raw(json.dumps(body).encode(), "run.r1.accepted"))
    assert isinstance(event, RunAccepted)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        pytest.param(raw(b"{"), "not JSON", id="no json"),
        pytest.param(raw(b"\xff\xfe"), "not JSON", id="no utf-8"),
        pytest.param(raw(b"[" * 100_000), "not JSON", id="nested too deep"),
        pytest.param(raw(b'{"params": {"a": "\\ud800"}}'), "not JSON", id="half a character"),
        pytest.param(raw(b'{"params": {"a": "\xed\xa0\x80"}}'), "not JSON", id="half a character, in bytes"),
        pytest.param(raw(b" " * (MAX_BODY_BYTES + 1)), "put large content into the object store", id="too large"),
        pytest.param(raw(ce_specversion="0.3"), "specversion", id="other version"),
        pytest.param(raw(ce_time="yesterday"), "RFC 3339", id="no time"),
        pytest.param(
            raw(ce_time="9999-12-31T23:59:59-23:59"), "year 9999 is not within 1970 to 2199", id="no such time"
        ),
        pytest.param(raw(ce_type="trainbus.nonsense.v9"), "unknown event type", id="unknown type"),
        pytest.param(raw(b"[1]"), "must be a JSON object, not list", id="a list"),
        pytest.param(raw(b'{"name":"a","command":["x"],"epohcs":3}'), "epohcs: unknown field", id="typo"),
        pytest.param(raw(b'{"specversion":1}', content_type=STRUCTURED), "'data' member", id="structured without data"),
    ],
)
def test_bad_message_says_what_to_change(message: RawMessage, complaint: str) -> None:
    with pytest.raises(EnvelopeError, match=complaint):
        decode(message)


def test_a_character_in_two_halves_and_a_byte_order_mark_are_json() -> None:
    _, event = decode(raw(b'\xef\xbb\xbf{"name":"\\ud83d\\ude00","command":["x"]}'))
    assert isinstance(event, TrainRequested)
    assert event.name == "\N{GRINNING FACE}"


def test_problems_name_their_fields() -> None:
    with pytest.raises(InvalidData) as raised:
        decode(raw(json.dumps({"name": "", "command": ["x"], "slots": {"min": 0, "max": 1}}).encode()))
    assert {each.field for each in raised.value.problems} == {"name", "slots.min"}


@given(st.binary(max_size=200), st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=4))
def test_nonsense_is_an_envelope_error_and_nothing_else(body: bytes, headers: dict[str, str]) -> None:
    with contextlib.suppress(EnvelopeError):
        decode(RawMessage("train.requested", body, headers, "REQUESTS", 1, STORED))


@given(st.text(min_size=1, max_size=150), st.text(min_size=1, max_size=150))
def test_tokens_are_safe_and_differ(one: str, other: str) -> None:
    assert not set(token(one)) & set(".*> ")
    assert len(token(one)) <= 128
    if one != other:
        assert token(one) != token(other)


def test_run_id_depends_on_source_and_id_alone() -> None:
    assert run_id_for("a", "b") == run_id_for("a", "b") != run_id_for("ab", "")
    assert short_hash("ab", "c") != short_hash("a", "bc")


CANCELLED = json.dumps({"run_id": "r1", "reason": "because"}).encode()


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(raw(CANCELLED, "run.r2.cancelled"), id="a fact about another run"),
        pytest.param(raw(CANCELLED, "run.r1.failed", ce_type="trainbus.run.cancelled.v1"), id="a fact of another type"),
        pytest.param(raw(CANCELLED, "train.requested", ce_type="trainbus.run.cancelled.v1"), id="a fact as a request"),
        pytest.param(raw(BODY, "run.r1.cancelled", ce_type="trainbus.train.requested.v1"), id="a request as a fact"),
        pytest.param(raw(BODY, "ingest.requested", ce_type="trainbus.train.requested.v1"), id="another request"),
        pytest.param(raw(CANCELLED, "shadow.p1.run.r2.cancelled", ce_type="trainbus.run.cancelled.v1"), id="a shadow"),
    ],
)
def test_an_event_on_another_subject_is_refused(message: RawMessage) -> None:
    with pytest.raises(EnvelopeError, match="is on another subject"):
        decode(message)


@pytest.mark.parametrize(
    "subject", ["run.r1.cancelled", "shadow.p1.run.r1.cancelled", "dead.tracking.run.r1.cancelled"]
)
def test_a_fact_is_read_from_its_subject_its_shadow_and_its_dead_letter(subject: str) -> None:
    _, event = decode(raw(CANCELLED, subject, ce_type="trainbus.run.cancelled.v1"))
    assert isinstance(event, RunCancelled)


@pytest.mark.parametrize("body", [b"no JSON", b"[" * 100_000, b" " * (MAX_BODY_BYTES + 1), BODY])
def test_a_request_that_cannot_be_read_is_identified_all_the_same(body: bytes) -> None:
    found = identify(raw(body, ce_id="17", ce_source="shop", ce_specversion="0.3"))
    assert (found.id, found.source, found.type) == ("17", "shop", TrainRequested.type)
    assert identify(raw(body)).id == "REQUESTS:7"
