"""What a person asks for has a route of its own: it is checked there, and answered with what it leads to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from contracts.base import ingestion_id_for, request_id_for
from contracts.events.checkpoint import CheckpointCommitted
from services.kit.bus import Bus
from tests.gateway.conftest import RUN, Running, life, ref
from tests.gateway.test_events import SOURCE
from tests.gateway.test_projection import publish

CHECKPOINTS = f"/training-runs/{RUN}/checkpoints"
DATA = {"data": {"source": "s3://lake/digits/"}}
#: Case -> method, path, body, the subject on the bus, and fields of the event.
REQUESTS: dict[str, tuple[str, str, Any, str, dict[str, Any]]] = {
    "pin": ("PUT", f"{CHECKPOINTS}/20/pin?reason=ours", None, "pin.requested", {"step": 20, "reason": "ours"}),
    "unpin": ("DELETE", f"{CHECKPOINTS}/last/pin", None, "pin.requested", {"step": 20, "pinned": False}),
    "by name": ("PUT", "/training-runs/digits/checkpoints/20/pin", None, "pin.requested", {"run_id": RUN}),
    "restore": ("POST", f"{CHECKPOINTS}/20/restore", None, "restore.requested", {"run_id": RUN, "step": 20}),
    "resume": (
        "POST",
        f"{CHECKPOINTS}/last/resume",
        {"command": ["sh", "t.sh"], "params": {"lr": 0.5}, "env": {"A": "1"}},
        "train.requested",
        {"resume_from": ref(20).uri, "name": "digits (resumed)", "command": ["sh", "t.sh"], "env": {"A": "1"}},
    ),
    "scrub": ("POST", f"{CHECKPOINTS}/scrub", None, "scrub.requested", {"run_id": RUN, "repair": True}),
    "scrub all": (
        "POST",
        "/checkpoints/scrub?repair=false",
        None,
        "scrub.requested",
        {"run_id": None, "repair": False},
    ),
    "ingest": ("POST", "/ingestions", DATA, "ingest.requested", {}),
}


@pytest.fixture
async def committed(gateway: Running, bus: Bus) -> None:
    await publish(bus, *life()[2:6], CheckpointCommitted(run_id=RUN, generation=1, checkpoint=ref(20), size_bytes=10))


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize("case", REQUESTS)
async def test_a_request_is_published_and_says_what_it_leads_to(case: str, gateway: Running, bus: Bus) -> None:
    method, path, body, subject, fields = REQUESTS[case]
    answer = await gateway.client.request(method, path, json=body, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 202, answer.text
    found = answer.json()
    stored = await bus.get_message(found["sequence"], "REQUESTS")
    assert stored is not None
    assert (stored.subject, stored.envelope.id, stored.envelope.source) == (subject, "k", SOURCE)
    assert {name: getattr(stored.event, name) for name in fields} == fields
    assert found["refusal"] == f"request.{request_id_for(SOURCE, stored.envelope.type, 'k')}.refused"
    if case == "ingest":
        assert found["ingestion_id"] == ingestion_id_for(SOURCE, "k")
    again = await gateway.client.request(method, path, json=body, headers={"Idempotency-Key": "k"})
    assert again.json()["duplicate"] is True


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("PUT", f"{CHECKPOINTS}/7/pin", None, 404, "it has steps 20"),
        ("PUT", f"{CHECKPOINTS}/best/pin", None, 404, "name one by its step"),
        ("DELETE", f"{CHECKPOINTS}/worst/pin", None, 422, "mark"),
        ("PUT", "/training-runs/digitz/checkpoints/20/pin", None, 404, "did you mean digits?"),
        ("POST", "/training-runs/digitz/checkpoints/scrub", None, 404, "did you mean digits?"),
        ("POST", "/training-runs/digitz/checkpoints/20/restore", None, 404, "did you mean digits?"),
        ("POST", "/training-runs/digitz/checkpoints/20/resume", None, 404, "did you mean digits?"),
        ("POST", f"{CHECKPOINTS}/20/resume", {"epochs": 30}, 422, "cannot see --epochs"),
        ("POST", f"{CHECKPOINTS}/20/resume", {"epochs": 0}, 422, "epochs"),
        ("POST", f"{CHECKPOINTS}/20/resume", {"env": {"A-B": ""}}, 422, "is not an identifier"),
        ("POST", "/ingestions", {"data": {}}, 422, "source"),
        ("POST", "/ingestions", {"dta": {}}, 422, "dta"),
    ],
)
async def test_a_request_that_cannot_be_met_is_refused_with_what_to_change(
    method: str, path: str, body: Any, status: int, words: str, gateway: Running, bus: Bus
) -> None:
    answer = await gateway.client.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert words in answer.text
    assert await bus.read_history(stream="REQUESTS") == []


async def test_no_body_breaks_a_route(gateway: Running) -> None:
    """A body that is not JSON, not text, not an object or too deep is answered with what is wrong, everywhere."""
    document = (await gateway.client.get("/openapi.json")).json()
    routes = [
        (method.upper(), re.sub(r"{[^}]*}", "1", path))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    ]
    query = {"key": "a", "upload_id": "u"}
    headers = {"Content-Type": "application/json"}
    answers = {
        (method, path, body[:8]): await gateway.client.request(
            method, path, params=query, headers=headers, content=body
        )
        for method, path in routes
        for body in (b"\xff", b'{"name": "\xff"}', b"{", b"[]", b"null", b'{"a": ' * 20_000)
    }
    assert len(routes) > 10
    assert {
        name: (answer.status_code, answer.text) for name, answer in answers.items() if answer.status_code != 422
    } == {}
    assert all(answer.json()["detail"] for answer in answers.values())


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/lake/uploads/complete?key=a&upload_id=u", {"etags": []}, "etags"),
        ("/lake/uploads/complete?key=a&upload_id=u", {"etags": ["a", 1]}, "etags.1"),
        ("/datasets/verify", {"datasets": "all"}, "datasets"),
        ("/datasets/1/repair", {}, "ingestion_id"),
    ],
)
async def test_a_wrong_field_of_a_body_is_named(path: str, body: Any, field: str, gateway: Running) -> None:
    answer = await gateway.client.post(path, json=body)
    assert answer.status_code == 422, answer.text
    assert field in [each["field"] for each in answer.json()["problems"]]
