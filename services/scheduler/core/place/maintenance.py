"""Maintenance windows: nodes that must be empty for a while."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from contracts.scheduling import Maintenance


def concerns(window: Maintenance, node_id: str, labels: Mapping[str, str]) -> bool:
    """Whether the window is about this node. One that names neither nodes nor labels is about all of them."""
    if window.node_ids or not window.labels:
        return not window.node_ids or node_id in window.node_ids
    return all(labels.get(name) == value for name, value in window.labels.items())


def closed(
    node_id: str,
    labels: Mapping[str, str],
    window: Maintenance,
    now: datetime,
    expected_end: datetime | None,
) -> bool:
    """Whether nothing may start on the node that is expected to last until then; None: for ever."""
    if now >= window.end or not concerns(window, node_id, labels):
        return False
    return expected_end is None or expected_end > window.start


def leave_by(node_id: str, labels: Mapping[str, str], windows: Iterable[Maintenance], now: datetime) -> datetime | None:
    """When the node must be empty next, which is past while it is in maintenance; None: no window is ahead."""
    ahead = (each.start for each in windows if each.end > now and concerns(each, node_id, labels))
    return min(ahead, default=None)


def must_leave(
    node_id: str, labels: Mapping[str, str], windows: Iterable[Maintenance], now: datetime, grace_s: float
) -> bool:
    """Whether a run with this grace time must begin to release its slots now."""
    start = leave_by(node_id, labels, windows, now)
    return start is not None and now >= start - timedelta(seconds=grace_s)
