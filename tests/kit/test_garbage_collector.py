"""A collection that fails, for whatever reason, stops neither its service nor the next collection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from botocore.exceptions import ClientError
from prometheus_client import CollectorRegistry, Counter

from services.kit.bus import Bus
from services.kit.concurrency import cancel_and_wait
from services.kit.garbage_collector import GarbageCollector
from services.kit.settings import Settings
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore
from tests.kit.support import until


@pytest.fixture
def failures() -> Iterator[Exception]:
    """What the store answers, what somebody removed meanwhile, and a defect of ours."""
    return iter(
        [
            ClientError({"Error": {"Code": "SlowDown", "Message": "reduce your rate"}}, "ListObjectsV2"),
            ObjectNotFound("s3://datasets/gone"),
            ValueError("a manifest that cannot be read"),
            KeyError("defect"),
        ]
    )


async def test_a_collection_that_fails_is_tried_again(
    bus: Bus, objects: ObjectStore, s3_settings: Settings, failures: Iterator[Exception]
) -> None:
    runs = Counter("test_gc_runs", "of a test", ["outcome"], registry=CollectorRegistry())

    async def collect(*_: object) -> int:
        for failure in failures:
            raise failure
        return 0

    collector = GarbageCollector("test-gc", runs, collect, str, lambda settings: "trainbus-datasets")
    task = asyncio.create_task(collector.run_periodically(0.01, bus, objects, s3_settings))
    await until(lambda: runs.labels("done")._value.get(), "a collection that is done")
    await cancel_and_wait(task)
    assert runs.labels("failed")._value.get() == 4
