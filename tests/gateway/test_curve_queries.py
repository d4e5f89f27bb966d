"""Metric curves from the read model: each answer has few of many names, and few of many points."""

from __future__ import annotations

import math
from typing import Any

import pytest

from contracts.events.run import ProgressPoint
from services.gateway import curve_queries
from services.gateway.core.rows import Point
from services.gateway.settings import GatewaySettings
from services.gateway.store import POINTS, Store
from services.kit.bus import Bus
from tests.gateway.conftest import RUN, Running, life, progress
from tests.gateway.test_checkpoint_queries import explain
from tests.gateway.test_postgres import on_postgres, postgres_url
from tests.gateway.test_projection import publish
from tests.kit.support import until

__all__ = ["on_postgres", "postgres_url"]


async def add_points(store: Store, curves: dict[str, list[int]], *, kind: str = "training", node_id: str = "") -> None:
    points = [
        Point(RUN, kind, name, node_id, step, 1000.0 + step, float(step), 1)
        for name, steps in curves.items()
        for step in steps
    ]
    async with store.engine.begin() as connection:
        await store.upsert(connection, POINTS, points)


async def read_all(store: Store, **wanted: Any) -> dict[str, list[tuple[int, float]]]:
    """Return the curves of all pages."""
    found: dict[str, list[tuple[int, float]]] = {}
    cursor = None
    while True:
        page = await curve_queries.list_curves(
            store, RUN, **{"names": [], "max_points": 500, "limit": 2, **wanted}, cursor=cursor
        )
        assert len(page.curves) <= 2
        found |= page.curves
        if page.next_cursor is None:
            return found
        cursor = page.next_cursor


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.needs("postgres"))])
async def test_curves_are_thinned_and_come_in_pages(
    database: str, gateway_settings: GatewaySettings, request: pytest.FixtureRequest
) -> None:
    settings = gateway_settings if database == "sqlite" else request.getfixturevalue("on_postgres")
    curves = {
        "accuracy": [7],
        "loss": list(range(0, 10_000, 10)),
        "rare": [1, 2, 3, 9_000],
        'a "quoted" name': [4, 5],
        # Most points at the beginning: strides of steps still leave some of the end.
        "uneven": [*range(1000), *range(5_000, 90_000, 1_000)],
    }
    async with Store(settings.database_url) as store:
        assert await read_all(store) == {}
        await add_points(store, curves)
        await add_points(store, {"cpu": [1, 2]}, kind="system", node_id="n1")
        whole = await read_all(store, max_points=10_000)
        assert {name: [step for step, _ in points] for name, points in whole.items()} == curves
        assert list(whole) == sorted(curves)
        for max_points in (2, 3, 7, 50, 999, 1000):
            for name, points in (await read_all(store, max_points=max_points)).items():
                steps, given = [step for step, _ in points], curves[name]
                assert len(steps) <= max_points
                assert steps == sorted(set(steps) & set(given)), "points of the curve, in order"
                assert steps[-1] == given[-1], "the newest value is shown"
                if len(given) <= max_points:
                    assert steps == given
                else:
                    assert steps[0] - given[0] <= -(-(given[-1] - given[0]) // (max_points - 1))
        # Any integer may come as a step: no sum of two is beyond those of the database.
        await add_points(store, {"wide": [-(2**63), -1, 0, 1, 2**62, 2**63 - 1]})
        for max_points in (2, 3, 5):
            steps = [step for step, _ in (await read_all(store, names=["wide"], max_points=max_points))["wide"]]
            assert (len(steps) <= max_points, steps[-1]) == (True, 2**63 - 1)
        assert list(await read_all(store, names=["rare", "loss", "none", "accuracy"])) == ["accuracy", "loss", "rare"]


async def test_an_answer_has_a_bounded_number_of_points(
    gateway_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_queries, "MAX_POINTS", 100)
    async with Store(gateway_settings.database_url) as store:
        await add_points(store, {f"m{number}": list(range(60)) for number in range(5)})
        page = await curve_queries.list_curves(store, RUN, names=[], max_points=50, limit=500, cursor=None)
        assert (list(page.curves), page.next_cursor is None) == (["m0", "m1"], False)
        page = await curve_queries.list_curves(store, RUN, names=[], max_points=200, limit=500, cursor=None)
        assert list(page.curves) == ["m0"], "one, however many points it has"


async def test_neither_names_nor_points_are_read_one_by_one(gateway_settings: GatewaySettings) -> None:
    async with Store(gateway_settings.database_url) as store:
        queries = curve_queries.names_query(RUN, [], 50, None), curve_queries.points_query(RUN, ["loss"], 50)
        for query in queries:
            plan = (await explain(store, query)).splitlines()
            assert not [line for line in plan if "SCAN points" in line]
            assert [line for line in plan if "(run_id=? AND kind=?" in line]
        walked = "(run_id=? AND kind=? AND name=? AND node_id=? AND step>? AND step<?)"
        assert any(walked in line for line in plan)


async def test_a_run_with_many_metrics_answers_with_the_first_and_a_cursor(gateway: Running, bus: Bus) -> None:
    point = ProgressPoint(step=7, time=1000.0, values={f"m{number:03d}": float(number) for number in range(120)})
    broken = ProgressPoint(step=8, time=1001.0, values={"m000": math.nan})
    await publish(bus, *life()[:6], progress(1, range(1, 2)).model_copy(update={"points": (point, broken)}))
    page: dict[str, Any] = {}

    async def is_drawn() -> bool:
        page.update(await gateway.get(f"/training-runs/{RUN}/curves"))
        return bool(page["curves"])

    await until(is_drawn, "the points")
    assert list(page["curves"]) == [f"m{number:03d}" for number in range(50)]
    assert page["curves"]["m000"][0] == [7, 0.0]
    after = {"limit": 500, "cursor": page["next_cursor"]}
    rest = await gateway.get(f"/training-runs/{RUN}/curves", params=after)
    assert (len(rest["curves"]), rest["next_cursor"]) == (70, None)
    named = await gateway.get(f"/training-runs/{RUN}/curves", params={"name": ["m119", "m003"]})
    assert list(named["curves"]) == ["m003", "m119"]
    refused = await gateway.client.get(f"/training-runs/{RUN}/curves", params={"cursor": "bad"})
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:trainbus:problem:bad-cursor")
