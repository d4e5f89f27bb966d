"""A run's progress comes from its newest training points, not from later measurements of its nodes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from contracts.envelope import Envelope
from contracts.events.run import ProgressPoint, RunProgress
from trainbus.client.connection import Connection
from trainbus.client.runs import NEWEST_PROGRESS, add_progress
from trainbus.client.stored_event import StoredEvent
from trainbus.client.views import RunView

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class FakeConnection:
    """A stream PROGRESS with one run alone in it."""

    stored: list[StoredEvent] = field(default_factory=list)

    def add(self, kind: Any, step: int, generation: int = 2, **values: float) -> None:
        sequence = len(self.stored) + 1
        points = (ProgressPoint(step=step, time=float(sequence), values=values),)
        event = RunProgress(
            run_id="r1",
            generation=generation,
            node_id="a",
            rank=0,
            offset=sequence,
            points=points,
            kind=kind,
            step=step,
        )
        envelope = Envelope(id=event.event_id, source="test", type=event.type, time=NOW)
        self.stored.append(StoredEvent(sequence, event.subject, envelope, event))

    async def read_last(self, _stream: Any, _subject: str) -> StoredEvent | None:
        return self.stored[-1] if self.stored else None

    async def read(self, *_filters: str, stream: Any, start_sequence: int) -> list[StoredEvent]:
        return self.stored[start_sequence - 1 :]


@pytest.mark.parametrize(
    ("measurements_since", "generation", "step"),
    [
        pytest.param(0, 2, 40, id="training is the newest"),
        pytest.param(1, 2, 40, id="a measurement is the newest"),
        pytest.param(3 * NEWEST_PROGRESS, 2, 40, id="training is far back"),
        pytest.param(1, 3, 7, id="nothing yet of this generation"),
    ],
)
def test_where_a_run_is(measurements_since: int, generation: int, step: int) -> None:
    log = FakeConnection()
    log.add("training", 20, **{"validation/accuracy": 0.5})
    log.add("training", 40, **{"train/loss": 0.1})
    for _ in range(measurements_since):
        log.add("system", 0, cpu=1.0)
    view = RunView("r1", generation=generation, step=7)
    asyncio.run(add_progress(cast(Connection, log), view))
    assert view.step == step
    if generation == 2 and measurements_since < NEWEST_PROGRESS:
        assert view.metrics == {"validation/accuracy": 0.5, "train/loss": 0.1}
