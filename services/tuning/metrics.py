"""The tuning service's metrics. Labels are bounded: never a study or a run."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.kit.metrics import counter

STUDIES = counter(
    "trainbus_studies_total",
    "Studies by what became of their requests: accepted, rejected, completed, stopped.",
    outcome=("accepted", "rejected", "completed", "stopped"),
)
TRIALS = counter(
    "trainbus_trials_total",
    "Steps of trials: suggested, resumed, paused, pruned, completed, failed, cancelled.",
    outcome=("suggested", "resumed", "paused", "pruned", "completed", "failed", "cancelled"),
)
OPEN = Gauge("trainbus_tuning_open_studies", "Studies that are neither completed nor stopped.")
CONFLICTS = Counter("trainbus_tuning_conflicts_total", "Decisions made again because another instance was first.")
SUGGEST_SECONDS = Histogram(
    "trainbus_tuning_decision_seconds",
    "Deciding what a study does next, a suggestion most often.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
