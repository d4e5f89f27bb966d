"""The run dashboard's SQL runs on the real read model, filled by the real projection."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from contracts.events.run import ProgressPoint, RunProgress
from services.gateway.projection import STREAMS, Projection
from services.gateway.settings import GatewaySettings
from services.gateway.store import Store
from services.kit.bus import Bus
from services.kit.settings import Settings
from tests.gateway.conftest import EVALUATED_SPEC, RUN, life

GRAFANA = Path(__file__).parents[2] / "deploy/grafana"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}
VARIABLES = {"${run}": RUN, "${metric:sqlstring}": "'train/loss'"}


def statements() -> list[tuple[str, str]]:
    run = DASHBOARDS["run"]
    found = [(f"variable {v['name']}", v["query"]) for v in run["templating"]["list"]]
    return found + [(p["title"], t["rawSql"]) for p in run["panels"] for t in p.get("targets", []) if "rawSql" in t]


def filled_in(statement: str) -> str:
    for variable, value in VARIABLES.items():
        statement = statement.replace(variable, value)
    return statement


async def test_every_statement_runs_and_finds_something(bus: Bus, settings: Settings) -> None:
    own = GatewaySettings(**settings.model_dump())
    for event in life(spec=EVALUATED_SPEC):
        await bus.publish(event)
    system = RunProgress(
        run_id=RUN,
        generation=2,
        node_id="n1",
        rank=0,
        offset=0,
        kind="system",
        points=(ProgressPoint(step=0, time=1000.5, values={"system/cpu": 0.5}),),
    )
    await bus.publish(system)
    async with Store(own.database_url) as store:
        projection = Projection(bus, store)
        await projection.adopt()
        for stream in STREAMS:
            await projection.run(stream, until_caught_up=True)
        for where, statement in statements():
            rows: list[Any] = await store.fetch(sa.text(filled_in(statement)))
            assert rows, f"{where}: nothing found by {statement}"
            if "time_series" in statement:
                assert "time" in rows[0]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboards_are_whole(name: str) -> None:
    dashboard = DASHBOARDS[name]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/trainbus.yml").read_text())["datasources"]
    uids = {source["uid"] for source in sources}
    used = {target["datasource"]["uid"] for panel in dashboard["panels"] for target in panel.get("targets", [])}
    assert used <= uids
    boxes = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    cells = [(x, y) for b in boxes for x in range(b["x"], b["x"] + b["w"]) for y in range(b["y"], b["y"] + b["h"])]
    assert len(cells) == len(set(cells)), "panels lie upon each other"


def test_variables_are_all_known_here() -> None:
    """A variable that this test does not fill in would be checked by nobody."""
    used = {found for _, statement in statements() for found in re.findall(r"\$\{[^}]*\}", statement)}
    assert used == set(VARIABLES)
