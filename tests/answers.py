"""What clients see of a stack: the gateway's read model of some facts, as the client reads its answers."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from contracts.base import Fact
from contracts.texts import describe
from services.gateway import queries
from services.gateway.core.fold import At, Rows, apply
from services.gateway.store import Store
from trainbus.client.run_list import read_node, read_view
from trainbus.client.views import NodeView, RunView

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Answers:
    """The views of runs and nodes by their ids."""

    runs: dict[str, RunView]
    nodes: dict[str, NodeView]


def read_answers(*facts: Fact) -> Answers:
    """Return what is seen once these facts are in the log, one a second from START on."""
    return asyncio.run(_read_answers(facts))


async def _read_answers(facts: Sequence[Fact]) -> Answers:
    rows, events = Rows(), []
    for number, fact in enumerate(facts, start=1):
        at = At(number, (START + timedelta(seconds=number)).timestamp())
        apply(rows, fact, at)
        events.append(
            {
                "sequence": number,
                "time": at.time_s,
                "subject": fact.subject,
                "type": fact.type,
                "event_id": fact.event_id,
                "causation_id": "",
                "correlation_id": "",
                "run_id": getattr(fact, "run_id", None),
                "summary": describe(fact),
                "data": fact.to_plain(),
            }
        )
    with tempfile.TemporaryDirectory() as folder:
        async with Store(f"sqlite+aiosqlite:///{Path(folder) / 'rows.sqlite'}") as store:
            async with store.engine.begin() as connection:
                await store.save(connection, Rows(), rows)
                await store.add_events(connection, events)
            details = [await queries.run_detail(store, run_id) for run_id in rows.runs]
            nodes = (await queries.list_nodes(store, limit=len(rows.nodes))).nodes
    views = [read_view(json.loads(each.model_dump_json())) for each in details]
    return Answers(
        {view.run_id: view for view in views},
        {each.node_id: read_node(json.loads(each.model_dump_json())) for each in nodes},
    )
