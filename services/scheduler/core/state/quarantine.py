"""What is in quarantine: runs and nodes on which a step failed (see ``core/quarantine.py``)."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Literal

from services.scheduler.core.state.cluster import Cluster, QuarantineRecord
from services.scheduler.core.state.index import Index
from services.scheduler.core.state.run import Phase

MAX_TEXT = 500


def quarantine_run(cluster: Cluster, run_id: str, step: Literal["fold", "cycle"], reason: str) -> None:
    """Take the run out of every cycle. It keeps its slots, since its ranks may still run."""
    cluster.quarantined_runs[run_id] = QuarantineRecord(step, reason)
    for members in (cluster.unqueued, cluster.queued, cluster.active, cluster.promised):
        members.pop(run_id, None)
    reset_index(cluster)


def release_run(cluster: Cluster, run_id: str) -> None:
    """Return the run to the cycles."""
    cluster.quarantined_runs.pop(run_id, None)
    run = cluster.runs.get(run_id)
    if run is None:
        return
    if run.phase in (Phase.PREPARING, Phase.READY):
        cluster.unqueued[run_id] = None
    elif run.phase is Phase.QUEUED:
        cluster.queued[run_id] = None
    elif not run.terminal or run.live:
        cluster.active[run_id] = None
    reset_index(cluster)


def quarantine_node(cluster: Cluster, node_id: str, step: Literal["fold", "cycle"], reason: str) -> None:
    """Place nothing on the node until it joins again."""
    cluster.quarantined_nodes[node_id] = QuarantineRecord(step, reason)
    if (node := cluster.nodes.get(node_id)) is not None:
        node.quarantined = True
    reset_index(cluster)


def release_node(cluster: Cluster, node_id: str) -> None:
    """Return the node to the cycles."""
    cluster.quarantined_nodes.pop(node_id, None)
    if (node := cluster.nodes.get(node_id)) is not None:
        node.quarantined = False
    reset_index(cluster)


def describe_error(error: BaseException) -> str:
    """Return the error in one line, with the place in the code where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:MAX_TEXT] + place


def reset_index(cluster: Cluster) -> None:
    """Forget what earlier cycles remembered: a cycle that failed may have left it half changed."""
    cluster.index = Index()
    for run_id in (*cluster.unqueued, *cluster.active, *cluster.queued):
        cluster.index.touch(run_id)
