"""The whole service over NATS and S3: promoted -> answering; what is broken never answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from contracts.events.model import ModelDeployed, ModelDeployFailed
from loadtest.served_models import draw_rows, label
from tests.serving.conftest import PATIENCE_S, House, wait_until

pytestmark = pytest.mark.shell
ROWS = draw_rows(5, seed=3)


async def test_a_promotion_is_served_and_a_rollback_brings_the_version_before_back(house: House) -> None:
    first = await house.deploy("r1")
    assert (first.version, first.replaced_version, first.golden_samples) == (1, None, 32)
    answer = await house.predict(*ROWS)
    names = ["low", "high"]
    expected = [{"prediction": label(row), "class": names[label(row)]} for row in ROWS]
    assert answer == {"model": "sums", "version": 1, "predictions": expected}
    second = await house.deploy("r2")
    assert (second.version, second.replaced_version) == (2, 1)
    assert (await house.predict(*ROWS))["version"] == 2
    third = await house.deploy("r1")
    assert (third.version, third.replaced_version, third.golden_samples) == (3, 2, 0)
    assert (await house.predict(*ROWS))["predictions"] == expected


@pytest.mark.parametrize(
    ("defect", "stage", "reason"),
    [
        ("load", "start", "the vocabulary is missing"),
        ("wrong", "golden", "32 of 32 answers are not those of the evaluation"),
        ("raise", "warm-up", "an index is out of range"),
        ("hang", "warm-up", "did not answer for 10 s"),
        ("leak", "warm-up", "it leaks"),
    ],
)
async def test_a_broken_model_never_answers(start_house: Any, defect: str, stage: str, reason: str) -> None:
    house: House = await start_house(serving_timeout_s=10.0 if defect == "hang" else 60.0)
    await house.deploy("good")
    fact = await house.conclusion(await house.promote("bad", defect))
    assert isinstance(fact, ModelDeployFailed)
    assert (fact.stage, fact.serving_version) == (stage, 1)
    assert reason in fact.reason
    assert (await house.predict(ROWS[0]))["version"] == 1
    assert reason in (await house.models())[0]["problem"]
    # The next sound one is served.
    assert (await house.deploy("better")).replaced_version == 1


async def test_a_flipped_byte_is_never_served(house: House) -> None:
    await house.deploy("good")
    house.runs["flipped"] = ref = await house.store.train("flipped")
    manifest = await house.store.objects.get(ref.uri)
    await house.store.objects.put(ref.uri, manifest.replace(b"model-0", b"model-1"))
    fact = await house.conclusion(await house.promote("flipped"))
    assert isinstance(fact, ModelDeployFailed)
    assert fact.stage == "fetch"
    assert "is not the manifest that was committed" in fact.reason
    assert (await house.predict(ROWS[0]))["version"] == 1


async def test_a_version_that_crashes_later_is_taken_back(house: House) -> None:
    await house.deploy("good")
    version = await house.promote("fragile", "crash later")
    fact = await house.conclusion(version)
    while not isinstance(fact, ModelDeployFailed):
        # Requests go on meanwhile; none of them fails.
        await house.predict(*ROWS)
        fact = await house.conclusion(version)
    assert (fact.stage, fact.serving_version) == ("watch", 1)
    assert (await house.predict(ROWS[0]))["version"] == 1


async def test_a_crash_of_the_process_fails_no_other_request(house: House) -> None:
    await house.deploy("good")
    poison = await house.http.post("/predict", json=[{"a": 1e9, "b": 0, "c": 0, "d": 0}])
    assert poison.status_code == 500
    assert "the model's process ended on this input" in poison.json()["error"]
    assert (await house.predict(*ROWS))["version"] == 1


async def test_after_a_restart_the_champions_are_served_even_without_the_object_store(start_house: Any) -> None:
    house: House = await start_house()
    await house.deploy("r1")
    await house.deploy("r2")
    await house.conclusion(await house.promote("bad", "load"))
    await start_house.stop_all()
    again: House = await start_house(s3_endpoint="http://127.0.0.1:9")
    await wait_until(lambda: again.service.check_readiness()["folded"], "folded")
    await again.wait_ready()
    assert (await again.predict(ROWS[0]))["version"] == 2
    facts = [each.event for each in await again.bus.read_history("model.sums.*")]
    # Version 3 could not be loaded, so version 2 answers; nothing is published twice.
    assert [(type(each).__name__, each.version) for each in facts].count(("ModelDeployed", 2)) == 1


@pytest.mark.parametrize("compared", [32, 0])
async def test_a_canary_answers_its_share_before_it_takes_over(start_house: Any, compared: int) -> None:
    changes = {"serving_canary_share": 0.5, "serving_rollout_s": 1.5, "serving_golden_samples": compared}
    house: House = await start_house(**changes)
    await house.deploy("r1")
    version = await house.promote("r2")
    versions = set()
    async with asyncio.timeout(PATIENCE_S):
        while versions != {1, 2} or (await house.models())[0]["version"] != 2:
            versions.add((await house.predict(ROWS[0]))["version"])
    assert isinstance(await house.conclusion(version), ModelDeployed)


async def test_an_answer_names_the_weights_that_gave_it(house: House) -> None:
    await house.deploy("r1")
    named = {"trainbus-version": "1", "trainbus-run": "r1", "trainbus-digest": house.runs["r1"].manifest_sha256}
    row = {name: {"name": name, "shape": [1], "datatype": "FP64", "data": [1.0]} for name in ROWS[0]}
    answers = [
        await house.http.post("/predict", json=ROWS),
        await house.http.post("/v2/models/sums/infer", json={"inputs": list(row.values())}),
        await house.http.get("/v2/models/sums"),
    ]
    for answer in answers:
        assert {name: answer.headers[name] for name in named} == named


async def test_bad_input_is_explained_with_its_field(house: House) -> None:
    await house.deploy("good")
    cases: list[tuple[Any, str, str]] = [
        ([{"a": 1, "b": 2, "c": 3}], "rows.0.d", "'d' is missing; the row has 'a', 'b', 'c'"),
        ([{"a": "x", "b": 2, "c": 3, "d": 4}], "rows.0.a", "must be a number, not the text 'x'"),
        ([{"a": 1, "b": 2, "c": 3, "e": 4}], "rows.0.e", "there is no field 'e'"),
        ({"rows": []}, "rows", "there are no rows"),
        ({"rows": [3]}, "rows.0", "must be an object"),
    ]
    for body, field, text in cases:
        response = await house.http.post("/predict", json=body)
        assert response.status_code in (400, 422)
        problem = response.json()["problems"][0]
        assert problem["field"] == field
        assert text in problem["message"]
    broken = await house.http.post("/predict", content=b"{")
    assert "no JSON" in broken.json()["error"]
    missing = await house.http.post("/predict/nobody", json=ROWS)
    assert missing.status_code == 404
    assert "served are sums" in missing.json()["error"]


async def test_the_openapi_page_is_typed_by_the_model(house: House) -> None:
    await house.deploy("good")
    document = (await house.http.get("/openapi.json")).json()
    body = document["paths"]["/predict/sums"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    row = body["properties"]["rows"]["items"]
    assert row["properties"] == {name: {"type": "number"} for name in "abcd"}
    assert (await house.http.get("/docs")).status_code == 200
