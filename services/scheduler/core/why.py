"""What is answered to whoever asks why a run waits: now, or as things stood in the past."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from contracts.scheduling import Policy
from services.scheduler.core import explain
from services.scheduler.core.cluster import EPOCH, Cluster
from services.scheduler.core.decide import plan


def answer(
    cluster: Cluster, run_id: str, now: datetime, policy: Policy, hearing_since: datetime = EPOCH
) -> dict[str, Any]:
    """What can be said about a run: its state, the constraint that binds it, and a sentence."""
    run = cluster.runs.get(run_id)
    # Only a run that waits needs a look at all the others.
    waits = run is not None and not run.parts and not run.terminal
    return explain.state(
        cluster, run_id, plan(cluster, now, policy, hearing_since, about=run_id).waits if waits else {}
    )
