"""The metrics that a run's training has reported."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from contracts import subjects, topology
from contracts.events.run import RunProgress
from trainbus.client.connection import Connection


class MetricPoint(NamedTuple):
    """The value of one metric at one step."""

    step: int
    value: float
    #: When the trainer measured it, UTC.
    time: datetime


async def read_metrics(connection: Connection, run_id: str) -> dict[str, list[MetricPoint]]:
    """Return metric name -> points in the order of their steps.

    A step that was trained again after a restart has the value of the newest placement. The bus keeps points for
    14 days; MLflow keeps them for good.
    """
    newest: dict[tuple[str, int], tuple[int, MetricPoint]] = {}
    for message in await connection.read(subjects.progress(run_id), stream=topology.PROGRESS):
        event: RunProgress = message.event
        if event.kind != "training":
            continue
        for point in event.points:
            for name, value in point.values.items():
                known = newest.get((name, point.step))
                if known is None or known[0] <= event.generation:
                    found = MetricPoint(point.step, value, datetime.fromtimestamp(point.time, UTC))
                    newest[name, point.step] = event.generation, found
    series: dict[str, list[MetricPoint]] = {}
    for (name, _), (_, measured) in sorted(newest.items()):
        series.setdefault(name, []).append(measured)
    return series
