"""The HTTP interface over a real nats-server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import sqlite3
import threading
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa

from contracts import subjects
from contracts.base import run_id_for
from contracts.checkpoint_ref import CheckpointRef
from contracts.envelope import Envelope
from contracts.events.capacity import PolicyAdopted
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.dataset import DatasetSharded
from contracts.events.model import ModelConfigured, ModelDeployFailed, ModelPromoted, ModelStaged
from contracts.events.node import NodeDraining, NodeJoined
from contracts.events.run import (
    RunAccepted,
    RunCancelled,
    RunLog,
    RunPlaced,
    RunPromotionPending,
    RunQueued,
    RunStarted,
    RunWaiting,
)
from contracts.events.study import (
    StudyAccepted,
    StudyCompleted,
    StudyRejected,
    StudyStopped,
    TrialEnded,
    TrialPruned,
    TrialSuggested,
)
from contracts.events.train import (
    AdoptPolicyRequested,
    CancelRequested,
    DrainRequested,
    RestoreRequested,
    UndrainRequested,
)
from contracts.scheduling import Policy, Preemption
from contracts.spec.gates import ModelGates
from contracts.spec.study import StudySpec
from services.gateway import commands, queries
from services.gateway.mlflow_pages import find_mlflow_url
from services.gateway.settings import GatewaySettings
from services.gateway.store import RUNS, Store
from services.kit.bus import Bus
from tests.gateway.conftest import BODY, EVALUATED_SPEC, RUN, SPEC, Running, life, placed, progress, ref
from tests.kit.support import until
from trainbus.embedded.servers import NatsServer

FIFO = Policy.model_validate({"name": "fifo", "order": {"by": ["submitted"]}})


async def publish(bus: Bus, *events: Any) -> int:
    sequence = 0
    for event in events:
        sequence = (await bus.publish(event)).sequence
    return sequence


async def read_sse(
    gateway: Running, path: str, headers: dict[str, str] | None = None, first: asyncio.Event | None = None
) -> list[dict[str, str]]:
    """The events of a stream up to and including ``end``; ``first`` is set when one has arrived."""
    found: list[dict[str, str]] = []
    async with asyncio.timeout(60), gateway.client.stream("GET", path, headers=headers or {}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        current: dict[str, str] = {}
        async for line in response.aiter_lines():
            if not line and "event" in current:
                found.append(current)
                if first is not None:
                    first.set()
                if current["event"] == "end":
                    return found
            if not line:
                current = {}
            elif not line.startswith(":"):
                name, _, value = line.partition(": ")
                current[name] = value
    return found


async def test_the_callers_trace_goes_on_in_the_request(gateway: Running, bus: Bus) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"Idempotency-Key": "traced", "traceparent": trace}
    answer = await gateway.client.post("/training-runs", json=BODY, headers=headers)
    stored = await bus.js.get_msg("REQUESTS", answer.json()["sequence"])
    # Nothing is exported here, so there is no span of ours between the two.
    assert (stored.headers or {})["traceparent"] == trace


async def test_post_then_get_at_once(gateway: Running, bus: Bus) -> None:
    answers = [
        await gateway.client.post("/training-runs", json=BODY, headers={"Idempotency-Key": "k1"}) for _ in range(2)
    ]
    assert [a.status_code for a in answers] == [202, 202]
    run_id = answers[0].json()["run_id"]
    assert run_id == run_id_for("trainbus/gateway", "k1")
    assert answers[0].headers["location"] == f"/training-runs/{run_id}"
    assert answers[1].json()["duplicate"] is True
    run = await gateway.get(f"/training-runs/{run_id}")
    assert (run["state"], run["name"], run["slots"]["max"]) == ("requested", "digits", 4)
    stored = await bus.read_history(subjects.request("train"), stream="REQUESTS")
    assert [(s.event.name, s.envelope.id) for s in stored] == [("digits", "k1")]
    other = await gateway.client.post(
        "/training-runs", json={**BODY, "name": "other"}, headers={"Idempotency-Key": "k1"}
    )
    assert other.status_code == 409
    assert "use a new one" in other.json()["detail"]


BAD_REQUESTS: dict[str, tuple[Any, str, str]] = {
    "unknown field": ({**BODY, "slotz": 2}, "slotz", "did you mean slots?"),
    "negative size": ({**BODY, "slots": -1}, "slots.min", "at least 1"),
    "wrong type": ({**BODY, "priority": "high"}, "priority", "a whole number"),
    "nothing to run": ({"name": "x"}, "", "exactly one of 'task'"),
    "no object": ([1], "", "must be a JSON object"),
}


async def test_bad_requests_name_the_field(gateway: Running) -> None:
    for case, (body, field, message) in BAD_REQUESTS.items():
        answer = await gateway.client.post("/training-runs", json=body)
        assert answer.status_code == 422, case
        assert any(p["field"] == field and message in p["message"] for p in answer.json()["problems"]), (
            case,
            answer.text,
        )


@pytest.mark.parametrize("field", ["params", "env", "tags"])
async def test_text_that_is_not_unicode_is_refused(gateway: Running, field: str) -> None:
    body = json.dumps({**BODY, field: {"A": "\ud800"}})
    answer = await gateway.client.post("/training-runs", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, "not JSON" in answer.json()["detail"]) == (422, True)


async def test_refused_before_the_bus(gateway: Running) -> None:
    form = await gateway.client.post("/training-runs", content=b"{}", headers={"content-type": "text/plain"})
    assert (form.status_code, "application/json" in form.json()["detail"]) == (415, True)
    json_type = {"content-type": "application/json"}
    assert (await gateway.client.post("/training-runs", content=b"{", headers=json_type)).status_code == 422
    large = b'{"name": "' + b"x" * 2 * 2**20 + b'"}'
    assert (await gateway.client.post("/training-runs", content=large, headers=json_type)).status_code == 413


async def test_a_whole_life(gateway: Running, bus: Bus) -> None:
    await publish(bus, *life(spec=EVALUATED_SPEC))
    events = await read_sse(gateway, f"/training-runs/{RUN}/events")
    assert [e["event"] for e in events][-3:] == ["completed", "promoted", "end"]
    run = await gateway.get(f"/training-runs/{RUN}")
    assert (run["state"], run["verdict"], run["generation"], run["restarts"]) == ("completed", "promoted", 2, 1)
    assert run["slots"] == {"min": 1, "max": 4, "got": 2, "wanted": 4}
    assert run["last_checkpoint"]["step"] == 40
    assert run["metrics"]["test/accuracy"] == 0.97
    assert (
        "on 2 slots of n1, from its checkpoint of step 20"
        in [e["summary"] for e in run["timeline"] if e["fact"] == "placed"][1]
    )
    listed = await gateway.get("/training-runs", params={"state": "completed", "name": "dig*"})
    assert [r["run_id"] for r in listed["runs"]] == [RUN]
    assert [c["step"] for c in (await gateway.get("/training-runs/digits/checkpoints"))["checkpoints"]] == [40, 20]
    assert [n["used"] for n in (await gateway.get("/nodes"))["nodes"]] == [0, 0]
    facts = await gateway.get(f"/training-runs/{RUN}/events", params={"follow": "false"})
    assert [f["fact"] for f in facts["events"]] == [f["fact"] for f in run["timeline"]]


async def test_metrics_stream_history_live_resume_and_end(gateway: Running, bus: Bus) -> None:
    facts = life()
    before, after = facts[:7], facts[7:]
    await publish(bus, *before)
    first = asyncio.Event()
    reading = asyncio.create_task(read_sse(gateway, f"/training-runs/{RUN}/metrics", first=first))
    await first.wait()  # history is read; what follows arrives live
    await publish(bus, *after)
    events = await reading
    assert [e["event"] for e in events] == ["metrics", "metrics", "end"]
    batches = [json.loads(e["data"]) for e in events[:-1]]
    assert [b["generation"] for b in batches] == [1, 2]
    resumed = await read_sse(gateway, f"/training-runs/{RUN}/metrics", {"Last-Event-ID": events[0]["id"]})
    assert [e.get("id") for e in resumed] == [events[1]["id"], None]
    done = await gateway.client.get(f"/training-runs/{RUN}/metrics", headers={"Last-Event-ID": events[1]["id"]})
    assert done.status_code == 204
    history = await gateway.get(f"/training-runs/{RUN}/metrics", params={"follow": "false"})
    assert history["batches"] == batches
    curve: list[Any] = []

    async def drawn() -> bool:
        # Points are projected independently of the facts: they may come after the run has completed.
        curve[:] = (await gateway.get(f"/training-runs/{RUN}/curves"))["curves"].get("train/loss", [])
        return bool(curve) and curve[-1][0] == 40

    await until(drawn, "the last point")
    assert [step for step, _ in curve] == list(range(1, 41)), "the abandoned tail is not drawn twice"
    assert all((value >= 100) == (step > 20) for step, value in curve)


async def test_logs(gateway: Running, bus: Bus) -> None:
    await publish(bus, *life())
    for rank in (0, 1):
        await publish(bus, RunLog(run_id=RUN, generation=1, rank=rank, offset=0, lines=(f"hello from {rank}",)))
    events = await read_sse(gateway, f"/training-runs/{RUN}/logs")
    assert [json.loads(e["data"])["lines"] for e in events[:-1]] == [["hello from 0"], ["hello from 1"]]
    both = ["hello from 0", "hello from 1"]
    for tail, expected in [(1, both[1:]), (2, both), (9, both)]:
        logs = await gateway.get(f"/training-runs/{RUN}/logs", params={"follow": False, "tail": tail})
        assert [line for batch in logs["batches"] for line in batch["lines"]] == expected
        newer = {"Last-Event-ID": str(logs["last_event_id"])}
        assert not (await gateway.get(f"/training-runs/{RUN}/logs?follow=false", headers=newer))["batches"]


async def test_events_logs_and_metrics_are_read_by_ranges(gateway: Running, bus: Bus) -> None:
    await publish(bus, *life())
    for number in range(5):
        await publish(bus, RunLog(run_id=RUN, generation=1, rank=0, offset=number, lines=(f"line {number}",)))
    url = f"/training-runs/{RUN}"
    for name, field in (("events", "events"), ("metrics", "batches"), ("logs", "batches")):
        everything = await gateway.get(f"{url}/{name}?follow=false")
        assert not everything["has_more"]
        found: list[Any] = []
        page = {"last_event_id": 0, "has_more": True}
        while page["has_more"]:
            last = {"Last-Event-ID": str(page["last_event_id"])}
            page = await gateway.get(f"{url}/{name}?follow=false&limit=2", headers=last)
            assert 1 <= len(page[field]) <= 2
            found += page[field]
        assert found == everything[field]
        assert len(found) > 2 or name == "metrics"
    for limit in (0, 10_001):
        assert (await gateway.client.get(f"{url}/logs?follow=false&limit={limit}")).status_code == 422


async def test_a_fresh_answer_has_all_that_was_published_before(gateway: Running, bus: Bus) -> None:
    states = {RunAccepted: "accepted", RunQueued: "queued", RunPlaced: "placed", RunStarted: "running"}
    for fact in life()[:6]:
        await publish(bus, fact)
        if (state := states.get(type(fact))) is not None:
            assert (await gateway.get(f"/training-runs/{RUN}", params={"fresh": True}))["state"] == state
    for step in range(2, 22, 2):  # a step takes a second
        await publish(bus, progress(1, range(step, step + 2)))
        found = await gateway.get(f"/training-runs/{RUN}", params={"fresh": True})
        assert (found["step"], found["metrics"]["train/loss"]) == (step + 1, 1 / (step + 2))
        assert found["steps_per_s"] == pytest.approx(1.0)


@pytest.mark.parametrize("ends_after", range(1, 5))
async def test_a_view_is_as_the_fact_that_it_names_has_left_the_run(
    ends_after: int, gateway: Running, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(bus, RunAccepted(run_id=RUN, spec=SPEC, request_id="q", request_source="t"))
    assert (await gateway.get(f"/training-runs/{RUN}", params={"fresh": True}))["state"] == "accepted"
    fetch, queries_begun, last = Store.fetch, 0, 0

    async def fetch_and_end(store: Store, statement: sa.Executable) -> Any:
        nonlocal queries_begun, last
        queries_begun += 1
        number, found = queries_begun, await fetch(store, statement)
        if number == ends_after:  # the run ends between two queries of one answer
            last = await publish(bus, RunCancelled(run_id=RUN, reason="enough"))
            state = sa.select(RUNS.c.state).where(RUNS.c.run_id == RUN)
            while (await fetch(store, state))[0]["state"] != "cancelled":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return found

    monkeypatch.setattr(Store, "fetch", fetch_and_end)
    found = await gateway.get(f"/training-runs/{RUN}", params={"timeline": 0})
    assert (found["state"] == "cancelled") == (found["sequence"] == last > 0)


async def test_references(gateway: Running, bus: Bus) -> None:
    for run_id, name in (("rabc1", "one"), ("rabc2", "two"), ("rxyz", "two")):
        spec = SPEC.model_copy(update={"name": name})
        await publish(bus, RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="t"))
    for reference, run_id in (("rabc1", "rabc1"), ("one", "rabc1"), ("rx", "rxyz")):
        assert (await gateway.get(f"/training-runs/{reference}"))["run_id"] == run_id
    assert (await gateway.client.get("/training-runs/on")).json()["run_id"] == "rabc1"
    newest = await gateway.get("/training-runs/two")
    assert newest["run_id"] == "rxyz"
    for reference in ("rabc", "t"):
        answer = await gateway.client.get(f"/training-runs/{reference}")
        assert (answer.status_code, len(answer.json()["candidates"])) == (409, 2)
    assert "'rabc' is the start of 2 runs; give more of it:" in (await gateway.client.get("/training-runs/rabc")).text
    missing = await gateway.client.get("/training-runs/nothing")
    assert (missing.status_code, "nothing" in missing.json()["detail"]) == (404, True)
    mistyped = await gateway.client.get("/training-runs/onee")
    assert mistyped.json()["detail"].endswith("did you mean one?")
    assert mistyped.json()["candidates"] == ["one"]


async def test_a_run_is_not_taken_for_the_one_whose_id_its_name_is(gateway: Running, bus: Bus) -> None:
    """A request under a key is looked up by its id alone."""
    run_id = run_id_for("trainbus/gateway", "k1")
    for name in (run_id, f"{run_id}-b"):
        spec = SPEC.model_copy(update={"name": name})
        await publish(bus, RunAccepted(run_id=f"r{name[-1]}", spec=spec, request_id=name, request_source="t"))
    assert (await gateway.get(f"/training-runs/{run_id}"))["name"] == run_id
    answer = await gateway.client.post(
        "/training-runs", json={"name": "own", "command": ["true"]}, headers={"Idempotency-Key": "k1"}
    )
    assert (answer.status_code, answer.json()["run_id"]) == (202, run_id)


async def test_similar_names_are_looked_for_once_and_beside_the_loop(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared_in = []

    def compare(*_: Any) -> list[str]:
        compared_in.append(threading.current_thread())
        return []

    monkeypatch.setattr("difflib.get_close_matches", compare)
    assert (await gateway.client.get("/training-runs/nothing")).status_code == 404
    (thread,) = compared_in
    assert thread is not threading.current_thread()
    await gateway.client.post(
        "/training-runs", json={"name": "own", "command": ["true"]}, headers={"Idempotency-Key": "k2"}
    )
    assert len(compared_in) == 1


async def test_every_error_is_a_problem_document(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("services.gateway.queries.count_runs", fail)
    evil = {"sec-fetch-site": "cross-site"}
    for method, path, status, options in (
        ("GET", "/training-runs/nothing", 404, {}),
        ("GET", "/nowhere", 404, {}),
        ("DELETE", "/training-runs", 405, {}),
        ("GET", "/training-runs?limit=0", 422, {}),
        ("GET", "/training-runs?cursor=x", 422, {}),
        ("GET", "/training-runs?counts=true", 500, {}),
        ("POST", "/training-runs", 415, {"content": b'{"name": "x"}'}),
        ("POST", "/training-runs", 415, {"data": {"name": "x"}}),
        ("POST", "/training-runs", 422, {}),
        ("POST", "/training-runs", 422, {"json": {"slots": -1}}),
        ("POST", "/training-runs", 403, {"headers": evil}),
    ):
        answer = await gateway.client.request(method, path, **options)
        found = answer.json()
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), path
        assert (found["status"], bool(found["title"]), bool(found["detail"])) == (status, True, True), found
        assert found["type"] == "about:blank" or found["type"].startswith("urn:trainbus:problem:"), found
    nowhere = (await gateway.client.get("/nowhere")).json()
    assert nowhere["detail"] == "there is no GET /nowhere: /docs lists what there is"
    schema = (await gateway.client.get("/openapi.json")).json()
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            errors = {code: each["content"] for code, each in route["responses"].items() if code >= "400"}
            assert errors.keys() >= {"404", "422", "500", "503"}, (method, path)
            assert all([*content] == ["application/problem+json"] for content in errors.values()), (method, path)


async def test_nodes_datasets_and_models_come_in_pages(gateway: Running, bus: Bus) -> None:
    for number in range(5):
        await publish(
            bus,
            NodeJoined(node_id=f"n{number}", incarnation="i", address="a", slots=2, lease_ttl_s=3),
            ModelPromoted(
                model=f"m{number // 3}",
                version=1 + number % 3,
                run_id=f"r{number}",
                checkpoint_uri="s3://models/c",
                dataset_id=None,
                metrics={},
                reason="better",
            ),
            DatasetSharded(
                dataset_id=f"{number}" * 64,
                manifest_uri=f"s3://datasets/{number}",
                feature_store_version="v",
                split_config_hash="0" * 64,
                row_count=1,
                split_counts={"train": 1},
                shard_count=1,
                size_bytes=1,
                created_at=datetime(2026, 1, 1 + number // 2, tzinfo=UTC),
            ),
        )
    listed = {
        "nodes": [f"n{number}" for number in range(5)],
        "registered-models": ["m0", "m1"],
        "models": [("m0", 3, True), ("m0", 2, False), ("m0", 1, False), ("m1", 2, True), ("m1", 1, False)],
        "datasets": [f"{number}" * 64 for number in (4, 3, 2, 1, 0)],
    }
    fields = {
        "registered-models": ("model",),
        "nodes": ("node_id",),
        "models": ("name", "version", "champion"),
        "datasets": ("dataset_id",),
    }
    for kind, expected in listed.items():
        found: list[Any] = []
        query: dict[str, Any] = {"limit": 2}
        while True:
            page = await gateway.get(f"/{kind}", params=query)
            keys = [tuple(each[name] for name in fields[kind]) for each in page[kind.rpartition("-")[2]]]
            assert len(keys) == min(2, len(expected) - len(found))
            found += [key if len(key) > 1 else key[0] for key in keys]
            query["cursor"] = page["next_cursor"]
            if query["cursor"] is None:
                break
        assert found == expected
        everything = await gateway.get(f"/{kind}")
        assert (len(everything[kind.rpartition("-")[2]]), everything["next_cursor"]) == (len(expected), None)


async def test_studies_are_listed_as_their_facts_add_up(gateway: Running, bus: Bus) -> None:
    spec = StudySpec.model_validate(
        {"name": "s", "run": {"name": "s", "command": ["true"]}, "space": {"x": [1, 2]}, "metrics": ["loss"]}
    )
    for number in range(4):
        await publish(bus, StudyAccepted(study_id=f"s{number}", spec=spec, request_id="q", request_source="t"))
    await publish(
        bus,
        StudyCompleted(study_id="s0", best=(3,), reason="16 trials"),
        StudyStopped(study_id="s1", reason="enough"),
        StudyStopped(study_id="unknown", reason="enough"),
        StudyRejected(study_id="s9", name="t", reason="no metric"),
    )
    first = await gateway.get("/hpo/studies", params={"limit": 3})
    rest = await gateway.get("/hpo/studies", params={"limit": 3, "cursor": first["next_cursor"]})
    assert rest["next_cursor"] is None
    found = [(each["study_id"], each["state"], each["reason"]) for each in first["studies"] + rest["studies"]]
    assert found == [
        ("s9", "rejected", "no metric"),
        ("s3", "running", ""),
        ("s2", "running", ""),
        ("s1", "stopped", "enough"),
        ("s0", "completed", "16 trials"),
    ]
    assert rest["studies"][-1]["best"] == [3]
    assert (await gateway.get("/hpo/studies/s2"))["state"] == "running"
    assert (await gateway.client.get("/hpo/studies/nothing")).status_code == 404


async def test_the_trials_of_a_study_fold_into_one_row(gateway: Running, bus: Bus) -> None:
    spec = StudySpec.model_validate(
        {
            "name": "sweep",
            "run": {"name": "s", "command": ["true"]},
            "space": {"x": [1, 2]},
            "objectives": [{"metric": "loss", "mode": "min"}],
            "trials": 9,
        }
    )
    await publish(bus, StudyAccepted(study_id="s1", spec=spec, request_id="q", request_source="t"))
    for number in range(5):
        trial = SPEC.model_copy(update={"study": "s1", "trial": number, "user": "ada"})
        run_id = f"rt{number}"
        await publish(
            bus,
            TrialSuggested(study_id="s1", trial=number, run_id=run_id, params={"x": 1}),
            RunAccepted(run_id=run_id, spec=trial, request_id=run_id, request_source="t"),
        )
    await publish(bus, RunAccepted(run_id="rx", spec=SPEC, request_id="x", request_source="t"))
    ended = {"study_id": "s1", "metrics": {}}
    await publish(
        bus,
        RunQueued(run_id="rt4", next_generation=1),
        TrialEnded(trial=0, run_id="rt0", outcome="completed", values=(0.5,), **ended),
        TrialEnded(trial=1, run_id="rt1", outcome="completed", values=(0.25,), **ended),
        TrialEnded(trial=2, run_id="rt2", outcome="failed", **ended),
        TrialPruned(study_id="s1", trial=3, run_id="rt3", step=1, reason="bad"),
        TrialEnded(trial=3, run_id="rt3", outcome="cancelled", values=(0.1,), **ended),
    )
    folded = await gateway.get("/training-runs", params={"trials": False})
    assert [run["run_id"] for run in folded["runs"]] == ["rx"]
    (study,) = (await gateway.get("/hpo/studies"))["studies"]
    assert study["trials_by_state"] == {"completed": 2, "failed": 1, "pruned": 1, "running": 1}
    assert [study[name] for name in ("planned_trials", "objective", "mode", "best_value")] == [9, "loss", "min", 0.25]
    assert (study["best"], study["allocated_slots"]) == ([1], 0)
    assert (await gateway.get("/hpo/studies/s1"))["best"] == [1]
    for reference in ("s1", "sweep", "sw*"):
        page = await gateway.get("/training-runs", params={"study": reference, "state": "queued,accepted"})
        assert [run["run_id"] for run in page["runs"]] == ["rt4", "rt3", "rt2", "rt1", "rt0"]
        assert {run["study"] for run in page["runs"]} == {"s1"}
    expected = {"state=queued&user=ada": 1, "state=running": 0, "user=bob": 0, "study=sweep": 1, "study=other": 0}
    for query, count in expected.items():
        assert len((await gateway.get(f"/hpo/studies?{query}"))["studies"]) == count, query
    await publish(bus, placed(1, "n1", run_id="rt4"))
    (study,) = (await gateway.get("/hpo/studies"))["studies"]
    assert study["allocated_slots"] == sum(len(part.slots) for part in placed(1, "n1").members)


async def test_a_cursor_that_was_not_given_out_is_refused(gateway: Running) -> None:
    values: list[Any] = [[], [1], ["x"], [None, "r"], [True, "r"], ["x", 10**30], [1.5, "r", 2], {"a": 1}, 7]
    made = [base64.urlsafe_b64encode(json.dumps(each).encode()).decode() for each in values]
    for path, fitting in (("/training-runs", None), ("/nodes", ["x"]), ("/models", None), ("/datasets", None)):
        for value, cursor in [*zip(values, made, strict=True), (None, "bad"), (None, "é"), (None, "WzFd\0")]:
            answer = await gateway.client.get(path, params={"cursor": cursor})
            if fitting is not None and value == fitting:
                assert answer.status_code == 200
                continue
            assert answer.status_code == 422, (path, value, answer.text)
            assert answer.json()["type"].endswith("bad-cursor")


async def test_pages_by_cursor(gateway: Running, bus: Bus) -> None:
    ids = [f"r{i}" for i in range(5)]
    for run_id in ids:
        await publish(bus, RunAccepted(run_id=run_id, spec=SPEC, request_id=run_id, request_source="t"))
    await gateway.get(f"/training-runs/{ids[-1]}")
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = await gateway.get("/training-runs", params={"limit": 2, **({"cursor": cursor} if cursor else {})})
        seen += [run["run_id"] for run in page["runs"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == ids[::-1]
    assert (await gateway.client.get("/training-runs", params={"cursor": "bad"})).status_code == 422
    assert (await gateway.client.get("/training-runs", params={"state": "lost"})).status_code == 422


#: Run id -> what it is.
LISTED_RUNS: dict[str, dict[str, Any]] = {
    "ra1": {"name": "Digits CNN", "user": "ada", "team": "vision", "model": "digits"},
    "ra2": {"name": "digits mlp", "user": "ada", "team": "vision"},
    "rb1": {"name": "tokens", "user": "bob", "team": "text", "model": "lm"},
    "rb2": {"name": "100%", "user": "bob"},
}
#: Query -> the runs of the answer.
FILTERS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["rb2", "rb1", "ra2", "ra1"]),
    ({"user": "ada"}, ["ra2", "ra1"]),
    ({"user": "ad"}, []),
    ({"team": "text"}, ["rb1"]),
    ({"model": "digits"}, ["ra1"]),
    ({"name": "digits"}, []),
    ({"name": "digits mlp"}, ["ra2"]),
    ({"name": "*igits*"}, ["ra2", "ra1"]),
    ({"name": "D*s*"}, ["ra1"]),
    ({"name": "*%"}, ["rb2"]),
    ({"q": "VISION"}, ["ra2", "ra1"]),
    ({"q": "ra"}, ["ra2", "ra1"]),
    ({"q": "tok", "user": "ada"}, []),
    ({"state": "queued"}, ["rb1"]),
    ({"state": ["queued", "rejected"]}, ["rb1"]),
    ({"state": ",".join(["queued"] * 1000)}, ["rb1"]),
    ({"state": "accepted", "user": "bob"}, ["rb2"]),
    ({"kind": "train"}, ["rb2", "rb1", "ra2", "ra1"]),
    ({"kind": "evaluate"}, []),
    ({"evaluates": "ra1"}, []),
    ({"since": "1h"}, ["rb2", "rb1", "ra2", "ra1"]),
    ({"since": "2999-01-01T00:00:00Z"}, []),
    ({"since": "2999-01-01"}, []),
]


async def publish_listed(gateway: Running, bus: Bus) -> None:
    for run_id, given in LISTED_RUNS.items():
        spec = SPEC.model_copy(update=given)
        await publish(bus, RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="t"))
    await publish(bus, RunQueued(run_id="rb1", next_generation=1))
    await gateway.client.get("/training-runs/none")  # waits until all of the above is in


async def test_filters_of_runs(gateway: Running, bus: Bus) -> None:
    await publish_listed(gateway, bus)
    for query, expected in FILTERS:
        page = await gateway.get("/training-runs", params=query)
        assert ([run["run_id"] for run in page["runs"]], page["counts"]) == (expected, None), query
    for since in ("yesterday", "3w", "99999999999999d", "0000-01-01"):
        answer = await gateway.client.get("/training-runs", params={"since": since})
        assert (answer.status_code, "90s, 10m, 2h or 7d" in answer.json()["detail"]) == (422, True), since


async def test_counts_of_runs_follow_the_other_filters(gateway: Running, bus: Bus) -> None:
    await publish_listed(gateway, bus)
    everything = (await gateway.get("/training-runs", params={"counts": True, "limit": 1}))["counts"]
    assert everything == {
        "state": {"accepted": 3, "queued": 1},
        "kind": {"train": 4},
        "user": {"ada": 2, "bob": 2},
        "team": {"vision": 2, "text": 1},
        "model": {"digits": 1, "lm": 1},
    }
    of_bob = (await gateway.get("/training-runs", params={"counts": True, "user": "bob", "state": "queued"}))["counts"]
    assert of_bob == {
        "state": {"accepted": 1, "queued": 1},
        "kind": {"train": 1},
        "user": {"bob": 1},
        "team": {"text": 1},
        "model": {"lm": 1},
    }


async def test_address_of_mlflow(gateway: Running, gateway_settings: GatewaySettings) -> None:
    url = f"http://127.0.0.1:{gateway.service.gateway_port}"  # some server that accepts connections
    assert (await gateway.get("/about"))["mlflow_url"] is None
    for content, expected in [(url, url), ("http://127.0.0.1:1", None), ("javascript:alert(1)", None), ("", None)]:
        gateway_settings.mlflow_url_file.write_text(content)
        assert (await gateway.get("/about"))["mlflow_url"] == expected, content
    given = gateway_settings.model_copy(update={"mlflow_url": "https://mlflow.example/"})
    assert await find_mlflow_url(given) == "https://mlflow.example"


async def test_cancel_and_restore(gateway: Running, bus: Bus) -> None:
    committed = CheckpointCommitted(run_id=RUN, generation=1, checkpoint=ref(20), size_bytes=10)
    await publish(bus, *life()[2:6], committed)
    missing = await gateway.client.post(f"/training-runs/{RUN}/checkpoints/7/restore")
    assert (missing.status_code, missing.json()["detail"].endswith("it has steps 20")) == (404, True)
    restored = await gateway.client.post(
        f"/training-runs/{RUN}/checkpoints/last/restore", headers={"Idempotency-Key": "again"}
    )
    assert restored.status_code == 202
    child = await gateway.get(f"/training-runs/{restored.json()['run_id']}")
    assert (child["state"], child["parent_run_id"]) == ("requested", RUN)
    assert (await gateway.client.post(f"/training-runs/{RUN}/cancel", params={"reason": "enough"})).status_code == 202
    asked = await bus.read_history(subjects.request("restore"), subjects.request("cancel"), stream="REQUESTS")
    assert [a.event for a in asked] == [
        RestoreRequested(run_id=RUN, step=20),
        CancelRequested(run_id=RUN, reason="enough"),
    ]
    await publish(bus, *life()[8:])
    await read_sse(gateway, f"/training-runs/{RUN}/events")
    assert (await gateway.client.post(f"/training-runs/{RUN}/cancel")).status_code == 409


async def test_why_of_a_request_that_nobody_has_answered(gateway: Running, bus: Bus) -> None:
    asked = await gateway.client.post("/training-runs", json={"name": "digits", "command": ["true"]})
    run_id = asked.json()["run_id"]
    assert (await gateway.get(f"/training-runs/{run_id}"))["state"] == "requested"
    alone = await gateway.get(f"/training-runs/{run_id}/why")
    assert alone["state"] == "requested"
    assert "no scheduler answers" in alone["message"]

    async def answer(message: Any) -> None:
        await message.respond(json.dumps({"state": "unknown", "message": "no run has the id"}).encode())

    await bus.nc.subscribe(subjects.service("scheduler", "why"), cb=answer)
    await bus.nc.flush()
    assert "has not answered it yet" in (await gateway.get(f"/training-runs/{run_id}/why"))["message"]


async def test_why_with_and_without_a_scheduler(gateway: Running, bus: Bus) -> None:
    waiting = RunWaiting(run_id=RUN, next_generation=1, code="slots", message="needs 4 slots, 2 are free")
    accepted = RunAccepted(run_id=RUN, spec=SPEC, request_id="e", request_source="t")
    await publish(bus, accepted, RunQueued(run_id=RUN, next_generation=1), waiting)
    alone = await gateway.get(f"/training-runs/{RUN}/why")
    assert alone["answered_by"] == "read model"
    assert "needs 4 slots" in alone["message"]
    assert "does not answer" in alone["message"]

    async def answer(message: Any) -> None:
        assert json.loads(message.data) == {"run_id": RUN}
        await message.respond(json.dumps({"state": "queued", "message": "behind rtwo"}).encode())

    await bus.nc.subscribe(subjects.service("scheduler", "why"), cb=answer)
    await bus.nc.flush()
    asked = await gateway.get(f"/training-runs/{RUN}/why")
    assert (asked["answered_by"], asked["message"]) == ("scheduler", "behind rtwo")


async def test_nodes_show_what_runs_there(gateway: Running, bus: Bus) -> None:
    await publish(bus, *life()[:4], placed(1, "n1", "n2"), progress(1, range(1, 3)))
    await gateway.client.get("/training-runs/none")  # waits until all of the above is in
    nodes = (await gateway.get("/nodes"))["nodes"]
    assert [(n["node_id"], n["state"], n["used"], n["runs"]) for n in nodes] == [
        ("n1", "up", 2, [RUN]),
        ("n2", "up", 2, [RUN]),
    ]


async def test_drain_and_undrain(gateway: Running, bus: Bus) -> None:
    await publish(bus, NodeJoined(node_id="n1", incarnation="1", address="h", slots=1, lease_ttl_s=3))
    missing = await gateway.client.post("/nodes/n2/drain")
    assert (missing.status_code, missing.json()["detail"]) == (404, "there is no node 'n2'; there is: n1")
    asked = {"reason": "a loud fan", "user": "ada"}
    assert (await gateway.client.post("/nodes/n1/drain", params=asked)).status_code == 202
    assert (await gateway.client.post("/nodes/n1/undrain")).status_code == 202
    requests = await bus.read_history(subjects.request("drain"), subjects.request("undrain"), stream="REQUESTS")
    assert [each.event for each in requests] == [DrainRequested(node_id="n1", **asked), UndrainRequested(node_id="n1")]
    of_node: dict[str, Any] = {**asked, "node_id": "n1", "incarnation": "1"}
    await publish(bus, NodeDraining(**of_node, scope="node", requested_at=requests[0].stored_at, request_id="d"))
    await gateway.client.get("/training-runs/none")  # waits until all of the above is in
    [node] = (await gateway.get("/nodes"))["nodes"]
    assert (node["state"], node["reason"], node["drain"]["user"]) == ("draining", "a loud fan", "ada")
    assert datetime.fromisoformat(node["drain"]["requested_at"]) == requests[0].stored_at


async def test_the_policy_is_shown_compared_and_adopted(gateway: Running, bus: Bus) -> None:
    assert (await gateway.client.get("/policy")).status_code == 404
    assert (await gateway.client.post("/policy/diff", json={"policy": {}})).status_code == 503
    fact = PolicyAdopted(digest=FIFO.digest, policy=FIFO, origin="request", user="ada", reason="gangs wait")
    await publish(bus, fact)
    shown = await gateway.get("/policy")
    assert (shown["name"], shown["digest"], shown["user"]) == ("fifo", FIFO.digest, "ada")
    assert shown["policy"] == FIFO.model_dump(mode="json")
    asked = {
        "policy": {"name": "team", "reclaim": {"by": []}},
        "replaces": FIFO.digest,
        "reason": "quotas",
        "user": "bob",
    }
    for _ in range(2):
        answer = await gateway.client.put("/policy", json=asked, headers={"Idempotency-Key": "k"})
        assert answer.status_code == 202
    assert answer.json()["digest"] == Policy(name="team", preemption=Preemption(by=())).digest
    [stored] = await bus.read_history(subjects.request("adopt_policy"), stream="REQUESTS")
    assert stored.event == AdoptPolicyRequested.model_validate(asked)
    wrong = await gateway.client.put("/policy", json={"policy": {"order": {"skipp": True}}})
    assert wrong.status_code == 422
    assert "policy.order.skipp" in wrong.text

    async def answer_diff(message: Any) -> None:
        policy = Policy.model_validate_json(message.data)
        await message.respond(json.dumps({"error": "too new"} if policy == FIFO else {"changes": []}).encode())

    await bus.nc.subscribe(subjects.service("scheduler", "policy_diff"), cb=answer_diff)
    # The client may send the ping of a flush before the subscription.
    while (found := await gateway.client.post("/policy/diff", json=asked)).status_code == 503:
        pass
    assert found.json() == {"changes": []}
    refused = await gateway.client.post("/policy/diff", json={"policy": FIFO.model_dump(mode="json")})
    assert (refused.status_code, refused.json()["detail"]) == (422, "too new")


async def test_operations(gateway: Running) -> None:
    page = await gateway.client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert (await gateway.get("/health")) == {"service": "gateway", "status": "ok"}
    assert (await gateway.get("/ready"))["checks"]["projection"] is True
    await gateway.client.get("/training-runs/some-run-id")
    metrics = (await gateway.client.get("/metrics")).text
    assert 'route="/training-runs/{run}",status="404"' in metrics
    assert "some-run-id" not in metrics
    schema = await gateway.get("/openapi.json")
    assert schema["paths"]["/training-runs/{run}"]["get"]["responses"]["200"]["content"]


async def test_the_page_of_the_interface_asks_nobody_else(gateway: Running) -> None:
    page = await gateway.client.get("/docs")
    assert "/openapi.json" in page.text
    addresses = re.findall(r"""(?:src|href)=["']([^"']+)["']""", page.text)
    assert addresses
    for address in addresses:
        assert address.startswith(("/docs/assets/", "data:"))
        if not address.startswith("data:"):
            assert (await gateway.client.get(address)).status_code == 200
    policy = page.headers["content-security-policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "https:" not in policy


async def test_nats_is_killed_and_comes_back(
    gateway: Running, bus: Bus, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading continues, writing answers when to retry, and what follows is projected."""
    await publish(bus, *life())
    await gateway.client.get("/training-runs/none")  # waits until all of the above is in
    nats_server.kill()
    assert (await gateway.get(f"/training-runs/{RUN}"))["state"] == "completed"
    with monkeypatch.context() as impatient:
        impatient.setattr(commands, "PUBLISH_TIMEOUT_S", 0.3)
        away = await gateway.client.post("/training-runs", json=BODY, headers={"Idempotency-Key": "k"})
    assert (away.status_code, away.headers["retry-after"]) == (503, "2")
    assert (await gateway.client.get("/ready")).status_code == 503
    nats_server.start()
    monkeypatch.setattr(commands, "PUBLISH_TIMEOUT_S", 60.0)
    again = await gateway.client.post("/training-runs", json=BODY, headers={"Idempotency-Key": "k"})
    assert again.status_code == 202, again.text
    run_id = again.json()["run_id"]
    assert (await gateway.get(f"/training-runs/{run_id}"))["state"] == "requested"
    assert len(await bus.read_history(subjects.request("train"), stream="REQUESTS")) == 1


@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 404)])
async def test_another_web_site_cannot_act_through_a_visitors_browser(gateway: Running, site: str, status: int) -> None:
    answer = await gateway.client.post("/training-runs/nobody/cancel", headers={"Sec-Fetch-Site": site})
    assert answer.status_code == status


async def test_a_model_shows_its_gates_aliases_and_who_waits(
    gateway: Running, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_PENDING", 1)
    promoted = ModelPromoted(model="digits", version=1, run_id=RUN, checkpoint_uri="s3://models/x")
    ref = CheckpointRef(uri="s3://models/y", step=5, epoch=1, samples_consumed=5)
    committed = CheckpointCommitted(
        run_id="r2", generation=1, checkpoint=ref, size_bytes=1, metrics={"validation/accuracy": 0.8}
    )
    again = promoted.model_copy(update={"version": 2, "run_id": "r2", "checkpoint_uri": ref.uri})
    staged = ModelStaged(model="digits", alias="staging", version=1, run_id=RUN, request_id="q")
    removed = [
        ModelStaged(model="digits", alias="old", version=1, run_id=RUN, request_id="q1"),
        ModelStaged(model="digits", alias="old", request_id="q2"),
    ]
    failed = ModelDeployFailed(
        model="digits", version=2, run_id="r2", stage="golden", reason="other answers", serving_version=1
    )
    older = ModelConfigured(model="digits", version=1, gates=ModelGates(exact=True))
    gates = ModelGates(confidence=0.95, approval=True)
    accepted = RunAccepted(run_id="rwaits", spec=EVALUATED_SPEC, request_id="1", request_source="t")
    pending = RunPromotionPending(run_id="rwaits", model="digits", awaits="approval", reason="approve it")
    configured = ModelConfigured(model="digits", version=2, gates=gates)
    later = [each.model_copy(update={"run_id": "rwaits2"}) for each in (accepted, pending)]
    await publish(
        bus, promoted, committed, again, staged, *removed, failed, older, configured, *later, accepted, pending
    )
    found: dict[str, Any] = {}
    async with asyncio.timeout(60):
        while not found.get("pending"):
            found = (await gateway.client.get("/models/digits")).json()
            await asyncio.sleep(0.05)
    assert (found["champion"]["version"], found["champion"]["champion"]) == (2, True)
    assert (found["champion"]["metrics"], found["champion"]["training_metrics"]) == ({}, {"validation/accuracy": 0.8})
    pages = [await gateway.get("/models/digits/versions", params={"limit": 1})]
    pages.append(await gateway.get("/models/digits/versions", params={"limit": 1, "cursor": pages[0]["next_cursor"]}))
    assert [[(each["version"], each["champion"]) for each in page["models"]] for page in pages] == [
        [(2, True)],
        [(1, False)],
    ]
    assert pages[1]["next_cursor"] is None
    assert (found["gates"], found["configuration"]) == ({"confidence": 0.95, "approval": True}, 2)
    assert found["aliases"] == {"staging": 1}
    assert [(each["run_id"], each["awaits"]) for each in found["pending"]] == [("rwaits", "approval")]
    assert (found["served_version"], found["serving_problem"]) == (
        1,
        "version 2 is not served (golden): other answers",
    )
    assert (await gateway.get("/registered-models"))["models"] == [found], "its versions come in pages of their own"
    assert (await gateway.client.get("/training-runs/rwaits")).json()["verdict"] == "awaiting_approval"
    for path in ("/models/none", "/models/none/versions"):
        assert (await gateway.client.get(path)).status_code == 404


MODEL_REQUESTS: dict[str, tuple[str, str, dict[str, Any], int, str]] = {
    "promote": ("POST", "promote", {"run_id": RUN}, 202, "promote.requested"),
    "rollback": ("POST", "rollback", {}, 202, "rollback.requested"),
    "approve": ("POST", "approve", {"run_id": RUN, "approved": False}, 202, "approve.requested"),
    "stage": ("POST", "stage", {"alias": "staging", "version": 1}, 202, "stage.requested"),
    "gates": ("PUT", "gates", {"gates": {"confidence": 0.95}}, 202, "configure.requested"),
    "no run": ("POST", "promote", {}, 422, "run_id"),
    "unknown gate": ("PUT", "gates", {"gates": {"confidense": 0.95}}, 422, "confidense"),
    "reserved": ("POST", "stage", {"alias": "champion", "version": 1}, 422, "reserved"),
}


@pytest.mark.parametrize("case", MODEL_REQUESTS)
async def test_requests_about_a_model(case: str, gateway: Running, bus: Bus) -> None:
    method, action, body, status, words = MODEL_REQUESTS[case]
    answer = await gateway.client.request(method, f"/models/digits/{action}", json=body)
    assert answer.status_code == status, answer.text
    if status == 202:
        [stored] = await bus.read_history(words, stream="REQUESTS")
        assert (stored.event.model, stored.envelope.id) == ("digits", answer.json()["request_id"])
    else:
        assert words in answer.text


async def test_a_run_that_cannot_be_shown_hides_no_other(
    gateway: Running, gateway_settings: GatewaySettings, bus: Bus
) -> None:
    for run_id in ("rgood", "rbad"):
        await publish(bus, RunAccepted(run_id=run_id, spec=SPEC, request_id=run_id, request_source="t"))

    async def listed() -> dict[str, Any]:
        return {run["run_id"]: run for run in (await gateway.get("/training-runs"))["runs"]}

    await until(lambda: listed_ids(gateway, {"rgood", "rbad"}), "both runs")
    with closing(sqlite3.connect(gateway_settings.data_dir / "gateway.sqlite", timeout=60)) as database, database:
        # As a version that let such a time in may have left it.
        database.execute("UPDATE runs SET requested_at = 1e18 WHERE run_id = 'rbad'")
    shown = await listed()
    assert shown["rgood"]["reason"] is None
    assert shown["rbad"]["reason"].startswith("this run cannot be shown")
    assert shown["rbad"]["state"] == "accepted"


async def listed_ids(gateway: Running, wanted: set[str]) -> bool:
    return {run["run_id"] for run in (await gateway.get("/training-runs"))["runs"]} == wanted


async def test_a_time_at_the_end_of_the_calendar_is_no_request(gateway: Running, bus: Bus) -> None:
    headers = {"ce-id": "1", "ce-source": "s", "ce-time": "9999-12-31T23:59:59-23:59"}
    await bus.js.publish("train.requested", json.dumps(BODY).encode(), headers=headers)
    await publish(bus, RunAccepted(run_id="rgood", spec=SPEC, request_id="1", request_source="t"))
    await until(lambda: listed_ids(gateway, {"rgood"}), "the run after it")


async def test_a_key_means_one_request_on_every_route(gateway: Running, bus: Bus) -> None:
    await publish(bus, RunAccepted(run_id=RUN, spec=SPEC, request_id="1", request_source="t"))
    await until(lambda: listed_ids(gateway, {RUN}), "the run")
    key = {"Idempotency-Key": "one"}
    cancel = f"/training-runs/{RUN}/cancel"
    first = await gateway.client.post(cancel, params={"reason": "a"}, headers=key)
    again = await gateway.client.post(cancel, params={"reason": "a"}, headers=key)
    other = await gateway.client.post(cancel, params={"reason": "b"}, headers=key)
    assert (first.status_code, again.status_code, other.status_code) == (202, 202, 409)
    assert again.json()["duplicate"] is True
    assert again.json()["sequence"] == first.json()["sequence"]
    assert "was used for another request" in other.json()["detail"]
    gates = "/models/digits/gates"
    set_gates = [
        await gateway.client.put(gates, json={"gates": {"threshold": share}}, headers=key) for share in (0.1, 0.1, 0.2)
    ]
    assert [answer.status_code for answer in set_gates] == [202, 202, 409], set_gates[0].text
    # Another kind of request under the same key is another request, and is stored.
    trained = await gateway.client.post("/training-runs", json=BODY, headers=key)
    assert (trained.status_code, trained.json()["duplicate"]) == (202, False)
    sequence = trained.json()["sequence"]
    assert (await bus.js.get_msg("REQUESTS", sequence)).subject == "train.requested"


async def test_two_sources_may_count_alike(bus: Bus) -> None:
    request = CancelRequested(run_id=RUN, reason="a")
    sent = [
        await bus.publish_event(
            request,
            request.subject,
            Envelope(id="1", source=source, type=request.type, time=datetime(2026, 1, 1, tzinfo=UTC)),
        )
        for source in ("shop", "shop", "office")
    ]
    assert [ack.duplicate for ack in sent] == [False, True, False]
