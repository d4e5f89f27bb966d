"""The checkpoints of a run in pages, and the best of them, as the read model finds them."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, replace
from typing import Any

import pytest
import sqlalchemy as sa

from contracts import best_checkpoint
from contracts.events.checkpoint import CheckpointCommitted
from contracts.spec.run import RunSpec
from services.gateway import checkpoint_queries
from services.gateway.core.rows import Checkpoint
from services.gateway.settings import GatewaySettings
from services.gateway.store import CHECKPOINTS, Store
from services.kit.bus import Bus
from tests.gateway.conftest import EVALUATED_SPEC, RUN, Running, life, ref
from tests.gateway.test_postgres import on_postgres, postgres_url
from tests.gateway.test_projection import publish

__all__ = ["on_postgres", "postgres_url"]
METRIC = EVALUATED_SPEC.retention.metric


def checkpoint(step: int, **fields: Any) -> Checkpoint:
    made = Checkpoint(f"s3://models/{RUN}/{step:06d}.json", RUN, 1, step, step // 10, step, 1000, 1000.0 + step)
    return replace(made, **fields)


async def fill(store: Store, rows: list[Checkpoint]) -> dict[str, Any]:
    async with store.engine.begin() as connection:
        await store.upsert(connection, CHECKPOINTS, rows)
    return {"run_id": RUN, "spec": EVALUATED_SPEC.model_dump(mode="json")}


async def explain(store: Store, query: sa.Select[Any]) -> str:
    """Return how SQLite runs a query."""
    async with store.engine.connect() as connection:
        text = str(query.compile(store.engine.sync_engine, compile_kwargs={"literal_binds": True}))
        return "\n".join(row[3] for row in await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}"))


async def test_checkpoints_come_in_pages_the_newest_first(gateway: Running, bus: Bus) -> None:
    measured = [
        CheckpointCommitted(run_id=RUN, generation=2, checkpoint=ref(step), size_bytes=10, metrics={METRIC: value})
        for step, value in ((50, 0.1), (60, 0.2), (70, 0.3))
    ]
    await publish(bus, *life(spec=EVALUATED_SPEC), *measured)
    await gateway.get(f"/training-runs/{RUN}", params={"fresh": True})
    seen: list[int] = []
    cursor: dict[str, str] = {}
    while True:
        page = await gateway.get(f"/training-runs/{RUN}/checkpoints", params={"limit": 2, **cursor})
        assert len(page["checkpoints"]) <= 2
        assert page["best"]["step"] == 50, "the best of the run, not of the page"
        seen += [each["step"] for each in page["checkpoints"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert seen == [70, 60, 50, 40, 20]
    refused = await gateway.client.get(f"/training-runs/{RUN}/checkpoints", params={"cursor": "bad"})
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:trainbus:problem:bad-cursor")


async def test_a_page_of_checkpoints_is_read_from_an_index(gateway_settings: GatewaySettings) -> None:
    async with Store(gateway_settings.database_url) as store:
        row = await fill(store, [checkpoint(step) for step in range(5)])
        first = await checkpoint_queries.list_checkpoints(store, row, limit=2, cursor=None)
        for cursor in (None, first.next_cursor):
            plan = await explain(store, checkpoint_queries.page_query(RUN, cursor))
            assert "SEARCH checkpoints USING INDEX ix_checkpoints_run_id_step_generation_uri" in plan
            assert "SCAN" not in plan
            assert "TEMP B-TREE" not in plan


def random_checkpoints(generator: random.Random) -> list[Checkpoint]:
    values = [1.0, 1.5, 1.5000000000000002, -3.0, 1e-17, 1e300, math.nan, math.inf, -math.inf]
    names = [METRIC, "test/accuracy", 'a "quoted" name']
    return [
        checkpoint(
            step,
            metrics={name: generator.choice(values) for name in generator.sample(names, generator.randint(0, 2))},
            deleted_at=generator.choice([None, None, 5.0]),
        )
        for step in range(generator.randint(0, 6))
    ]


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.needs("postgres"))])
async def test_the_database_finds_the_best_that_all_services_find(
    database: str, gateway_settings: GatewaySettings, request: pytest.FixtureRequest
) -> None:
    settings = gateway_settings if database == "sqlite" else request.getfixturevalue("on_postgres")
    spec = RunSpec.model_validate(EVALUATED_SPEC.model_dump())
    generator = random.Random(7)
    async with Store(settings.database_url) as store:
        for _ in range(60):
            async with store.engine.begin() as connection:
                await connection.execute(CHECKPOINTS.delete())
            rows = random_checkpoints(generator)
            row = await fill(store, rows)
            present = [each for each in rows if each.deleted_at is None]
            expected = best_checkpoint.find_best(spec, present)
            found = await checkpoint_queries.find_best(store, row)
            if expected is None:
                assert found is None
            else:
                assert found is not None
                # NaN is unlike itself.
                assert str(asdict(found[0])) == str(asdict(expected))
                assert found[1] == best_checkpoint.find_ranking_metric(spec, present)
