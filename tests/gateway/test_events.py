"""Every event of the bus by HTTP, and any request onto it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from contracts.events.node import NodeJoined
from contracts.events.run import RunAccepted, RunCompleted, RunQueued
from services.kit.bus import Bus
from tests.gateway.conftest import RUN, SPEC, Running, progress, ref
from tests.lives import supported

RANGE = "/events?follow=false"
SOURCE = "trainbus/gateway"
STUDY = {"run": {"name": "s", "command": ["true"]}, "space": {"x": [1, 2]}, "metrics": ["loss"]}


async def publish_three(bus: Bus) -> None:
    await bus.publish(RunAccepted(run_id=RUN, spec=SPEC, request_id="q", request_source="t"))
    await bus.publish(NodeJoined(node_id="n1", incarnation="i", address="a", slots=2, lease_ttl_s=3))
    await bus.publish(RunQueued(run_id=RUN, next_generation=1))


async def test_events_are_cloud_events_in_the_order_of_the_log(gateway: Running, bus: Bus) -> None:
    await publish_three(bus)
    found = await gateway.get(RANGE)
    assert [each["type"] for each in found["events"]] == [
        "trainbus.run.accepted.v1",
        "trainbus.node.joined.v1",
        "trainbus.run.queued.v1",
    ]
    assert [each["sequence"] for each in found["events"]] == [1, 2, 3]
    assert (found["last_event_id"], found["has_more"]) == (3, False)
    (joined,) = (await gateway.get(f"{RANGE}&subject=node.>"))["events"]
    assert (joined["specversion"], joined["natssubject"], joined["source"]) == (
        "1.0",
        "node.n1.joined",
        "trainbus/test",
    )
    assert joined["data"]["slots"] == 2


async def test_a_range_goes_on_where_another_ended(gateway: Running, bus: Bus) -> None:
    await publish_three(bus)
    first = await gateway.get(f"{RANGE}&limit=2")
    assert (len(first["events"]), first["has_more"]) == (2, True)
    rest = await gateway.get(f"{RANGE}&limit=2", headers={"Last-Event-ID": str(first["last_event_id"])})
    assert ([each["sequence"] for each in rest["events"]], rest["has_more"]) == ([3], False)
    nothing = await gateway.get(RANGE, headers={"Last-Event-ID": "3"})
    assert (nothing["events"], nothing["last_event_id"]) == ([], 3)


async def test_the_last_events_are_found_from_the_end(gateway: Running, bus: Bus) -> None:
    assert (await gateway.get(f"{RANGE}&tail=1"))["last_event_id"] == 0
    await publish_three(bus)
    for path, sequences in {
        "&tail=2": [2, 3],
        "&tail=1&subject=run.>": [3],
        "&tail=5&subject=run.>": [1, 3],
        "&tail=1&subject=node.n1.joined": [2],
        "&tail=1&subject=run.*.accepted&subject=node.>": [2],
        "&tail=0": [],
        "&tail=1&subject=model.>": [],
    }.items():
        found = await gateway.get(RANGE + path)
        assert [each["sequence"] for each in found["events"]] == sequences, path
        assert found["last_event_id"] == 3 or sequences == [2], path
    await bus.publish(progress(1, range(1, 4), loss=lambda step: float(step)))
    (reported,) = (await gateway.get(f"{RANGE}&stream=progress&tail=1"))["events"]
    assert reported["type"] == "trainbus.run.progress.v1"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("subject=run.>&subject=run.*.queued", "overlap"),
        ("subject=progress.run.r1", "is not on this stream"),
        ("subject=run..x", "subject"),
        ("stream=shadow", "stream"),
        ("tail=-1", "tail"),
        ("limit=0", "limit"),
    ],
)
async def test_what_cannot_be_asked_is_said(gateway: Running, bus: Bus, query: str, said: str) -> None:
    answer = await gateway.client.get(f"/events?{query}")
    assert answer.status_code == 422
    assert said in answer.json()["detail"]


async def test_a_stream_of_events_goes_on_after_a_break_with_nothing_lost_or_doubled(
    gateway: Running, bus: Bus
) -> None:
    await publish_three(bus)
    seen: list[int] = []

    async def listen(count: int, **headers: str) -> None:
        async with gateway.client.stream("GET", "/events?subject=run.>", headers=headers) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line.removeprefix("data: "))["sequence"])
                if len(seen) == count:
                    return

    async with asyncio.timeout(60):
        await listen(1)
        listening = asyncio.create_task(listen(3, **{"Last-Event-ID": str(seen[-1])}))
        await bus.publish(RunAccepted(run_id="other", spec=SPEC, request_id="q2", request_source="t"))
        await listening
    assert seen == [1, 3, 4]


async def read_last(gateway: Running, path: str, count: int) -> Any:
    """Return the last of so many server-sent events."""
    seen = []
    async with gateway.client.stream("GET", path) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
            if len(seen) == count:
                return seen[-1]


async def test_numbers_that_json_lacks_are_text_in_ranges_and_in_streams(gateway: Running, bus: Bus) -> None:
    await bus.publish(RunAccepted(run_id=RUN, spec=SPEC, request_id="q", request_source="t"))
    metrics = {"loss": float("nan"), "margin": float("-inf")}
    for fact in supported(RunCompleted(run_id=RUN, generation=1, checkpoint=ref(3), metrics=metrics)):
        await bus.publish(fact)
    await bus.publish(progress(1, range(1, 2), loss=lambda step: float("inf")))
    for path in ("/events?subject=run.>", f"/training-runs/{RUN}/events?limit=9"):
        stored = (await gateway.get(f"{path}&follow=false"))["events"]
        assert stored[-1]["data"]["metrics"] == {"loss": "NaN", "margin": "-Infinity"}, path
        assert await read_last(gateway, path, len(stored)) == stored[-1]
    for path, key in (("/events?stream=progress", "events"), (f"/training-runs/{RUN}/metrics?limit=9", "batches")):
        (stored,) = (await gateway.get(f"{path}&follow=false"))[key]
        (point,) = stored.get("data", stored)["points"]
        assert point["values"] == {"train/loss": "Infinity"}, path
        assert await read_last(gateway, path, 1) == stored


@pytest.mark.parametrize(
    "path", ["/events?", "/events?stream=logs&", f"/training-runs/{RUN}/events?", f"/training-runs/{RUN}/metrics?"]
)
async def test_after_the_end_there_is_nothing(gateway: Running, bus: Bus, path: str) -> None:
    await publish_three(bus)
    for last in (4, 2**63 - 1, 10**30):
        found = await gateway.get(f"{path}follow=false", headers={"Last-Event-ID": str(last)})
        assert (found["last_event_id"], found["has_more"]) == (min(last, 2**63 - 1), False)
