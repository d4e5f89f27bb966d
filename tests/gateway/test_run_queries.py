"""Runs in pages, as the read model finds them."""

from __future__ import annotations

import pytest

from services.gateway import queries
from services.gateway.core.fold import Rows
from services.gateway.core.rows import Run
from services.gateway.queries import RunFilter
from services.gateway.settings import GatewaySettings
from services.gateway.store import Store
from tests.gateway.test_checkpoint_queries import explain
from tests.gateway.test_postgres import on_postgres, postgres_url

__all__ = ["on_postgres", "postgres_url"]
TEAMS = ("text", "text/small", "text/large", "textile", "vision")


async def read_all(store: Store, wanted: RunFilter) -> list[str]:
    """Return the ids of all pages."""
    found: list[str] = []
    cursor = None
    while True:
        page = await queries.list_runs(store, wanted, limit=3, cursor=cursor)
        found += [run.run_id for run in page.runs]
        if page.next_cursor is None:
            return found
        cursor = page.next_cursor


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.needs("postgres"))])
async def test_runs_of_a_team_and_of_its_parts_come_in_one_order(
    database: str, gateway_settings: GatewaySettings, request: pytest.FixtureRequest
) -> None:
    settings = gateway_settings if database == "sqlite" else request.getfixturevalue("on_postgres")
    runs = [
        Run(f"r{number:02}", state=("running", "queued", "failed")[number % 3], team=team, requested_at=1000.0 + number)
        for number, team in enumerate(TEAMS * 6)
    ]

    def newest_first(*teams: str, states: tuple[str, ...] = ("running", "queued", "failed")) -> list[str]:
        return [run.run_id for run in reversed(runs) if run.team in teams and run.state in states]

    async with Store(settings.database_url) as store:
        async with store.engine.begin() as connection:
            await store.save(connection, Rows(), Rows(runs={run.run_id: run for run in runs}))
        of_text = ("text", "text/small", "text/large")
        assert await read_all(store, RunFilter(team="text")) == newest_first(*of_text)
        assert await read_all(store, RunFilter(team="text/small")) == newest_first("text/small")
        assert await read_all(store, RunFilter(team="text*")) == newest_first(*of_text, "textile")
        waiting = ("running", "queued")
        assert await read_all(store, RunFilter(states=waiting, team="text")) == newest_first(*of_text, states=waiting)


async def test_runs_without_trials_and_studies_with_a_live_one_are_found_by_indexes(
    gateway_settings: GatewaySettings,
) -> None:
    async with Store(gateway_settings.database_url) as store:
        plan = await explain(store, queries.ids_query(RunFilter(trials=False), 51, []))
        ended = await explain(store, queries.ids_query(RunFilter(("failed", "completed"), trials=False), 21, []))
        studies = await explain(store, queries.studies_query(RunFilter(("running", "queued")), []).limit(21))
    assert "ix_runs_study_requested_at_run_id (study=?)" in plan
    assert "ix_runs_study_state_requested_at_run_id (study=? AND state=?)" in ended
    assert "ix_runs_study_state_requested_at_run_id (study=? AND state=?)" in studies
    assert "SCAN runs" not in plan + ended + studies


async def test_the_runs_of_a_team_are_not_all_read_for_a_page(gateway_settings: GatewaySettings) -> None:
    async with Store(gateway_settings.database_url) as store:
        plan = await explain(store, queries.ids_query(RunFilter(team="text"), 51, []))
    assert "MULTI-INDEX OR" not in plan
    assert "(team=?)" in plan
    assert "SCAN runs" not in plan
