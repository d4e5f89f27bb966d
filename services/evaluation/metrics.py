"""The evaluation service's metrics. Labels are bounded: never a run or a model."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.kit.metrics import counter

REQUESTED = counter(
    "trainbus_evaluations_requested_total",
    "Evaluation runs asked for, by what they measure: candidate, champion (on another dataset).",
    target=("candidate", "champion"),
)
DECIDED = counter(
    "trainbus_promotions_decided_total",
    "What became of candidates and operators' requests: promoted, not_promoted, by_request, rolled_back.",
    outcome=("promoted", "not_promoted", "by_request", "rolled_back"),
)
CONFLICTS = Counter(
    "trainbus_promotion_conflicts_total", "Decisions made again because the champion had changed meanwhile."
)
OPEN = Gauge("trainbus_evaluation_open_candidates", "Completed trainings whose promotion is not decided yet.")
AWAITING = Gauge("trainbus_evaluation_awaiting_candidates", "Candidates whose promotion waits for a person's answer.")
REPORT_SECONDS = Histogram(
    "trainbus_evaluation_report_seconds",
    "Making and storing a report.",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
