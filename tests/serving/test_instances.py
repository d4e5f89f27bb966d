"""Several instances serve the same models: each judges for itself, and a sick host says nothing about a version."""

from __future__ import annotations

import errno
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from contracts.events.model import ModelDeployDelayed, ModelDeployed, ModelDeployFailed, ModelPromoted
from loadtest.served_models import draw_rows
from services.serving.core.versions import ModelVersions
from services.serving.fetcher import ModelFetcher
from services.serving.instance_id import load_instance_id
from tests.serving.conftest import House

ROWS = draw_rows(2, seed=23)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def promoted(version: int) -> ModelPromoted:
    return ModelPromoted(model="m", version=version, run_id=f"r{version}", checkpoint_uri=f"s3://models/{version}")


@pytest.mark.parametrize(("instance", "wanted"), [("here", 1), ("", 1), ("elsewhere", 2)])
def test_failures_of_other_instances_do_not_count(instance: str, wanted: int) -> None:
    versions = ModelVersions("here")
    deployed = ModelDeployed(model="m", version=1, run_id="r1", seconds=1.0, instance="elsewhere")
    failed = ModelDeployFailed(model="m", version=2, run_id="r2", stage="golden", reason="why", instance=instance)
    for fact in (promoted(1), deployed, promoted(2), failed):
        versions.apply(fact, NOW)
    assert versions.wanted is not None
    assert versions.wanted.version == wanted


def test_an_instance_keeps_its_id(tmp_path: Path) -> None:
    made = load_instance_id(tmp_path / "data")
    assert load_instance_id(tmp_path / "data") == made
    assert load_instance_id(tmp_path / "other") != made


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.serving.deployer.HOST_RETRY_DELAYS_S", (0.01,))


@pytest.mark.shell
@pytest.mark.usefixtures("quick_retries")
async def test_a_full_disk_delays_a_version(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    await house.deploy("r1")
    failures = [OSError(errno.ENOSPC, "No space left on device")] * 3
    fetch = ModelFetcher.fetch

    async def fill_disk(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return await fetch(*arguments)

    monkeypatch.setattr(ModelFetcher, "fetch", fill_disk)
    fact = await house.deploy("r2")
    [delayed] = await house.find_facts(ModelDeployDelayed)
    assert (delayed.version, delayed.instance, delayed.attempt) == (2, fact.instance, 1)
    assert "No space left on device" in delayed.reason
    assert await house.find_facts(ModelDeployFailed) == []


@pytest.mark.shell
@pytest.mark.usefixtures("quick_retries")
async def test_a_process_that_the_kernel_kills_delays_a_version(house: House, tmp_path: Path) -> None:
    await house.deploy("r1")
    await house.deploy("r2", "killed once", marker=str(tmp_path / "marker"))
    [delayed] = await house.find_facts(ModelDeployDelayed)
    assert delayed.stage == "start"
    assert await house.find_facts(ModelDeployFailed) == []


@pytest.mark.shell
async def test_a_version_that_one_instance_takes_back_answers_on_the_others(start_house: Any, tmp_path: Path) -> None:
    first: House = await start_house(data_dir=tmp_path / "first")
    await first.deploy("r1")
    await first.deploy("r2", "raise on large")
    second: House = await start_house(data_dir=tmp_path / "second")
    assert (await second.http.get("/v2/health/ready")).status_code in (200, 503)
    await second.wait_ready()
    assert (await second.http.get("/v2/health/ready")).status_code == 200
    for _ in range(3):
        assert (await first.predict({"a": 1000, "b": 0, "c": 0, "d": 0}))["version"] == 1
    await first.taken_back(2)
    assert (await first.predict(ROWS[0]))["version"] == 1
    assert (await second.predict(ROWS[0]))["version"] == 2
    instances = {each.instance for each in await first.find_facts(ModelDeployed) if each.version == 2}
    assert len(instances) == 2
