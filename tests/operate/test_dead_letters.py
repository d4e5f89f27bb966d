"""``trainbus dead-letters``: what it prints, and what it deletes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from contracts import topology
from contracts.envelope import RawMessage
from services.kit.bus import Bus
from services.kit.dead_letters import DeadLetterLimit, build_dead_letter
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.commands import dead_letters
from trainbus.operate.connection import Connection

RAW = RawMessage(
    "run.r1.accepted", b'{"run_id":"r1"}', {"ce-id": "a", "Nats-Msg-Id": "m", "Nats-Batch-Id": "b"}, "FACTS", 7
)


async def store(bus: Bus, raw: RawMessage = RAW) -> int:
    subject, headers, body = build_dead_letter(topology.SHARDING, raw, "no such\n[red]column[/]", bus.nc.max_payload)
    return (await bus.js.publish(subject, body, headers=headers)).seq


def operator_of(bus: Bus) -> Connection:
    return Connection(bus.nc)


async def test_a_dead_letter_is_listed_and_shown_with_what_it_was(bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    await dead_letters.ls(operator_of(bus))
    assert capsys.readouterr().out == "there are no dead letters\n"
    sequence = await store(bus)
    await dead_letters.ls(operator_of(bus), "sharding")
    assert "no such [red]column[/]" in capsys.readouterr().out
    await dead_letters.ls(operator_of(bus), "tracking", as_json=True)
    assert json.loads(capsys.readouterr().out) == []
    await dead_letters.show(operator_of(bus), sequence, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["subject"], shown["stream"], shown["stream_sequence"]) == ("run.r1.accepted", "FACTS", 7)
    assert shown["headers"] == {"ce-id": "a", "Nats-Msg-Id": "m"}
    assert shown["body"] == '{"run_id":"r1"}'


async def test_dropping_deletes_and_a_service_that_is_away_is_named(
    bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    sequence = await store(bus)
    with pytest.raises(TrainbusError, match="consumer 'sharding' does not answer"):
        await dead_letters.retry(operator_of(bus), [sequence])
    await dead_letters.drop(operator_of(bus), [sequence], yes=True)
    with pytest.raises(TrainbusError, match=f"no dead letter {sequence}"):
        await dead_letters.drop(operator_of(bus), [sequence], yes=True)
    assert capsys.readouterr().out == f"{sequence}: dropped\n"


async def test_all_of_a_consumer_are_retried_and_dropped(bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = await store(bus), await store(bus, replace(RAW, sequence=8))
    with pytest.raises(TrainbusError) as error:
        await dead_letters.retry(operator_of(bus), every=True)
    assert [f"dead letter {each} was not retried" in str(error.value) for each in (first, second)] == [True, True]
    await dead_letters.drop(operator_of(bus), yes=True, every=True, consumer="tracking")
    await dead_letters.drop(operator_of(bus), yes=True, every=True, consumer="sharding")
    assert capsys.readouterr().out == f"{first}: dropped\n{second}: dropped\n"
    for wrong in ({}, {"sequences": [1], "every": True}, {"sequences": [1], "consumer": "sharding"}):
        with pytest.raises(UsageError, match="or --all"):
            await dead_letters.drop(operator_of(bus), yes=True, **wrong)


@pytest.mark.parametrize(
    ("outcomes", "allowed"),
    [
        pytest.param("ddd", "yyy", id="up to the limit in a row"),
        pytest.param("dddd", "yyyn", id="beyond it"),
        pytest.param("dddhddd", "yyyyyy", id="a handled message resets the count in a row"),
        pytest.param("dddd" + "h" * 20 + "d", "yyynn", id="what has stopped stays stopped"),
        pytest.param("ddh" * 3 + "dh" + "d", "yyyyyyyn", id="half of the window"),
    ],
)
def test_the_limit_counts_in_a_row_and_by_share(outcomes: str, allowed: str) -> None:
    limit, answers = DeadLetterLimit(max_consecutive=3, max_share=0.5, window=10), ""
    for outcome in outcomes:
        if outcome == "h":
            limit.record_handled()
        else:
            answers += "y" if limit.allows_dead_letter() else "n"
    assert answers == allowed
