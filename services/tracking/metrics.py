"""The tracking service's own metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.kit.metrics import LATENCY_BUCKETS, counter

BEHIND = Gauge("trainbus_tracking_behind", "Facts that are not in MLflow yet (messages pending or in work).")
OUTAGE = Gauge("trainbus_tracking_mlflow_away", "1 while MLflow does not answer; facts wait, none is lost.")
RETRIES = Counter("trainbus_tracking_retries_total", "MLflow calls tried again because MLflow did not answer.")
CALL_SECONDS = Histogram(
    "trainbus_tracking_call_seconds", "Time one MLflow operation took.", ["operation"], buckets=LATENCY_BUCKETS
)
POINTS = Counter("trainbus_tracking_points_total", "Metric points written to MLflow.")
DROPPED = Counter(
    "trainbus_tracking_points_dropped_total", "Metric points that MLflow cannot store (impossible step or time)."
)
ALIASES_MOVED = counter(
    "trainbus_tracking_aliases_moved_total",
    "Aliases of models that somebody has moved in MLflow, by what was done: repaired or reported.",
    outcome=("repaired", "reported"),
)
