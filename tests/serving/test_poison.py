"""Inputs on which a model's process ends: found, answered as an error, and no harm to others or to the version."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from loadtest.served_models import draw_rows
from services.serving.core.poison import PoisonedInputs, digest_samples
from services.serving.process import ModelProcess
from services.serving.version import ModelHost
from tests.serving.conftest import House, wait_until

ROWS = draw_rows(8, seed=11)
POISON = {"a": 1e9, "b": 0, "c": 0, "d": 0}
LARGE = {"a": 1000, "b": 0, "c": 0, "d": 0}


def test_the_newest_inputs_are_remembered() -> None:
    inputs = PoisonedInputs(max_inputs=2)
    for content in (b"1", b"2", b"3"):
        inputs.add([{"json": content}])
    assert [[{"json": content}] in inputs for content in (b"1", b"2", b"3")] == [False, True, True]


def test_digests_tell_where_a_field_and_a_sample_end() -> None:
    requests: list[list[dict[str, bytes]]] = [
        [{"ab": b"c"}],
        [{"a": b"bc"}],
        [{"a": b"1", "b": b"2"}],
        [{"a": b"1"}, {"b": b"2"}],
    ]
    assert len({digest_samples(each) for each in requests}) == len(requests)


@pytest.mark.shell
async def test_of_a_batch_only_the_poisonous_input_fails_and_it_ends_no_second_process(house: House) -> None:
    await house.deploy("good", wait_s=0.2)

    def send(row: dict[str, Any]) -> Any:
        return asyncio.create_task(house.http.post("/predict", json=[row]))

    first = send(ROWS[0])
    await wait_until(lambda: house.host.process and house.host.process.waiting, "a batch is computed")
    others = [send(row) for row in (*ROWS[1:4], POISON, *ROWS[4:])]
    answers = await asyncio.gather(first, *others)
    assert [each.status_code for each in answers] == [200, 200, 200, 200, 500, 200, 200, 200, 200]
    assert "the model's process ended on this input" in answers[4].json()["error"]
    await wait_until(lambda: house.host.process, "the process runs again")
    pid = house.host.process.pid
    again = await send(POISON)
    assert again.status_code == 500
    assert "ended on this input before" in again.json()["error"]
    await house.predict(*ROWS)
    assert house.host.process.pid == pid


@pytest.mark.shell
async def test_an_input_on_which_both_versions_end_takes_none_back(house: House) -> None:
    await house.deploy("r1")
    await house.deploy("r2")
    assert (await house.http.post("/predict", json=[POISON])).status_code == 500
    await wait_until(lambda: house.host.process, "the process runs again")
    assert (await house.predict(*ROWS))["version"] == 2
    assert house.served.primary is not None
    assert (house.served.primary.tally.compared, house.served.primary.tally.worse) == (1, 0)


@pytest.mark.shell
async def test_an_input_that_the_version_before_answers_takes_the_new_one_back(house: House) -> None:
    await house.deploy("r1")
    await house.deploy("r2", "crash on large")
    assert (await house.predict(LARGE))["version"] == 1
    fact = await house.taken_back(2)
    assert (fact.stage, fact.serving_version) == ("watch", 1)
    assert "ended on an input that the version before answers" in fact.reason


@pytest.mark.shell
async def test_an_input_that_two_processes_had_not_begun_with_is_answered(house: House) -> None:
    for run_id in ("slow", "slow too"):
        await house.deploy(run_id.replace(" ", "-"), wait_s=0.3)
    assert house.served.primary is not None
    assert house.served.previous is not None

    def send(path: str) -> Any:
        return asyncio.create_task(house.http.post(path, json=[ROWS[len(requests)]]))

    async def fill(host: ModelHost, *paths: str) -> ModelProcess:
        """Let the process of a host compute the first request, so that the others wait behind it."""
        process = host.process
        assert process is not None
        for number, path in enumerate(paths, 1):
            requests.append(send(path))
            await wait_until(lambda number=number: process.waiting == number and process._batch, "it waits")
        return process

    requests: list[asyncio.Task[Any]] = []
    newer = await fill(house.served.primary.host, "/predict?version=2", "/predict")
    older = await fill(house.served.previous.host, "/predict?version=1")
    os.kill(newer.pid, signal.SIGKILL)
    await wait_until(lambda: older.waiting == 2, "it is asked of the version before")
    os.kill(older.pid, signal.SIGKILL)
    answers = await asyncio.gather(*requests)
    assert [each.status_code for each in answers] == [500, 200, 500]
