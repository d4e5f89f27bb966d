"""How long a run has slots: by its limit, else as long as those of its kind took."""

from __future__ import annotations

from datetime import datetime

from contracts.scheduling import Policy
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import Run


def expected_s(
    cluster: Cluster, run: Run, now: datetime, policy: Policy, quantile: float | None = None
) -> tuple[float, bool]:
    """How long the run has slots, all in all, at most; and whether that is a limit.

    ``quantile``: with what probability it is no longer than that; None: with that of the policy's reservations.
    """
    limit_s = run.spec.scheduling.limit_s
    if limit_s is not None:
        return limit_s, True
    share = policy.reserve.quantile if quantile is None else quantile
    return cluster.history.predict(run.kind, policy.predict).quantile(share, run.ran_s(now)), False


def left_s(cluster: Cluster, run: Run, now: datetime, policy: Policy, quantile: float | None = None) -> float:
    """How long the run still needs slots, at most."""
    return max(expected_s(cluster, run, now, policy, quantile)[0] - run.ran_s(now), 0.0)


def expected_end_s(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> tuple[float, bool]:
    """Return when an allocated run releases its slots (seconds since the epoch); and whether limits say so."""
    expected, firm = expected_s(cluster, run, now, policy)
    grace_s = run.spec.grace_s if firm else 0.0
    if run.stopping is not None:
        return max(run.stopping_at.timestamp() + run.stopping.grace_s, now.timestamp()), True
    left = expected - run.ran_s(now)
    if left <= 0 and not firm:
        # It has outlived what was expected of it: as long again as it has run.
        left = max(run.ran_s(now), 1.0)
    return now.timestamp() + max(left, 0.0) + grace_s, firm
