"""An empty MLflow filled again from the facts: ``trainbus replay tracking --into URI``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from contracts import topology
from contracts.events.model import ModelFact, ModelPromoted
from contracts.events.run import RunAccepted
from services.kit.bus import Bus, PoisonMessage
from services.tracking.app import Projector
from services.tracking.settings import TrackingSettings
from services.tracking.store import Store


@dataclass(slots=True)
class ReplaySummary:
    """What was written, and what could not be."""

    runs: int = 0
    promotions: int = 0
    #: One text each.
    problems: tuple[str, ...] = ()


async def replay_tracking(bus: Bus, settings: TrackingSettings) -> ReplaySummary:
    """Write every run, model and alias of the log into the MLflow that the settings name.

    The service's own code does it, run after run in the order of their requests, and publishes nothing. A replay that
    was interrupted goes on when it is started again. Points are there as far back as the stream of progress goes.
    """
    store = Store(settings.tracking_uri, settings.artifact_location)
    summary, problems = ReplaySummary(), list[str]()
    runs = await bus.read_history(RunAccepted.subject_filter())
    events = [event for event in topology.TRACKING.events if issubclass(event, ModelFact)]
    facts = await bus.read_history(*(event.subject_filter() for event in events))
    promotions = [received.event for received in facts if isinstance(received.event, ModelPromoted)]
    async with Projector(bus, settings, store, asyncio.Event(), announces=False) as projector:
        for received in runs:
            try:
                await projector.project_run(received.event.run_id)
            except PoisonMessage as error:
                problems.append(f"run {received.event.run_id}: {error}")
            summary.runs += 1
        for promotion in promotions:
            try:
                await projector.project_promotion(promotion)
            except PoisonMessage as error:
                problems.append(f"version {promotion.version} of model {promotion.model}: {error}")
            summary.promotions += 1
        for model in sorted({received.event.model for received in facts}):
            await projector.project_aliases(model)
    summary.problems = tuple(problems)
    return summary
